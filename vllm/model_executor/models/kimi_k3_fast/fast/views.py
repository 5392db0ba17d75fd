"""Views of a backbone's weights and bound caches: what the executor reads, whichever model class owns it.

A view copies nothing and changes nothing; where a layout has to be prepared (folded norms, split projections) the copy is
small and is counted in `Backbone.prepared_bytes`. Views of caches belong to one binding: vLLM binds the caches twice, once to
profile memory and once for real, and `Backbone.generation` says which binding these are of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ops.experts import torch_form as experts
from ..ops.kda import torch_form as kda


@dataclass(frozen=True)
class Mix:
    """One AttnRes: score [D] fp32 is its norm weight times its projection row. `norm` [D] fp32 is the RMSNorm that follows,
    None at the end.
    """

    score: torch.Tensor
    norm: torch.Tensor | None


@dataclass(frozen=True)
class Kda:
    """in_proj [q | k | v | gate | f_a | beta | pad, D]; conv_state [slots, 3, 3*h*d]; state [slots, h, d, d] fp32."""

    group: str  # the cache group's key in the step's metadata
    in_proj: torch.Tensor
    weights: kda.Weights
    o_proj: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class Mla:
    """in_proj [q_a | kv_a | k_pe | gate, D]; q_b [h*(n+p), q_a]; w_uk [h, n, r]; w_uv [h, v, r]; cache [blocks, block, r+p]."""

    group: str
    in_proj: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    norm_eps: float
    q_b: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    o_proj: torch.Tensor
    cache: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Dense:
    """gate_up [2*I, D], gate rows first; down [D, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Moe:
    """gate [E, D] fp32; bias [E] fp32; down [L, D]; norm [L] fp32 or None; up [D, L]; shared or None."""

    gate: torch.Tensor
    bias: torch.Tensor
    top_k: int
    renormalise: bool
    scaling: float
    down: torch.Tensor
    experts: experts.Weights
    norm: torch.Tensor | None
    up: torch.Tensor
    shared: Dense | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer; `closes` says that the running prefix becomes a block of AttnRes here."""

    index: int
    closes: bool
    attention_mix: Mix
    attention: Kda | Mla
    mlp_mix: Mix
    mlp: Dense | Moe


@dataclass(frozen=True)
class Backbone:
    """Everything a fast step reads. embed: ids [T] -> [T, D], reduced over ranks. reduce: sums a partial over the
    tensor-parallel group.
    """

    generation: int
    dtype: torch.dtype
    hidden: int
    eps: float
    situ_beta: float
    situ_linear_beta: float | None
    layers: tuple[Layer, ...]
    final_mix: Mix
    embed: Callable[[torch.Tensor], torch.Tensor]
    reduce: Callable[[torch.Tensor], torch.Tensor]
    prepared_bytes: int

    @property
    def sources(self) -> int:
        """AttnRes sources at the end: closed blocks and the running prefix."""
        return 1 + sum(layer.closes for layer in self.layers)
