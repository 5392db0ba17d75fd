"""What the guard is shown of a fast step: the state it may write, its write-set, and the same step on the standard path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..guard import Guard, StateView, WriteSet
from .executor import StateSlots, StepTensors
from .plan import Plan
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
    """The slots and cache rows that the step of these index tensors writes."""
    slots: dict[int, Any] = {}
    rows: dict[int, Any] = {}
    for group, name in enumerate(groups):
        where = tensors[name]
        if isinstance(where, StateSlots):
            slots[group] = where.slots
        else:
            rows[group] = where.slot_mapping
    return WriteSet(slots=slots, rows=rows)


def shadowed(
    guard: Guard,
    plan: Plan,
    views: Sequence[StateView],
    writes: WriteSet,
    inputs: Tensors,
    fast: Callable[[], torch.Tensor],
    standard: Callable[[], torch.Tensor],
    logits: Callable[[torch.Tensor], torch.Tensor | None],
) -> torch.Tensor:
    """Run a step fast, put its state back, run it standard, and let the guard compare. Returns the standard path's hidden states,
    and leaves its state: where the two differ, that is the side to trust."""
    before = _read(views, writes)
    found = _outcome(fast(), views, writes, logits)
    _put(views, writes, before)
    hidden = standard()
    expected = _outcome(hidden, views, writes, logits)
    depth = {view.name: view.layer for view in views} | dict.fromkeys(("hidden", "logits"), 1 + max(v.layer for v in views))
    guard.shadow(plan.key, found, expected, inputs | {f"before.{name}": tensor for name, tensor in before.items()}, depth)
    return hidden


def _outcome(hidden: torch.Tensor, views: Sequence[StateView], writes: WriteSet, logits: Callable[..., Any]) -> Tensors:
    outcome = {"hidden": hidden.detach().clone(), **_read(views, writes)}
    scores = logits(hidden)
    return outcome if scores is None else outcome | {"logits": scores}


def _places(view: StateView, writes: WriteSet) -> tuple[torch.Tensor, torch.Tensor]:
    """The view as [places, ...], and the places of it that the step writes."""
    if view.rows_per_slot == 1:
        return view.tensor, torch.as_tensor(writes.slots[view.group]).long()
    places = torch.as_tensor(writes.rows[view.group]).long()
    return view.tensor, places[places >= 0]


def _read(views: Sequence[StateView], writes: WriteSet) -> Tensors:
    found = {}
    for view in views:
        tensor, places = _places(view, writes)
        found[view.name] = tensor[_index(view, places)].clone()
    return found


def _put(views: Sequence[StateView], writes: WriteSet, saved: Tensors) -> None:
    for view in views:
        tensor, places = _places(view, writes)
        tensor[_index(view, places)] = saved[view.name]


def _index(view: StateView, places: torch.Tensor) -> Any:
    if view.rows_per_slot == 1:
        return places
    return torch.div(places, view.rows_per_slot, rounding_mode="floor"), places % view.rows_per_slot
