"""Ranks that agree: a rolling hash of each rank's decisions, compared now and then over a host-side collective.

The choice of a path must be a pure function of what every rank knows; a rank that decides alone would leave the others
waiting inside a collective. The hash proves after the fact that they did not, and a ring of recent hashes finds the first
step where they parted. Plan keys that one rank wants to retire travel with the comparison, so that all ranks retire them at
the same step.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RING = 1024
_MASK = (1 << 61) - 1


@dataclass(frozen=True)
class Difference:
    """Where ranks parted. Not `exact`: the ring no longer reaches back to the first differing step."""

    first_step: int
    exact: bool
    ranks: list[int]  # those that differ from rank 0

    def describe(self) -> str:
        since = f"at step {self.first_step}" if self.exact else f"at or before step {self.first_step}"
        return f"ranks {self.ranks} decided differently from rank 0, first {since}"


class Agreement:
    """The rolling hash of one rank. `all_gather` takes a list of ints and returns every rank's list, in rank order."""

    def __init__(self, rank: int = 0, world: int = 1, all_gather: Callable[[list[int]], list[list[int]]] | None = None) -> None:
        self.rank, self.world, self._all_gather = rank, world, all_gather
        self.hash = 0
        self.step = 0
        self.checked_step = 0
        self._ring: deque[tuple[int, int]] = deque(maxlen=RING)
        self._proposals: dict[str, str] = {}
        self._reported = False

    def add(self, step: int, signature: int) -> None:
        """Append one decision."""
        self.hash = (self.hash * 1_000_003 + signature + step) & _MASK
        self.step = step
        if self.world > 1:
            self._ring.append((step, self.hash))

    def any(self, found: bool) -> bool:
        """Whether a rank says so. A collective: every rank calls it at the same step."""
        if self.world == 1:
            return found
        assert self._all_gather is not None
        return any(theirs[0] for theirs in self._all_gather([int(found)]))

    def propose(self, plan_key: str, code: str) -> None:
        """Ask all ranks to retire `plan_key` at the next comparison."""
        self._proposals[plan_key] = code

    def compare(self, step: int) -> tuple[Difference | None, list[tuple[str, str]]]:
        """Compare. A collective: every rank calls it at the same step.

        Returns the difference, only the first time it is seen, and the plan keys to retire, alike on all ranks.
        """
        assert self._all_gather is not None
        mine = [self.step, self.hash, len(self._proposals)]
        everyone = self._all_gather(mine)
        retired = self._exchange() if any(theirs[2] for theirs in everyone) else []
        heads = [theirs[:2] for theirs in everyone]
        if all(head == heads[0] for head in heads):
            self.checked_step = step
            return None, retired
        difference = self._first_difference()  # every rank saw the same heads, so every rank enters this collective
        if self._reported:
            return None, retired
        self._reported = True
        return difference, retired

    def _exchange(self) -> list[tuple[str, str]]:
        """Union of all ranks' proposals, in one order."""
        text = "\n".join(f"{key}\t{code}" for key, code in sorted(self._proposals.items()))
        self._proposals = {}
        assert self._all_gather is not None
        data = text.encode()
        size = max(theirs[0] for theirs in self._all_gather([len(data)]))
        gathered = self._all_gather([*data, *([0] * (size - len(data)))])
        lines = {line for theirs in gathered for line in bytes(theirs).rstrip(b"\0").decode().split("\n") if line}
        return [(line.split("\t")[0], line.split("\t")[1]) for line in sorted(lines)]

    def _first_difference(self) -> Difference:
        assert self._all_gather is not None
        ring = [number for entry in self._ring for number in entry]
        gathered = self._all_gather(ring + [-1] * (2 * RING - len(ring)))
        rings = [dict(zip(theirs[::2], theirs[1::2], strict=True)) for theirs in gathered]
        for known in rings:
            known.pop(-1, None)
        steps = sorted(set().union(*rings))
        for i, step in enumerate(steps):
            seen = [known.get(step) for known in rings]
            if any(value != seen[0] for value in seen):
                ranks = [rank for rank, value in enumerate(seen) if value != seen[0]]
                return Difference(step, exact=i > 0 or step == 1, ranks=ranks)
        return Difference(self.step, exact=False, ranks=list(range(1, self.world)))

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "hash": f"{self.hash:016x}", "checked_step": self.checked_step, "world": self.world}


def signature(text: str) -> int:
    """A hash of `text` that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())
