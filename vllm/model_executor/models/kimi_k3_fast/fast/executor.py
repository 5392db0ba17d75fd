"""The executor: one decode step over a backbone's views, in the order of the architecture, for the plan it is given.

AttnRes needs no copies here. `sources[0..last-1]` are the closed blocks and `sources[last]` is the running prefix: closing a
block is `last += 1`, since the prefix already stands where the block belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import Backend
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

    def __init__(self, backbone: Backbone, backend: Backend, max_tokens: int) -> None:
        self.backbone, self.forms = backbone, backend.forms
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
            update: torch.Tensor | None = self._attention(
                layer.attention, self._mix(layer.attention_mix, sources[: last + 1], delta), step
            )
            if layer.closes:
                last += 1
                sources[last], update = update, None
            delta = self._mlp(layer.mlp, self._mix(layer.mlp_mix, sources[: last + 1], update))
        return self._mix(b.final_mix, sources[: last + 1], delta)

    def _mix(self, view: MixView, sources: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
        """Add `update` to the prefix, then AttnRes with its norm."""
        return self.forms.mix(sources, update, view.score, view.norm, self.backbone.eps, self.backbone.dtype)

    def _attention(self, view: Kda | Mla, x: torch.Tensor, step: StepTensors) -> torch.Tensor:
        ops, where = self.forms, step[view.group]
        packed = ops.linear(x, view.in_proj)
        if isinstance(view, Kda):
            assert isinstance(where, StateSlots)
            y = ops.kda_step(packed, view.conv_state, view.state, where.slots, view.weights, x.dtype)
        else:
            assert isinstance(where, CacheRows)
            y = self._mla(view, packed, where)
        return self.backbone.reduce(ops.linear(y, view.o_proj))

    def _mla(self, view: Mla, packed: torch.Tensor, where: CacheRows) -> torch.Tensor:
        ops, heads, latent = self.forms, view.w_uk.shape[0], view.w_uk.shape[2]
        q_a = ops.mla_rows(packed, view.q_norm, view.kv_norm, view.norm_eps, view.cache, where.slot_mapping)
        query = ops.absorb(ops.linear(q_a, view.q_b).unflatten(1, (heads, -1)), view.w_uk)
        out = ops.attend(query, view.cache, where.block_table, where.lengths, latent, view.scale, where.longest)
        first = view.q_norm.shape[0] + view.cache.shape[-1]
        return ops.values(out, view.w_uv, packed[:, first : first + heads * view.w_uv.shape[1]])

    def _dense(self, view: Dense, x: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum."""
        b = self.backbone
        return self.forms.linear(self.forms.gate_up(x, view.gate_up, b.situ_beta, b.situ_linear_beta), view.down)

    def _mlp(self, view: Dense | Moe, x: torch.Tensor) -> torch.Tensor:
        b, ops = self.backbone, self.forms
        if isinstance(view, Dense):
            return b.reduce(self._dense(view, x))
        ids, weights = ops.route(x, view.gate, view.bias, view.top_k, view.renormalise, view.scaling)
        if self.choices is not None:
            self.choices.append(ids)
        latent = ops.linear(x, view.down)
        routed = b.reduce(ops.experts(latent, ids, weights, view.experts, b.situ_beta, b.situ_linear_beta))
        if view.norm is not None:
            routed = ops.rms_norm(routed, view.norm, b.eps, b.dtype)
        out = ops.linear(routed, view.up)
        return out if view.shared is None else out + b.reduce(self._dense(view.shared, x))
