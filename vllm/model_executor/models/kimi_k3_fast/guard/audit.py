"""Audit: nothing outside a step's write-set may change, by digests of all state before and after the step.

One 64-bit digest for each row (a slot of recurrent state, a token of a paged cache, a whole buffer): a weighted sum of its
64-bit words modulo 2^64 with odd weights, so that any change of one word shows for certain. Groups of caches share memory; a
write declared by one view excuses the slots of other views at the same addresses, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..reasons import Reason
from .ledger import NULL_SLOT, Finding
from .records import StateView, WriteSet

CHUNK_BYTES = 32 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}  # bytes of a word, widest first


def digests(view: StateView) -> torch.Tensor:
    """[rows] int64, on the view's device."""
    tensor = view.tensor
    rows = tensor.shape[0] * view.rows_per_slot
    each = max(1, CHUNK_BYTES // max(1, tensor[0].numel() * tensor.element_size())) if rows else 1
    parts = []
    for first in range(0, tensor.shape[0], each):
        part = tensor[first : first + each].detach().contiguous()
        words = part.view(part.shape[0] * view.rows_per_slot, -1).view(torch.uint8)
        width = next(n for n in _WORDS if words.shape[1] % n == 0 and words.data_ptr() % n == 0)
        words = words.view(_WORDS[width])
        weights = torch.arange(words.shape[1], device=words.device, dtype=torch.int64) * 0x5851F42D4C957F2D * 2 + 1
        parts.append((words * weights).sum(dim=1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


class Audit:
    """The views of one binding, and the digests taken before a sampled step."""

    def __init__(self, generation: int, views: Sequence[StateView]) -> None:
        self.generation, self.views = generation, tuple(views)
        self._before: list[torch.Tensor] | None = None
        self._sharing = [self._shares(view) for view in self.views]

    def _shares(self, view: StateView) -> list[int]:
        """Indices of the other views on the same memory with the same slots."""
        here = view.tensor.untyped_storage().data_ptr()
        return [
            i
            for i, other in enumerate(self.views)
            if other is not view
            and other.tensor.untyped_storage().data_ptr() == here
            and _slot_bytes(other) == _slot_bytes(view)
            and other.group != view.group
        ]

    @property
    def begun(self) -> bool:
        return self._before is not None

    def begin(self) -> None:
        """Take the digests before a step."""
        self._before = [digests(view) for view in self.views]

    def abandon(self) -> None:
        """Forget them: the step did not come to its end."""
        self._before = None

    def end(self, write_set: WriteSet, requests: int, tokens: int, owner: Callable[[int], str]) -> list[Finding]:
        """Compare after the step. `requests` and `tokens` count real rows: declared values beyond them belong to
        padded rows."""
        assert self._before is not None
        before, self._before = self._before, None
        real, padded = _split(write_set, requests, tokens)
        found: list[Finding] = []
        for i, view in enumerate(self.views):
            changed = (digests(view) != before[i]).nonzero().flatten().tolist()
            if not changed:
                continue
            allowed = self._allowed(i, real, write_set)
            for row in changed:
                slot = row // view.rows_per_slot
                if slot == NULL_SLOT and view.group >= 0:
                    found.append(_finding(Reason.NULL_BLOCK_WRITTEN, view, row, owner, "the null block changed"))
                elif row in allowed or slot in self._excused(i, real):
                    continue
                elif row in padded.get((view.group, view.rows_per_slot > 1), ()):
                    found.append(_finding(Reason.PADDED_ROW_WROTE, view, row, owner, "only a padded row names this place"))
                else:
                    found.append(_finding(Reason.WRITE_OUTSIDE, view, row, owner, "changed, but the step did not declare it"))
        return found

    def _allowed(self, index: int, real: dict[tuple[int, bool], set[int]], write_set: WriteSet) -> set[int]:
        view = self.views[index]
        if view.group < 0:
            return set(range(view.tensor.shape[0])) if view.name in write_set.buffers else set()
        return real.get((view.group, view.rows_per_slot > 1), set())

    def _excused(self, index: int, real: dict[tuple[int, bool], set[int]]) -> set[int]:
        """Slots that a view on the same memory was declared to write."""
        slots: set[int] = set()
        for i in self._sharing[index]:
            other = self.views[i]
            for row in real.get((other.group, other.rows_per_slot > 1), ()):
                slots.add(row // other.rows_per_slot)
        return slots


def _split(write_set: WriteSet, requests: int, tokens: int) -> tuple[dict[tuple[int, bool], set[int]], ...]:
    """Declared rows by (group, written by row), real ones and those of padded rows only. Negative values declare nothing."""
    real: dict[tuple[int, bool], set[int]] = {}
    padded: dict[tuple[int, bool], set[int]] = {}
    for by_row, count, declared in ((False, requests, write_set.slots), (True, tokens, write_set.rows)):
        for group, values in declared.items():
            numbers = _list(values)
            key = (group, by_row)
            real[key] = {n for n in numbers[:count] if n >= 0}
            padded[key] = {n for n in numbers[count:] if n >= 0} - real[key]
    return real, padded


def _list(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _slot_bytes(view: StateView) -> int:
    return view.tensor.stride(0) * view.tensor.element_size()


def _finding(reason: Reason, view: StateView, row: int, owner: Callable[[int], str], detail: str) -> Finding:
    slot = row // view.rows_per_slot
    where = {"state": view.name, "layer": view.layer, "group": view.group, "slot": slot}
    if view.rows_per_slot > 1:
        where["row"] = row % view.rows_per_slot
    if view.group >= 0:
        where["owner"] = owner(slot)
    return Finding(reason, where, detail)
