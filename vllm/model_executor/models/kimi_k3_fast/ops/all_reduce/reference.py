"""The sum over ranks and its norm in float64, and as they are rounded: FP32 in the order of ranks, then BF16."""

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


def exact_norm(parts: list[torch.Tensor], norm: torch.Tensor, eps: float) -> torch.Tensor:
    """norm [D]. Returns RMSNorm of the sum [T, D] float64: the shares of all ranks side by side. Nothing is rounded."""
    total = exact(parts)
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * norm.double()


def torch_norm(parts: list[torch.Tensor], norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as PyTorch writes it, bf16: the sum rounded, then the norm in fp32, rounded once."""
    total = in_order(parts).float()
    return (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * norm.float()).bfloat16()
