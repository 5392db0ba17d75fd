"""float64 reference of `attn_res`, and the plain PyTorch form whose rounding error is the yardstick."""

from __future__ import annotations

import torch

from . import Config


def updated(config: Config, delta: torch.Tensor, blocks: torch.Tensor, prefix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New (blocks, prefix) in bf16: the pending delta added, and the block closed if this layer closes one. Inputs stay as they
    are.
    """
    blocks, prefix, t = blocks.clone(), prefix.clone(), config.tokens
    if config.has_delta:
        prefix[:t] = (prefix[:t].float() + delta.float()).bfloat16()
    if config.write >= 0:
        blocks[config.write, :t] = prefix[:t]
    return blocks, prefix


def mix(
    config: Config, score: torch.Tensor, norm: torch.Tensor, blocks: torch.Tensor, prefix: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [T, D] in `dtype` arithmetic, not rounded, from the updated buffers."""
    t = config.tokens
    sources = torch.cat([blocks[: config.prev, :t], prefix[None, :t]]).to(dtype)
    score, norm = score.to(dtype), norm.to(dtype)
    mixed = sources[0]
    if config.prev:
        logits = torch.rsqrt(sources.square().mean(-1) + config.eps) * (sources * score).sum(-1)
        mixed = (torch.softmax(logits, 0)[..., None] * sources).sum(0)
    if config.normalise:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + config.eps) * norm
    return mixed
