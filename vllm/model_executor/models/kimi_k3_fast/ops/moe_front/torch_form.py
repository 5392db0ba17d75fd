"""Router and top-k in plain PyTorch."""

from __future__ import annotations

import torch


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, renormalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: s = sigmoid(logits), the top_k largest of s + bias, ties to the lower id, weights from s without the bias.

    logits: [T, E] fp32. bias: [E] fp32. Returns ids [T, top_k] int64 and weights [T, top_k] fp32, in order of choice.
    """
    scores = torch.sigmoid(logits)
    # A stable descending sort keeps the lower id of a tie first; torch.topk does not promise an order.
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling
