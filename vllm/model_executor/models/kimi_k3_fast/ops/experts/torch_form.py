"""Routed MXFP4 experts in plain PyTorch: pairs grouped by expert, each chosen expert decoded once.

MXFP4: byte b of a row holds the even column in bits 0-3, the odd one in bits 4-7; E2M1 values {0, .5, 1, 1.5, 2, 3, 4, 6}
with the sign in bit 3; one E8M0 scale s for 32 columns: w = value * 2^(s - 127).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP = 32
RAW, HUMMING = "raw", "humming"  # the checkpoint's layout, and stock's on Hopper: see `humming`


@dataclass(frozen=True)
class Weights:
    """One layer's local experts, uint8: w13 [E, 2*I, L/2], gate rows first; s13 [E, 2*I, L/32]; w2 [E, L, I/2]; s2 [E, L,
    I/32]. In the layout `humming`: w13 [E, L/16, 4*I] and w2 [E, I/16, 2*L] int32; s13 [E, L/32, 2*I] and s2 [E, I/32, L] uint8,
    padded, so that I is told by `inner`; `pitch` are the rows from the first of gate to the first of up, where that is not I.
    """

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    layout: str = field(default=RAW, kw_only=True)
    inner: int = field(default=0, kw_only=True)
    pitch: int = field(default=0, kw_only=True)

    @property
    def width(self) -> int:
        """I."""
        return self.inner or self.w13.shape[1] // 2

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.s13, self.w2, self.s2))


@functools.cache
def _pairs_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2] value table of a byte: even column, odd column."""
    values = torch.tensor(E2M1)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).to(device, dtype)


def decode(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """packed [N, K/2] uint8 and scales [N, K/32] uint8 -> [N, K] in `dtype`; exact in both, since 2^e times E2M1 fits."""
    values = _pairs_table(dtype, packed.device)[packed.int()].view(packed.shape[0], -1, GROUP)
    factor = torch.exp2(scales.float() - 127.0).to(dtype)
    return (values * factor.unsqueeze(-1)).view(packed.shape[0], -1)


def run(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: Weights, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """x [T, L], ids [T, k] int64, weights [T, k] fp32 -> [T, L] in x's dtype: sum_k weight_k w2_k act(w13_k x), in slot order.

    A negative id is a padded row's: it contributes nothing.
    """
    tokens, top_k = ids.shape
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    chosen, counts = torch.unique_consecutive(flat[order], return_counts=True)
    results = x.new_zeros(tokens * top_k, x.shape[1])
    for expert, pairs in zip(chosen.tolist(), order.split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        hidden = activation(x[pairs // top_k] @ decode(w.w13[expert], w.s13[expert], x.dtype).T)
        results[pairs] = hidden @ decode(w.w2[expert], w.s2[expert], x.dtype).T
    return torch.einsum("tkl,tk->tl", results.view(tokens, top_k, -1).float(), weights).to(x.dtype)
