"""Routed experts from their equations, in float64, and the grouping of pairs that the grouped schedule expects."""

from __future__ import annotations

import torch

from . import Config, Routing
from .torch_form import E2M1, Weights


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., N, K/2] and scales [..., N, K/32], uint8 -> [..., N, K] float64: w = E2M1(nibble) * 2^(s - 127), NaN where
    s = 255.
    """
    table = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    factor = torch.exp2(scales.double() - 127.0)
    factor[scales == 255] = torch.nan
    return table[nibbles.int()] * factor.repeat_interleave(32, dim=-1)


def hidden(config: Config, weights: Weights, z: torch.Tensor, expert: int) -> torch.Tensor:
    """z [n, L] -> [n, I] float64, unrounded: b tanh(g/b) sigmoid(g) lb tanh(u/lb) of g = w1 z, u = w3 z."""
    gate, up = (z.double() @ decode(weights.w13[expert], weights.s13[expert]).T).chunk(2, dim=-1)
    lb = config.linear_beta
    bounded = up if lb is None else lb * torch.tanh(up / lb)
    return config.beta * torch.tanh(gate / config.beta) * torch.sigmoid(gate) * bounded


def experts(config: Config, weights: Weights, z: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, L] float64: r = sum_k weight_k w2_k hidden_k; rows from num_tokens on are zero."""
    out = torch.zeros(config.tokens, config.hidden, dtype=torch.float64, device=z.device)
    for token in range(int(routing.num_tokens)):
        for slot in range(config.top_k):
            expert = int(routing.ids[token, slot])
            inner = hidden(config, weights, z[token : token + 1], expert)
            out[token] += routing.weights[token, slot].double() * (inner @ decode(weights.w2[expert], weights.s2[expert]).T)[0]
    return out


def group(config: Config, ids: torch.Tensor, weights: torch.Tensor, num_tokens: int) -> Routing:
    """The routing with its pairs grouped by expert; ids [T, k] int32, weights [T, k] fp32."""
    device = ids.device
    valid = ids[:num_tokens].flatten().long()
    counts = torch.bincount(valid, minlength=config.experts)
    offsets = torch.zeros(config.experts + 1, dtype=torch.int32, device=device)
    offsets[1:] = counts.cumsum(0)
    pairs = torch.zeros(config.pairs, dtype=torch.int32, device=device)
    pairs[: valid.numel()] = torch.argsort(valid, stable=True).int()
    chosen = torch.nonzero(counts).flatten().int()
    active = torch.zeros(config.experts, dtype=torch.int32, device=device)
    active[: chosen.numel()] = chosen

    def scalar(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    return Routing(ids, weights, scalar(num_tokens), offsets, pairs, active, scalar(chosen.numel()))
