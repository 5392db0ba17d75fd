"""Muon for the hidden matrices, fused AdamW for the rest.

Muon (Jordan et al., 2024) replaces a matrix's momentum by its nearest semi-orthogonal matrix, found by a quintic Newton-Schulz
iteration. Matrices of one shape are stacked so that the iteration is a few batched products.
"""

from collections import defaultdict

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(m: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, cols] -> the same shape with singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    x = m.to(torch.bfloat16 if m.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(m.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; 3-D parameters are stacks of matrices. Update RMS is scaled to sqrt(rows/cols), at
    least 1. `lr` is a tensor, so that a step captured in a CUDA graph follows its value."""

    def __init__(self, params: list[Tensor], lr: Tensor, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for p in params:
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape[-2:]].append(p)
            for shape, params in by_shape.items():
                grads = [p.grad for p in params]
                momenta = [self.state[p]["momentum"] for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])
                stacked = orthogonalise(torch.cat([m.reshape(-1, *shape) for m in nesterov]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                updates = [
                    u.reshape(p.shape)
                    for u, p in zip(stacked.split([p.numel() // shape.numel() for p in params]), params, strict=True)
                ]
                torch._foreach_mul_(updates, group["lr"] * -scale)
                torch._foreach_add_(params, updates)
