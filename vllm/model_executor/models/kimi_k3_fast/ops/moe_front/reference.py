"""float64 reference of `moe_front`, and the plain PyTorch form whose rounding error is the yardstick."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """b tanh(g / b) sigmoid(g) * (lb tanh(u / lb), or u without lb)."""
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


def front(
    m: torch.Tensor, router: torch.Tensor, down: torch.Tensor, gate_up: torch.Tensor, beta: float, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m [T, D], router [E, D], down [L, D], gate_up [2S, D] -> logits [T, E], z [T, L], hidden [T, S], float64, not rounded."""
    m, router, down, gate_up = (x.double() for x in (m, router, down, gate_up))
    gate, up = (m @ gate_up.T).chunk(2, dim=-1)
    return m @ router.T, m @ down.T, situ(gate, up, beta, linear_beta)


def torch_form(
    m: torch.Tensor, router: torch.Tensor, down: torch.Tensor, gate_up: torch.Tensor, beta: float, linear_beta: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as PyTorch writes it for bf16 weights: logits in fp32 arithmetic, z and gate_up rounded to bf16, SiTU in fp32
    and rounded.
    """
    gate, up = linear(m, gate_up).float().chunk(2, dim=-1)
    return linear(m.float(), router.float()), linear(m, down), situ(gate, up, beta, linear_beta).bfloat16()
