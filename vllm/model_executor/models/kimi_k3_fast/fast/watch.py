"""What the guard is shown of a fast step: the state it may write, its write-set, and the same step on the standard path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..guard import Guard, StateView, WriteSet
from ..guard.shadow import DRAWS, NUDGES, furthest, own_error
from ..model.moe import Judged
from .executor import StateSlots, StepTensors
from .views import Backbone, Kda

Tensors = dict[str, torch.Tensor]


def state_views(backbone: Backbone, groups: Sequence[str]) -> list[StateView]:
    """Every cache of one binding. A view's group is the index of its cache group in `groups`."""
    views = []
    for layer in backbone.layers:
        held = layer.attention
        group = groups.index(held.group)
        name = f"layers.{layer.index}"
        if isinstance(held, Kda):
            views.append(StateView(f"{name}.conv", "kda_conv", layer.index, group, held.conv_state))
            views.append(StateView(f"{name}.state", "kda_recurrent", layer.index, group, held.state))
        else:
            views.append(StateView(f"{name}.latent", "mla_latent", layer.index, group, held.cache, held.cache.shape[1]))
    return views


def write_set(tensors: StepTensors, groups: Sequence[str]) -> WriteSet:
    """The slots and cache rows that the step of these index tensors, which are on the host, writes."""
    slots: dict[int, list[int] | torch.Tensor] = {}
    rows: dict[int, list[int] | torch.Tensor] = {}
    for group, name in enumerate(groups):
        where = tensors[name]
        if isinstance(where, StateSlots):
            slots[group] = where.slots.tolist()
        else:
            rows[group] = where.slot_mapping.tolist()
    return WriteSet(slots=slots, rows=rows)


Impose = Callable[[list[torch.Tensor]], AbstractContextManager[Mapping[str, Judged]]]  # see `model.moe.imposed`


@dataclass(frozen=True)
class Both:
    """One step run on both paths from one state. `before`: that state, where the step writes; `choices`: the experts [T, k] that
    the fast side chose, layer by layer; `fast`, `standard`, `nudged`: what each side returned and wrote, by name, behind these
    choices, and what its choices come to on the standard side, which has `judged` them."""

    before: Tensors
    choices: list[torch.Tensor]
    fast: Tensors
    standard: Tensors
    nudged: Tensors
    judged: Mapping[str, Judged]


def run_both(
    views: Sequence[StateView],
    writes: WriteSet,
    fast: Callable[[list[torch.Tensor]], torch.Tensor],
    standard: Callable[[float], torch.Tensor],
    logits: Callable[[torch.Tensor], torch.Tensor | None],
    impose: Impose,
) -> Both:
    """Run a step fast, standard behind the fast side's choices, and once more with a nudge; the state is put back after each.

    fast: fills the list with its choices. standard: given the relative size of the noise on its input. Nothing here depends on
    what comes out, so that the ranks of a tensor-parallel group stay in step.
    """
    before = read(views, writes)
    choices: list[torch.Tensor] = []
    hidden = fast(choices)
    found = outcome(hidden, views, writes, logits)
    put_back(views, writes, before)

    def behind_them(nudge: float) -> tuple[Tensors, Mapping[str, Judged]]:
        with impose(choices) as judged:
            hidden = standard(nudge)
        side = outcome(hidden, views, writes, logits)
        put_back(views, writes, before)
        return side, judged

    theirs, judged = behind_them(0.0)
    nudged, noisy = behind_them(own_error(hidden.dtype))
    found |= {name: scores.taken for name, scores in judged.items()}
    theirs |= {name: scores.best for name, scores in judged.items()}
    return Both(before, choices, found, theirs, nudged | moved(judged, noisy), judged)


def draws(
    both: Both,
    views: Sequence[StateView],
    writes: WriteSet,
    standard: Callable[[float, int], torch.Tensor],
    logits: Callable[[torch.Tensor], torch.Tensor | None],
    impose: Impose,
) -> Iterator[Tensors]:
    """What the standard side comes to behind the same choices with noise at every place: the furthest of the draws so far.

    standard: given the relative size of the noise and the number of the draw. The state is put back after each.
    """

    def one(draw: int) -> Tensors:
        with impose(both.choices) as noisy:
            hidden = standard(NUDGES * own_error(both.standard["hidden"].dtype), draw)
        side = outcome(hidden, views, writes, logits)
        put_back(views, writes, both.before)
        return side | moved(both.judged, noisy)

    return furthest(both.standard, map(one, range(1, DRAWS + 1)))


def moved(judged: Mapping[str, Judged], noisy: Mapping[str, Judged]) -> Tensors:
    """What choices come to on a side with noise, by name: see `Judged.moved`."""
    return {name: scores.moved(noisy[name]) for name, scores in judged.items()}


def shadowed(
    guard: Guard,
    plan_key: str,
    views: Sequence[StateView],
    both: Both,
    inputs: Callable[[], Tensors],
    origin: Mapping[str, Any],
    draws: Iterable[Tensors] = (),
) -> bool:
    """Let the guard compare the two sides. True if they agree."""
    last = 1 + max(view.layer for view in views)
    depth = {name: int(name.split(".")[1]) if name.startswith("layers.") else last for name in both.fast}
    return guard.shadow(plan_key, both.fast, both.standard, inputs, depth, both.nudged, origin, together=True, draws=draws)


def snapshot(
    views: Sequence[StateView], groups: Sequence[str], tensors: StepTensors, input_ids: torch.Tensor, both: Both
) -> Tensors:
    """Everything that a step read, renumbered so that only its own slots and blocks are kept: from 1 on, 0 being the null block.

    By name: `input_ids` [T]; `choices.N` [T, k]; `groups.N.slots` [T], or `groups.N.block_table` [T, blocks], `.slot_mapping` and
    `.lengths` [T]; and each state view's content, [T, ...] or [blocks, rows, ...], as it was before the step.
    """
    before = both.before
    kept = {"input_ids": input_ids, **{f"choices.{i}": chosen for i, chosen in enumerate(both.choices)}}
    for group, name in enumerate(groups):
        where = tensors[name]
        mine = [view for view in views if view.group == group]
        if isinstance(where, StateSlots):
            numbers = torch.arange(1, len(where.slots) + 1, device=where.slots.device)
            kept[f"groups.{group}.slots"] = torch.where(where.slots > 0, numbers, 0)
            kept |= {view.name: before[view.name] for view in mine}
            continue
        size = mine[0].rows_per_slot
        table, lengths = where.block_table, where.lengths.to(where.block_table.device)
        used = torch.arange(table.shape[1], device=table.device) * size < lengths[:, None]
        blocks = torch.unique(table[used])
        rows = where.slot_mapping
        moved = (1 + torch.searchsorted(blocks, rows // size)) * size + rows % size
        kept[f"groups.{group}.block_table"] = torch.where(used, 1 + torch.searchsorted(blocks, table), 0)
        kept[f"groups.{group}.slot_mapping"] = torch.where(rows >= 0, moved, -1)
        kept[f"groups.{group}.lengths"] = lengths
        written = moved[rows >= 0]
        for view in mine:
            content = view.tensor[blocks].clone()
            content[written // size - 1, written % size] = before[view.name]
            kept[view.name] = content
    return kept


def outcome(hidden: torch.Tensor, views: Sequence[StateView], writes: WriteSet, logits: Callable[..., Any]) -> Tensors:
    """What a step returned and wrote, by name."""
    found = {"hidden": hidden.detach().clone(), **read(views, writes)}
    scores = logits(hidden)
    return found if scores is None else found | {"logits": scores}


def _places(view: StateView, writes: WriteSet) -> tuple[torch.Tensor, torch.Tensor]:
    """The view as [places, ...], and the places of it that the step writes."""
    if view.rows_per_slot == 1:
        return view.tensor, torch.as_tensor(writes.slots[view.group]).long()
    places = torch.as_tensor(writes.rows[view.group]).long()
    return view.tensor, places[places >= 0]


def read(views: Sequence[StateView], writes: WriteSet) -> Tensors:
    """A copy of the state that the step writes."""
    found = {}
    for view in views:
        tensor, places = _places(view, writes)
        found[view.name] = tensor[_index(view, places)].clone()
    return found


def put_back(views: Sequence[StateView], writes: WriteSet, saved: Tensors) -> None:
    """Undo what the step wrote."""
    for view in views:
        tensor, places = _places(view, writes)
        tensor[_index(view, places)] = saved[view.name]


def _index(view: StateView, places: torch.Tensor) -> Any:
    if view.rows_per_slot == 1:
        return places
    return torch.div(places, view.rows_per_slot, rounding_mode="floor"), places % view.rows_per_slot
