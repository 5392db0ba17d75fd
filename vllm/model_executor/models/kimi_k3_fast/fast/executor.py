"""The executor: one decode step over a backbone's views, in the order of the architecture, for the plan it is given.

AttnRes needs no copies here. `sources[0..last-1]` are the closed blocks and `sources[last]` is the running prefix: closing a
block is `last += 1`, since the prefix already stands where the block belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..ops.attn_res.torch_form import mix, rms_norm
from ..ops.experts import torch_form as experts
from ..ops.kda import torch_form as kda
from ..ops.mla import torch_form as mla
from ..ops.moe_front.torch_form import route
from ..ops.situ.torch_form import situ
from .plan import Plan
from .views import Backbone, Dense, Kda, Mla, Moe
from .views import Mix as MixView


@dataclass(frozen=True)
class StateSlots:
    """Recurrent-state slots of one cache group: slots [T] int64, <= 0 for padding."""

    slots: torch.Tensor


@dataclass(frozen=True)
class CacheRows:
    """Where one cache group's tokens live: slot_mapping [T] int64 (negative: padding), block_table [T, max], lengths [T],
    their maximum.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    longest: int


StepTensors = dict[str, StateSlots | CacheRows]  # by cache group


class Executor:
    """Runs plans over one backbone. Buffers are made here, once; a plan of another generation is refused."""

    def __init__(self, backbone: Backbone, max_tokens: int) -> None:
        self.backbone = backbone
        self.sources = torch.zeros(backbone.sources, max_tokens, backbone.hidden, dtype=torch.float32)
        self.choices: list[torch.Tensor] | None = None  # where a list stands, each MoE layer appends its experts [T, k]

    def run(self, plan: Plan, input_ids: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """input_ids [T] -> hidden [T, D], before the final norm, as the standard path returns it. Caches are written in place."""
        b = self.backbone
        if plan.generation != b.generation:
            raise RuntimeError(
                f"plan of generation {plan.generation} on views of generation {b.generation}: bind again before running"
            )
        sources, last = self.sources[:, : plan.tokens], 0
        sources[0] = b.embed(input_ids)
        delta: torch.Tensor | None = None
        for layer in b.layers:
            if delta is not None:
                self._add(sources[last], delta)
            y = self._attention(layer.attention, self._mix(layer.attention_mix, sources[: last + 1]), step)
            if layer.closes:
                last += 1
                sources[last] = y
            else:
                self._add(sources[last], y)
            delta = self._mlp(layer.mlp, self._mix(layer.mlp_mix, sources[: last + 1]))
        if delta is not None:
            self._add(sources[last], delta)
        return self._mix(b.final_mix, sources[: last + 1])

    def _add(self, prefix: torch.Tensor, update: torch.Tensor) -> None:
        """prefix += update, rounded to the model's dtype as the standard path stores it."""
        prefix.copy_((prefix + update).to(self.backbone.dtype))

    def _mix(self, view: MixView, sources: torch.Tensor) -> torch.Tensor:
        b = self.backbone
        mixed = mix(sources, view.score, b.eps)
        return mixed.to(b.dtype) if view.norm is None else rms_norm(mixed, view.norm, b.eps, b.dtype)

    def _attention(self, view: Kda | Mla, x: torch.Tensor, step: StepTensors) -> torch.Tensor:
        where = step[view.group]
        if isinstance(view, Kda):
            assert isinstance(where, StateSlots)
            y = kda.step(F.linear(x, view.in_proj), view.conv_state, view.state, where.slots, view.weights, x.dtype)
        else:
            assert isinstance(where, CacheRows)
            y = self._mla(view, F.linear(x, view.in_proj), where)
        return self.backbone.reduce(F.linear(y, view.o_proj))

    def _mla(self, view: Mla, packed: torch.Tensor, where: CacheRows) -> torch.Tensor:
        b, tokens = self.backbone, packed.shape[0]
        heads, nope, latent = view.w_uk.shape
        q_rank, shared = view.q_norm.shape[0], view.cache.shape[-1] - latent
        q_a, kv_a, k_pe, gate = packed.split([q_rank, latent, shared, packed.shape[1] - q_rank - latent - shared], dim=1)
        mla.insert(view.cache, torch.cat([rms_norm(kv_a, view.kv_norm, view.norm_eps, b.dtype), k_pe], dim=1), where.slot_mapping)
        q = F.linear(rms_norm(q_a, view.q_norm, view.norm_eps, b.dtype), view.q_b).view(tokens, heads, nope + shared)
        absorbed = torch.einsum("thn,hnr->thr", q[..., :nope], view.w_uk)
        query = torch.cat([absorbed, q[..., nope:]], dim=-1)
        out = mla.attend(query, view.cache, where.block_table, where.lengths, latent, view.scale, where.longest).to(b.dtype)
        values = torch.einsum("thr,hvr->thv", out, view.w_uv).reshape(tokens, -1)
        return (values.float() * gate.float().sigmoid()).to(b.dtype)

    def _dense(self, view: Dense, x: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum."""
        return F.linear(situ(F.linear(x, view.gate_up), self.backbone.situ_beta, self.backbone.situ_linear_beta), view.down)

    def _mlp(self, view: Dense | Moe, x: torch.Tensor) -> torch.Tensor:
        b = self.backbone
        if isinstance(view, Dense):
            return b.reduce(self._dense(view, x))
        ids, weights = route(F.linear(x.float(), view.gate), view.bias, view.top_k, view.renormalise, view.scaling)
        if self.choices is not None:
            self.choices.append(ids)
        latent = F.linear(x, view.down)
        routed = b.reduce(experts.run(latent, ids, weights, view.experts, lambda h: situ(h, b.situ_beta, b.situ_linear_beta)))
        if view.norm is not None:
            routed = rms_norm(routed, view.norm, b.eps, b.dtype)
        out = F.linear(routed, view.up)
        return out if view.shared is None else out + b.reduce(self._dense(view.shared, x))
