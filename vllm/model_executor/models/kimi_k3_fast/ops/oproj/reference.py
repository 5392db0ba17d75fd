"""float64 reference of `oproj`, and its plain PyTorch form in BF16."""

from __future__ import annotations

import torch


def oproj(ys: list[torch.Tensor], weights: list[torch.Tensor], prefix: torch.Tensor, update: str) -> torch.Tensor:
    """One y [T, K] and one weight [D, K] for each rank, prefix [T, D] -> the new prefix [T, D] in float64, not rounded."""
    total = sum(y.double() @ w.double().T for y, w in zip(ys, weights, strict=True))
    return total if update == "write" else prefix.double() + total


def torch_form(ys: list[torch.Tensor], weights: list[torch.Tensor], prefix: torch.Tensor, update: str) -> torch.Tensor:
    """What the standard path computes: a BF16 product on each rank, a BF16 all-reduce in the order of ranks, a BF16 sum."""
    total = ys[0] @ weights[0].T
    for y, w in zip(ys[1:], weights[1:], strict=True):
        total = total + y @ w.T
    return total if update == "write" else prefix + total
