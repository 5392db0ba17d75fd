"""Inputs of the operators that more than one test file draws."""

from __future__ import annotations

import torch

from vllm.model_executor.models.kimi_k3_fast.ops.experts import torch_form as experts
from vllm.model_executor.models.kimi_k3_fast.ops.kda import torch_form as kda


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def kda_case(tokens: int, heads: int, dtype: torch.dtype, slots: int = 80):
    width, rank = heads * 128, 128
    a_log = normal(heads, scale=0.5)
    weights = kda.Weights(
        conv=normal(3 * width, 4, scale=0.5),
        f_b=normal(width, rank, dtype=dtype, scale=0.2),
        decay=a_log.exp().unsqueeze(1),
        dt_bias=normal(heads, 128),
        out_norm=normal(128),
        lower_bound=-5.0,
    )
    packed = normal(tokens, 4 * width + rank + heads + 5, dtype=dtype)
    return packed, normal(slots, 3, 3 * width, dtype=dtype), normal(slots, heads, 128, 128, scale=0.3), weights, a_log


def attend_case(lengths, heads, dtype, block=16, latent=64, shared=16, scale=1.0):
    lengths = torch.tensor(lengths)
    columns = max(1, -(-int(lengths.max()) // block))
    blocks = len(lengths) * columns + 1
    table = (torch.randperm(blocks - 1)[: len(lengths) * columns] + 1).view(len(lengths), columns).int()
    cache, query = (
        normal(blocks, block, latent + shared, dtype=dtype),
        normal(len(lengths), heads, latent + shared, dtype=dtype, scale=scale),
    )
    for t, length in enumerate(lengths.tolist()):  # behind a request's end: never read
        if length % block:
            cache[table[t, length // block], length % block :] = float("nan")
    return query, cache, table, lengths, latent


def expert_weights(count: int, latent: int, width: int, low: int = 118, high: int = 127) -> experts.Weights:
    byte = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8)  # noqa: E731
    scale = lambda *shape: torch.randint(low, high, shape, dtype=torch.uint8)  # noqa: E731
    return experts.Weights(
        byte(count, 2 * width, latent // 2),
        scale(count, 2 * width, latent // 32),
        byte(count, latent, width // 2),
        scale(count, latent, width // 32),
    )
