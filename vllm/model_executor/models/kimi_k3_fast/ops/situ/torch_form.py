"""SiTU, the bounded activation of K3's dense, shared and routed MLPs, in plain PyTorch."""

from __future__ import annotations

import torch


def situ(gate_up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """gate_up [..., 2*I], gate first -> [..., I]: b tanh(g/b) sigmoid(g) * (lb tanh(u/lb) or u), in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded).to(gate_up.dtype)
