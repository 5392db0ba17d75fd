"""Which form of the operators a fast step runs: C++ where its library is there, else PyTorch, with the reason for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attn_res import torch_form as attn_res
from ..ops.cpu import CpuForms, load
from ..ops.experts import torch_form as experts
from ..ops.kda import torch_form as kda
from ..ops.mla import torch_form as mla
from ..ops.moe_front import torch_form as moe_front
from ..ops.situ.torch_form import situ
from ..reasons import Reason, Refusal


class Forms(Protocol):
    """The operators of a decode step. Shapes and meanings: `TorchForms`, and the PyTorch form of each operator."""

    name: str

    def turn(self) -> None: ...
    def do(self, action: Callable[[], object]) -> None: ...
    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def gate_up(self, x: Tensor, weight: Tensor, beta: float, linear_beta: float | None) -> Tensor: ...
    def mix(
        self, sources: Tensor, delta: Tensor | None, score: Tensor, norm: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor: ...
    def kda_step(
        self, packed: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor, w: kda.Weights, dtype: torch.dtype
    ) -> Tensor: ...
    def mla_rows(
        self, packed: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cache: Tensor, slot_mapping: Tensor
    ) -> Tensor: ...
    def absorb(self, q: Tensor, w_uk: Tensor) -> Tensor: ...
    def attend(
        self, query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, latent: int, scale: float, longest: int
    ) -> Tensor: ...
    def values(self, lat: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor: ...
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, top_k: int, renormalise: bool, scaling: float
    ) -> tuple[Tensor, Tensor]: ...
    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w: experts.Weights, beta: float, linear_beta: float | None
    ) -> Tensor: ...


class TorchForms:
    """The PyTorch forms, with the few lines between them that the C++ ones fuse."""

    name = "torch"
    linear = staticmethod(F.linear)
    rms_norm = staticmethod(attn_res.rms_norm)
    kda_step = staticmethod(kda.step)
    attend = staticmethod(mla.attend)

    def turn(self) -> None:
        """A layer begins: of interest to a recording, which PyTorch has none of."""

    def do(self, action: Callable[[], object]) -> None:
        """Run what stands between the operators; a recording repeats it. It works in place."""
        action()

    def gate_up(self, x: Tensor, weight: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        """x [T, K], weight [2*I, K], gate rows first -> [T, I]."""
        return situ(F.linear(x, weight), beta, linear_beta)

    def mix(
        self, sources: Tensor, delta: Tensor | None, score: Tensor, norm: Tensor | None, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """Add delta [T, D] to the running prefix, the last of sources [n, T, D], rounded as the standard path stores it; then
        AttnRes over the sources and, where there is a `norm`, the RMSNorm behind it."""
        if delta is not None:
            sources[-1].copy_((sources[-1] + delta).to(dtype))
        mixed = attn_res.mix(sources, score, eps)
        return mixed.to(dtype) if norm is None else attn_res.rms_norm(mixed, norm, eps, dtype)

    def mla_rows(
        self, packed: Tensor, q_norm: Tensor, kv_norm: Tensor, eps: float, cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """packed [T, q_a | kv_a | k_pe | ...]: writes the cache rows [norm(kv_a) | k_pe], returns norm(q_a)."""
        rank, latent, width = q_norm.shape[0], kv_norm.shape[0], cache.shape[-1]
        q_a, kv_a, k_pe = packed[:, : rank + width].split([rank, latent, width - latent], dim=1)
        mla.insert(cache, torch.cat([attn_res.rms_norm(kv_a, kv_norm, eps, packed.dtype), k_pe], dim=1), slot_mapping)
        return attn_res.rms_norm(q_a, q_norm, eps, packed.dtype)

    def absorb(self, q: Tensor, w_uk: Tensor) -> Tensor:
        """q [T, h, nope + shared], w_uk [h, nope, latent] -> [T, h, latent + shared]."""
        nope = w_uk.shape[1]
        return torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], w_uk), q[..., nope:]], dim=-1)

    def values(self, lat: Tensor, w_uv: Tensor, gate: Tensor) -> Tensor:
        """lat [T, h, latent] fp32, w_uv [h, v, latent], gate [T, h*v] -> [T, h*v]."""
        values = torch.einsum("thr,hvr->thv", lat.to(gate.dtype), w_uv).flatten(1)
        return (values.float() * gate.float().sigmoid()).to(gate.dtype)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, top_k: int, renormalise: bool, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """x [T, D], gate [E, D] fp32 -> ids [T, k], weights [T, k]."""
        return moe_front.route(F.linear(x.float(), gate), bias, top_k, renormalise, scaling)

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w: experts.Weights, beta: float, linear_beta: float | None
    ) -> Tensor:
        """x [T, L] -> [T, L]."""
        return experts.run(x, ids, weights, w, lambda h: situ(h, beta, linear_beta))


@dataclass(frozen=True)
class Backend:
    """The forms chosen, and why not the C++ ones: None where they were chosen, or not wanted."""

    forms: Forms
    refusal: Refusal | None = None

    @property
    def name(self) -> str:
        return self.forms.name

    def __str__(self) -> str:
        return self.name if self.refusal is None else f"{self.name} ({self.refusal})"


def pick(wanted: str = "auto") -> Backend:
    """`wanted` is the setting `cpu_kernels`: "auto", "torch", or an instruction set."""
    if wanted == "torch":
        return Backend(TorchForms())
    library = load()
    if isinstance(library, Refusal):
        return Backend(TorchForms(), library)
    try:
        return Backend(CpuForms(wanted))
    except ValueError as error:  # an instruction set that this machine lacks
        return Backend(TorchForms(), Refusal(Reason.CPU_LIBRARY, str(error)))
