"""float64 reference of `moe_tail`, and the plain PyTorch form whose rounding error is the yardstick."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def tail(
    r: torch.Tensor, hidden: torch.Tensor, norm: torch.Tensor | None, up: torch.Tensor, down: torch.Tensor, eps: float
) -> torch.Tensor:
    """r [T, L], hidden [T, S], norm [L], up [D, L], down [D, S] -> [T, D] float64, not rounded: RMSNorm(r) up^T + hidden
    down^T. norm: None where r is normalised already.
    """
    r, hidden, up, down = (x.double() for x in (r, hidden, up, down))
    if norm is not None:
        r = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + eps) * norm.double()
    return r @ up.T + hidden @ down.T


def torch_form(
    r: torch.Tensor, hidden: torch.Tensor, norm: torch.Tensor | None, up: torch.Tensor, down: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same in bf16 as PyTorch writes it: norm rounded, two matmuls rounded, their sum rounded."""
    if norm is not None:
        x = r.float()
        r = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()).bfloat16()
    return linear(r, up) + linear(hidden, down)
