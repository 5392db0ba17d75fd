"""Who owns which slot: the worker's copy of the KV manager's truth, and the check of a step's write-set against it.

The engine core sends every change (allocated, shared, freed) with the step that follows it, so that the state here is the one
that held when the step was scheduled; the worker adds the copies it makes. A block is written only by the request that it was
allocated for; a prefix hit makes a reader, not a writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..reasons import Reason
from .records import WriteSet

if TYPE_CHECKING:
    import torch

NULL_SLOT = 0


class Finding(NamedTuple):
    """A violation to be: the guard adds the step."""

    reason: Reason
    where: dict[str, Any]
    detail: str


class Ledger:
    """Owner of every slot that is in use."""

    def __init__(self) -> None:
        self.writer: dict[int, str] = {}
        self.counts = {"slots_allocated": 0, "slots_shared": 0, "slots_copied": 0, "slots_freed": 0}
        self.followed = False  # nothing is known before the first change arrives
        self._rows_per_slot: dict[int, int] = {}
        self._epochs: dict[str, int] = {}
        self._checked: tuple | None = None  # requests and written slots of the last step, if the owners agreed to it

    def take_counts(self) -> list[tuple[str, int]]:
        """What was counted since the last call, zeros left out."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return [(name, count) for name, count in counts.items() if count]

    def layout(self, rows_per_slot: dict[int, int]) -> None:
        """Cache rows per slot of each group that is written by row."""
        self._rows_per_slot = rows_per_slot

    def follow(self, changes: Iterable[tuple[str, str, Sequence[int]]]) -> list[Finding]:
        """Apply changes in order: (kind, request, slots)."""
        self.followed = True
        self._checked = None
        found: list[Finding] = []
        for kind, request, slots in changes:
            self.counts[f"slots_{kind}"] += len(slots)
            for slot in slots:
                if kind == "allocated":
                    found += self._allocate(slot, request)
                elif kind == "copied":
                    found += self._copy(slot, request)
                elif kind == "freed":
                    self.writer.pop(slot, None)
        return found

    def _allocate(self, slot: int, request: str) -> list[Finding]:
        where = {"slot": slot, "request": request}
        if slot == NULL_SLOT:
            return [Finding(Reason.NULL_BLOCK_WRITTEN, where, "the null block was handed out")]
        before, self.writer[slot] = self.writer.get(slot), request
        if before is not None:
            where["owner"] = before
            return [Finding(Reason.SLOT_NOT_OWNED, where, "allocated while another request still owns it")]
        return []

    def _copy(self, slot: int, request: str) -> list[Finding]:
        """State moves to `slot` before a step: who owns it is asked here, as the step's digests begin behind it."""
        owner = self.writer.get(slot, "")
        if slot != NULL_SLOT and owner == request:
            return []
        where = {"slot": slot, "request": request, "owner": owner}
        if slot == NULL_SLOT:
            return [Finding(Reason.NULL_BLOCK_WRITTEN, where, "recurrent state is copied to the null block")]
        return [Finding(Reason.SLOT_NOT_OWNED, where, "recurrent state is copied to a slot of another owner")]

    def check(self, write_set: WriteSet, request_ids: Sequence[str], requests: int, tokens: int) -> list[Finding]:
        """A step's declared writes against the owners: the first `requests` slots and `tokens` rows, the others being padding.

        Every step is read. The owners are asked only if something differs from the step before: a request, a slot, a row's block,
        or an owner, since `follow` forgets that step.
        Values on a device are not read, since that would wait for it; the audit reads them.
        """
        found = list(self._backwards(write_set)) if write_set.epochs else []
        if not self.followed or not request_ids:
            return found
        written = []
        for group, values in write_set.slots.items():
            slots = _host(values, requests)
            if slots is not None:
                written.append((group, slots))
        for group, values in write_set.rows.items():
            size = self._rows_per_slot.get(group, 0)
            rows = _host(values, tokens) if size else None
            if rows is not None:
                written.append((group, [row // size for row in rows]))
        state = (tuple(request_ids), written)
        if state == self._checked:
            return found
        wrong = [finding for group, slots in written for finding in self._owned(group, slots, state[0])]
        self._checked = None if wrong else state
        return found + wrong

    def _owned(self, group: int, slots: Sequence[int], requests: Sequence[str]) -> list[Finding]:
        found = []
        each = len(slots) // len(requests) if len(slots) % len(requests) == 0 else 0
        for i, slot in enumerate(slots):
            request = requests[i // each] if each == 1 else ""
            where = {"group": group, "slot": slot, "request": request, "owner": self.writer.get(slot, "")}
            if slot == NULL_SLOT:
                found.append(Finding(Reason.NULL_BLOCK_WRITTEN, where, "a step declares a write to the null block"))
            elif (where["owner"] != request) if request else (where["owner"] not in requests):
                found.append(Finding(Reason.SLOT_NOT_OWNED, where, "a step declares a write to a slot of another owner"))
        return found

    def _backwards(self, write_set: WriteSet) -> Iterable[Finding]:
        for name, epoch in write_set.epochs.items():
            before = self._epochs.get(name, epoch)
            self._epochs[name] = epoch
            if epoch < before:
                yield Finding(Reason.WRITE_OUTSIDE, {"buffer": name}, f"mailbox epoch went back from {before} to {epoch}")


def _host(values: list[int] | torch.Tensor, count: int) -> list[int] | None:
    """The first `count` values; None if they are on a device."""
    if not isinstance(values, list):
        if not values.is_cpu:
            return None
        values = values.tolist()
    return values if len(values) == count else values[:count]
