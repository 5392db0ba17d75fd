"""The gated activations of the family: SiTU (Kimi K3) and SiLU (Kimi-Linear)."""

from __future__ import annotations

import torch

from .config import K3Config


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """SiTU(g, u) = beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta); `None` leaves u unbounded.

    Any shape, the same for both; computed in fp32 (float64 stays float64), returned in the input's dtype.
    """
    g, u = _widen(gate), _widen(up)
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded).to(gate.dtype)


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(g) * u, computed and returned as in `situ`."""
    g = _widen(gate)
    return (g * torch.sigmoid(g) * _widen(up)).to(gate.dtype)


def gated(config: K3Config, gate_up: torch.Tensor) -> torch.Tensor:
    """Apply the configured activation to a fused [..., 2 n] projection whose first half is the gate; returns [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if config.hidden_act == "situ":
        return situ(gate, up, config.situ_beta, config.situ_linear_beta)
    return silu(gate, up)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
