"""MLA decode from its equations, in float64, and the plain PyTorch form in the model's dtypes that serves as the yardstick."""

from __future__ import annotations

import torch
from torch import Tensor

NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to E4M3, saturating at 448, in the dtype of x."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)


class Rounding:
    """Where the model rounds: `bf` to bf16 in the plain form and nowhere in float64; the cache's own format in both."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def bf(self, x: Tensor) -> Tensor:
        return x if self.dtype == torch.float64 else x.bfloat16().to(self.dtype)


def query(
    x: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The absorbed query [T, h, 576] and this step's cache rows [T, 576], before the cache's format and scales. Shapes are
    those of the op."""
    bf = Rounding(dtype).bf
    heads, rank = w_uk.shape[0], q_norm.numel()
    x, q_b, w_uk = x.to(dtype), q_b.to(dtype), w_uk.to(dtype)
    q_c = bf(rms_norm(x[:, :rank], q_norm.to(dtype), eps))
    c = bf(rms_norm(x[:, rank : rank + LATENT], kv_norm.to(dtype), eps))
    q = bf(q_c @ q_b.T).view(-1, heads, NOPE + ROPE)
    absorbed = bf(torch.einsum("thn,hnc->thc", q[..., :NOPE], w_uk))
    row = torch.cat([c, x[:, rank + LATENT : rank + LATENT + ROPE]], dim=1)
    return torch.cat([absorbed, q[..., NOPE:]], dim=2), row


def attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    queries: int = 1,
    scale: float = (NOPE + ROPE) ** -0.5,
    value_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Latent [T, h, 512] and natural log-sum-exp [T, h]. `cache` holds numbers (an FP8 cache widened); its scales are in the
    two factors."""
    bf = Rounding(dtype).bf
    heads, block = query.shape[1], cache.shape[1]
    latent = torch.zeros(*query.shape[:2], LATENT, dtype=dtype)
    lse = torch.full(query.shape[:2], -float("inf"), dtype=dtype)
    for request in range(table.shape[0]):
        length = int(lengths[request])
        rows = cache[table[request, : -(-length // block)].long()].reshape(-1, LATENT + ROPE)[:length].to(dtype)
        for i in range(queries):
            token, visible = request * queries + i, length - (queries - 1 - i)
            if visible <= 0:
                continue
            scores = query[token].to(dtype) @ rows[:visible].T * scale
            lse[token] = torch.logsumexp(scores, dim=1)
            weights = torch.softmax(scores, dim=1)
            latent[token] = bf(bf(weights) @ rows[:visible, :LATENT] * value_scale)
    assert latent.shape[1] == heads
    return latent, lse


def value(x: Tensor, latent: Tensor, w_uv: Tensor, *, rank: int = 1536, dtype: torch.dtype = torch.float64) -> Tensor:
    """y [T, h 128] from latent [T, h, 512]."""
    bf = Rounding(dtype).bf
    v = bf(torch.einsum("thc,hvc->thv", latent.to(dtype), w_uv.to(dtype)))
    start = rank + LATENT + ROPE
    gate = x[:, start : start + v.shape[1] * VALUE].to(dtype)
    return bf(v.reshape(x.shape[0], -1) * torch.sigmoid(gate))
