"""MXFP4 for the routed experts: fake quantisation with a straight-through gradient, and the packed form of the released
checkpoint.

Groups of 32 along the input dimension share one E8M0 scale 2^(s-127); values are E2M1. The exponent is the smallest with which
the group's largest magnitude still fits (6 * 2^e), so nothing saturates. Ties round to the even code.
"""

import torch
from torch import Tensor

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., in] -> scaled magnitudes with sign [..., in/32, 32] and exponents [..., in/32, 1]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2((amax / 6).clamp_min(2.0**-126)))
    return groups * torch.exp2(-exponent), exponent


def _round(scaled: Tensor) -> Tensor:
    """Nearest E2M1 value: steps of 0.5 below 2, of 1 below 4, of 2 up to 6."""
    mag = scaled.abs()
    step = torch.where(mag < 2, 0.5, torch.where(mag < 4, 1.0, 2.0))
    return torch.copysign((mag / step).round() * step, scaled).clamp(-6, 6)


def fake_quantize(weight: Tensor) -> Tensor:
    """The value the packed weight decodes to, with the gradient of the identity."""
    scaled, exponent = _split(weight.detach())
    decoded = (_round(scaled) * torch.exp2(exponent)).flatten(-2)
    return weight + (decoded - weight.detach())


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> (weight_packed uint8 [out, in/2], even column in the low nibble; weight_scale uint8 [out, in/32])."""
    scaled, exponent = _split(weight)
    value = _round(scaled).flatten(-2)
    code = torch.searchsorted(torch.tensor(VALUES, device=weight.device), value.abs().contiguous()).to(torch.uint8)
    code = code | (torch.signbit(value).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent.squeeze(-1) + 127).to(torch.uint8)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `pack`, in float32."""
    table = torch.tensor((*VALUES, *(-v for v in VALUES)), device=packed.device)
    value = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), -1).flatten(-2)
    return (value.unflatten(-1, (-1, GROUP)) * torch.exp2(scale.float() - 127)[..., None]).flatten(-2)
