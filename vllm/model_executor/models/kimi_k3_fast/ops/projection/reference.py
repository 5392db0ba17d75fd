"""float64 reference of `projection`."""

from __future__ import annotations

import torch


def projection(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """a [T, K], weight [N, K] -> [T, N] float64, not rounded."""
    return a.double() @ weight.double().T
