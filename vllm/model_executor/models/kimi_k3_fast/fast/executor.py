"""The executor: one decode step over a backbone's views, in the order of the architecture, for the plan it is given.

On the C++ forms a step is planned once for each number of tokens: its first run is recorded, with every call's arguments, and the
later ones play the record. The step's indices are copied to where the recorded calls read them. Nothing is allocated then.

AttnRes needs no copies here. `sources[0..last-1]` are the closed blocks and `sources[last]` is the running prefix: closing a
block is `last += 1`, since the prefix already stands where the block belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ..ops.cpu import Buffers, CpuForms, Tape
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


class _Held:
    """Where recorded calls find a step's indices: ids [max], and for each group slots [max], or slot_mapping [max], lengths [max]
    and a table [max, columns]. `columns` grows with the longest context; whatever was recorded before is void then.
    """

    def __init__(self, max_tokens: int, blocks: dict[str, int]) -> None:
        self._max, self._blocks = max_tokens, blocks
        self._ids = torch.zeros(max_tokens, dtype=torch.int64)
        self._groups: StepTensors = {}

    def take(self, tokens: int, input_ids: torch.Tensor, step: StepTensors) -> bool:
        """Copy a step's indices; True if they stand elsewhere than before."""
        self._ids[:tokens].copy_(input_ids)
        moved = False
        for name, where in step.items():
            held = self._groups.get(name)
            if isinstance(where, StateSlots):
                if held is None:
                    held, moved = StateSlots(self._row()), True
                assert isinstance(held, StateSlots)
                held.slots[:tokens].copy_(where.slots)
            else:
                columns = min(-(-where.longest // self._blocks[name]), where.block_table.shape[1])
                if not isinstance(held, CacheRows) or held.block_table.shape[1] < columns:
                    table = torch.zeros(self._max, max(8, 2 * columns), dtype=torch.int64)
                    held, moved = CacheRows(self._row(), table, self._row(), 0), True
                held.slot_mapping[:tokens].copy_(where.slot_mapping)
                held.lengths[:tokens].copy_(where.lengths)
                held.block_table[:tokens, :columns].copy_(where.block_table[:, :columns])
            self._groups[name] = held
        return moved

    def of(self, tokens: int) -> tuple[torch.Tensor, StepTensors]:
        """The indices of a step of so many tokens, in place."""
        step: StepTensors = {}
        for name, held in self._groups.items():
            if isinstance(held, StateSlots):
                step[name] = StateSlots(held.slots[:tokens])
            else:
                rows = {field: getattr(held, field)[:tokens] for field in ("slot_mapping", "block_table", "lengths")}
                step[name] = replace(held, **rows)
        return self._ids[:tokens], step

    def _row(self) -> torch.Tensor:
        return torch.zeros(self._max, dtype=torch.int64)


class Executor:
    """Runs plans over one backbone. Buffers are made here, once; a plan of another generation is refused."""

    def __init__(self, backbone: Backbone, backend: Backend, max_tokens: int) -> None:
        self.backbone, self.forms = backbone, backend.forms
        self.sources = torch.zeros(backbone.sources, max_tokens, backbone.hidden, dtype=torch.float32)
        self.choices: list[torch.Tensor] | None = None  # where a list stands, each MoE layer appends its experts [T, k]
        caches = [layer.attention for layer in backbone.layers if isinstance(layer.attention, Mla)]
        self._held = _Held(max_tokens, {view.group: view.cache.shape[1] for view in caches})
        self._buffers = Buffers(max_tokens)
        self._tapes: dict[tuple[int, int], tuple[Tape, torch.Tensor]] = {}
        if isinstance(self.forms, CpuForms):
            _reserve(self.forms, backbone, max_tokens)

    def run(self, plan: Plan, input_ids: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """input_ids [T] -> hidden [T, D], before the final norm, as the standard path returns it. Caches are written in place."""
        if plan.generation != self.backbone.generation:
            raise RuntimeError(
                f"plan of generation {plan.generation} on views of generation {self.backbone.generation}: "
                "bind again before running"
            )
        if not isinstance(self.forms, CpuForms):
            return self._step(plan.tokens, input_ids, step)
        if self._held.take(plan.tokens, input_ids, step):
            self._tapes.clear()
        key = plan.tokens, torch.get_num_threads()
        if key in self._tapes:
            tape, hidden = self._tapes[key]
            tape.play()
        else:
            with self.forms.recording(self._buffers) as tape:
                hidden = self._step(plan.tokens, *self._held.of(plan.tokens))
            self._tapes[key] = tape, hidden
        return hidden.clone()  # the next step overwrites it

    def _step(self, tokens: int, input_ids: torch.Tensor, step: StepTensors) -> torch.Tensor:
        b, ops = self.backbone, self.forms
        sources, last = self.sources[:, :tokens], 0
        ops.do(lambda: sources[0].copy_(b.embed(input_ids)))
        delta: torch.Tensor | None = None
        for layer in b.layers:
            ops.turn()
            update: torch.Tensor | None = self._attention(
                layer.attention, self._mix(layer.attention_mix, sources[: last + 1], delta), step
            )
            if layer.closes:
                last += 1
                ops.do(partial(torch.Tensor.copy_, sources[last], update))
                update = None
            delta = self._mlp(layer.mlp, self._mix(layer.mlp_mix, sources[: last + 1], update))
        return self._mix(b.final_mix, sources[: last + 1], delta)

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the ranks, where it stands."""

        def reduce() -> None:
            total = self.backbone.reduce(x)
            if total is not x:
                x.copy_(total)

        self.forms.do(reduce)
        return x

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
        return self._reduce(ops.linear(y, view.o_proj))

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
            return self._reduce(self._dense(view, x))
        ids, weights = ops.route(x, view.gate, view.bias, view.top_k, view.renormalise, view.scaling)
        ops.do(lambda: None if self.choices is None else self.choices.append(ids.clone()))
        latent = ops.linear(x, view.down)
        routed = self._reduce(ops.experts(latent, ids, weights, view.experts, b.situ_beta, b.situ_linear_beta))
        if view.norm is not None:
            routed = ops.rms_norm(routed, view.norm, b.eps, b.dtype)
        out = ops.linear(routed, view.up)
        if view.shared is not None:
            ops.do(partial(torch.Tensor.add_, out, self._reduce(self._dense(view.shared, x))))
        return out


def _reserve(forms: CpuForms, backbone: Backbone, max_tokens: int) -> None:
    """Let the library take the memory that the largest step needs now."""
    for layer in backbone.layers:
        heads = latent = experts = top_k = expert_in = width = 0
        if isinstance(layer.attention, Mla):
            heads, _, latent = layer.attention.w_uk.shape
        if isinstance(layer.mlp, Moe):
            experts, top_k = layer.mlp.gate.shape[0], layer.mlp.top_k
            expert_in, width = layer.mlp.down.shape[0], layer.mlp.experts.w13.shape[1] // 2
        forms.reserve(max_tokens, heads, latent, experts, top_k, expert_in, width)
