"""Absorbed MLA decode over the paged latent cache in plain PyTorch, all requests at once, the context in chunks.

A cache row is [c | k_pe]: the normalised latent (r values) and the shared key part, neither rotated. Per head:
    ql = q_nope W_UK;  score_s = (ql . c_s + q_pe . kpe_s) * scale;  lat = sum_s softmax(score)_s c_s;  v = lat W_UV^T
"""

from __future__ import annotations

import torch

CHUNK = 2048  # context rows gathered at once: bounds the copy at T * CHUNK * row bytes


def insert(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write rows [T, width] at flat token slots [T] int64 of the cache [blocks, block, width]; a negative slot is padding."""
    live = slot_mapping >= 0
    if not bool(live.all()):
        rows, slot_mapping = rows[live], slot_mapping[live]
    block = cache.shape[1]
    cache[slot_mapping // block, slot_mapping % block] = rows.to(cache.dtype)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
    longest: int,
) -> torch.Tensor:
    """Attention of one query token per request over its cached rows.

    query: [T, h, width] in the model's dtype, width = latent + shared key part. cache: [blocks, block, width].
    block_table: [T, max] int. lengths: [T] int, rows of each request, 0 for padding; longest: their maximum.
    Returns [T, h, latent] fp32; 0 for length 0.
    """
    tokens, heads, _ = query.shape
    block = cache.shape[1]
    query = query.float() * scale
    best = query.new_full((tokens, heads, 1), -torch.inf)
    total = query.new_zeros(tokens, heads, 1)
    out = query.new_zeros(tokens, heads, latent)
    for start in range(0, longest, CHUNK):
        position = torch.arange(start, min(start + CHUNK, longest))
        rows = cache[block_table[:, position // block].long(), position % block].float()
        visible = (position < lengths.unsqueeze(1)).unsqueeze(1)
        # Rows past a request's end are another request's or were never written: NaN there must not reach the sum through 0 * NaN.
        rows = torch.where(visible.transpose(1, 2), rows, 0.0)
        scores = torch.matmul(query, rows.transpose(1, 2)).masked_fill(~visible, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        safe = torch.where(new_best.isinf(), 0.0, new_best)
        weights = torch.exp(scores - safe)
        shrink = torch.exp(best - safe)
        out = out * shrink + torch.matmul(weights, rows[..., :latent])
        total = total * shrink + weights.sum(-1, keepdim=True)
        best = new_best
    return out / torch.where(total > 0, total, 1.0)
