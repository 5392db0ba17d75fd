"""AttnRes in plain PyTorch, all requests of a decode step at once; it rounds where the model rounds.""" ""

from __future__ import annotations

import torch


def mix(sources: torch.Tensor, score: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax mixture of the sources of one AttnRes.

    sources: [n, T, D] fp32, closed blocks first, the running prefix last. score: [D] fp32, norm weight times projection row.
    Returns [T, D] fp32: sum_j softmax_j(rsqrt(mean(s_j^2) + eps) * <s_j, score>) s_j; the prefix itself when n is 1.
    """
    if sources.shape[0] == 1:
        return sources[0]
    inverse = torch.rsqrt(sources.square().mean(-1) + eps)
    weights = torch.softmax(inverse * (sources @ score), dim=0)
    return torch.einsum("nt,ntd->td", weights, sources)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x [..., D] fp32 or narrower, weight [D] fp32 -> `dtype`: x * rsqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)
