"""KDA decode from its equations, in float64, and the plain PyTorch form in the model's dtypes that serves as the yardstick."""

from __future__ import annotations

import torch
from torch import Tensor

D = 128


def decode(
    x: Tensor,
    conv_weight: Tensor,
    f_b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    conv_state: Tensor,
    state: Tensor,
    accepted: Tensor | None = None,
    starts: Tensor | None = None,
    *,
    queries: int = 1,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """One decode or verify step. Returns y [T, h d] and the new conv_state and state, all in `dtype`; the inputs stay as they
    are.

    Shapes are those of the op. In float64 nothing is rounded. With `dtype` float32 this is the plain PyTorch form: f_b's output
    and the
    op's output are rounded to bf16, as the model defines.
    """
    heads = a_log.numel()
    width = heads * D
    y = torch.zeros(x.shape[0], width, dtype=dtype, device=x.device)
    conv_state, state = conv_state.to(dtype).clone(), state.to(dtype).clone()
    weight, a = conv_weight.to(dtype), a_log.to(dtype).exp()
    for row in range(slots.shape[0]):
        slot = int(slots[row, 0])
        window = int(accepted[row]) - 1 if accepted is not None else 0
        first = int(starts[row]) if starts is not None else row * queries
        count = int(starts[row + 1]) - first if starts is not None else queries
        if slot <= 0 or count == 0:
            continue
        source = int(slots[row, window])
        s = state[source].clone() if source > 0 else torch.zeros_like(state[0])  # [h, V, K]
        history = conv_state[slot, window : window + 3].clone()
        for i in range(count):
            raw = x[first + i].to(dtype)
            taken = torch.cat([history, raw[None, : 3 * width]])  # four raw inputs, oldest first
            mixed = (weight.T * taken).sum(0)
            q, k, v = (mixed * torch.sigmoid(mixed)).view(3, heads, D)
            q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * D**-0.5
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
            f_a = raw[4 * width : 4 * width + D]
            raw_g = f_b.to(dtype) @ f_a
            if dtype == torch.float32:
                raw_g = raw_g.bfloat16().float()
            z = (raw_g + dt_bias.to(dtype)).view(heads, D)
            if lower_bound is not None:
                g = lower_bound * torch.sigmoid(a[:, None] * z)
            else:
                g = -a[:, None] * torch.nn.functional.softplus(z)
            beta = torch.sigmoid(raw[4 * width + D : 4 * width + D + heads])
            s = s * g.exp()[:, None, :]
            u = beta[:, None] * (v - (s @ k[:, :, None])[:, :, 0])
            s = s + u[:, :, None] * k[:, None, :]
            o = (s @ q[:, :, None])[:, :, 0]
            normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + norm_eps) * norm_weight.to(dtype)
            gate = raw[3 * width : 4 * width].view(heads, D)
            y[first + i] = (normed * torch.sigmoid(gate)).view(-1)
            target = int(slots[row, i])
            if target > 0:
                state[target] = s
            history = taken[1:]
            if i == 0:
                conv_state[slot, :2] = history[:2]
            conv_state[slot, 2 + i] = history[2]
    if dtype == torch.float32:
        y = y.to(torch.bfloat16).to(dtype)
    return y, conv_state, state
