"""MXFP4 as the released checkpoint stores it: E2M1 nibbles with one E8M0 scale for every 32 columns.

Byte b of a row holds column 2b in bits 0-3 and column 2b + 1 in bits 4-7. A nibble is a sign bit (bit 3) and an index into
{0, .5, 1, 1.5, 2, 3, 4, 6}; a scale byte s means 2^(s - 127), and 255 is NaN. (OCP Microscaling Formats 1.0, 5.3.3 and 5.4.1)
"""

from __future__ import annotations

import functools

import torch

GROUP = 32
SCALE_BIAS = 127
SCALE_NAN = 255
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_EXPONENT = 2  # 6 = 1.5 * 2^2


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[256] a byte's two columns, fp32 each, as one number of 8 bytes; [256] fp32, a scale byte's factor. Most of a prompt's time
    goes into decoding, and a look-up of whole bytes halves it."""
    with torch.inference_mode(False):
        value = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
        byte = torch.arange(256)
        factor = torch.ldexp(torch.ones(256), byte - SCALE_BIAS)
        factor[SCALE_NAN] = float("nan")
        pairs = torch.stack((value[byte & 0xF], value[byte >> 4]), dim=-1).view(torch.float64).squeeze(-1)
        return pairs.to(device), factor.to(device)


def decode(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed uint8 [..., n / 2], scale uint8 [..., n / 32] -> [..., n] in `dtype`.

    Exact in BF16 and wider for scale bytes 2 to 252, where every value is a normal number. Byte 255 is NaN.
    """
    pairs, factors = _tables(packed.device)
    values = pairs[packed.int()].view(torch.float32).unflatten(-1, (-1, GROUP))
    return (values * factors[scale.int()].unsqueeze(-1)).flatten(-2).to(dtype)


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., n] (n a multiple of 32, finite) to (packed uint8 [..., n / 2], scale uint8 [..., n / 32]).

    The group's scale is the power of two that brings its largest magnitude into E2M1's top binade; values round to nearest and
    saturate at 6. Ties take the neighbour with the even code, as E2M1's last mantissa bit asks.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(
            f"MXFP4 needs a last dimension that is a multiple of {GROUP}; found shape {tuple(weight.shape)}. Pad it."
        )
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent)).clamp(-SCALE_BIAS, SCALE_BIAS)
    code = _nearest_code(torch.ldexp(groups.abs(), -exponent.unsqueeze(-1)))
    nibbles = (code | (torch.signbit(groups).to(torch.uint8) << 3)).flatten(-2)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.contiguous(), (exponent + SCALE_BIAS).to(torch.uint8)


def _nearest_code(magnitude: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(MAGNITUDES, device=magnitude.device)
    middles = (table[1:] + table[:-1]) / 2
    below = torch.searchsorted(middles, magnitude.contiguous(), right=False)  # a tie goes to the lower code
    tie = (below < len(middles)) & (magnitude == middles[below.clamp(max=len(middles) - 1)])
    return (below + (tie & (below % 2 == 1))).to(torch.uint8)
