"""The sum over ranks in float64, and as the kernel rounds it: FP32 in the order of ranks, then BF16."""

from __future__ import annotations

import torch


def exact(parts: list[torch.Tensor]) -> torch.Tensor:
    """parts: each rank's [T, D]. Returns [T, D] float64."""
    return torch.stack([part.double() for part in parts]).sum(0)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Bit for bit what every rank must hold, bf16."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.bfloat16()
