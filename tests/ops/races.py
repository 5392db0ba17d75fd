"""Races on shared memory, found by what orders accesses and not by what they happened to do: for the PTX machine.

Every thread of a cluster has a vector clock; barriers, mbarriers, warp barriers and waits for copies join clocks. An access that
meets another one of the same two bytes, one of them a write, must come behind it by these clocks, or the launch fails: in any
order of warps, so that one order finds what another would have to be lucky to show. Copies write at any time between their issue
and the wait for them. Where a warp's lanes are at one instruction (a shuffle, a vote, the tensor core) they have met: one warp's
own accesses of shared memory are carried out in order. Global memory is not looked at.

(The algorithm is FastTrack's, Flanagan and Freund 2009, with all readers kept.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray


class Race(AssertionError):
    """Two accesses of shared memory that nothing orders."""


class Clocks:
    """Of the threads of a cluster, row by row: what each knows of every thread, and of every thread's copies behind them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.known = np.zeros((threads, 2 * threads), dtype=np.int32)
        self.known[:, :threads] = np.eye(threads, dtype=np.int32)
        self.issued = np.zeros(threads, dtype=np.int32)  # copies

    def release(self, who: Array) -> Array:
        """What these threads know, together; what they do from now on is behind it."""
        told = self.known[who].max(0)
        self.known[who, who] += 1
        return told

    def acquire(self, who: Array, told: Array) -> None:
        self.known[who] = np.maximum(self.known[who], told)

    def meet(self, who: Array) -> None:
        """A barrier of these threads."""
        self.acquire(who, self.release(who))

    def copy(self, who: Array) -> Array:
        """Numbers of a copy that each of these threads issues."""
        self.issued[who] += 1
        return self.issued[who]

    def copied(self, who: int, copy: int) -> Array:
        """What an mbarrier knows of a copy that it was told of."""
        told = np.zeros(2 * self.threads, dtype=np.int32)
        told[self.threads + who] = copy
        return told

    def landed(self, who: int, copy: int) -> None:
        """A thread has waited for its own copy."""
        self.known[who, self.threads + who] = max(self.known[who, self.threads + who], copy)


class Shared:
    """Who touched which two bytes of a block's shared memory."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        # 1 + a thread, or 1 + a thread's copies, which are numbered behind all threads; or nobody.
        self.writer, self.written = np.zeros((2, 0), dtype=np.int32)
        self.atomic = np.zeros(0, dtype=bool)
        self.read_at = np.zeros((0, clocks.threads), dtype=np.int32)

    def _reach(self, places: Array) -> None:
        """Rows for these places. Memory that is zero is not touched before it is used: more than enough costs nothing."""
        wanted, held = int(places.max()) + 1, len(self.writer)
        if wanted <= held:
            return
        for name in ("writer", "written", "atomic", "read_at"):
            old = getattr(self, name)
            new = np.zeros((4 * max(wanted, 512), *old.shape[1:]), dtype=old.dtype)
            new[:held] = old
            setattr(self, name, new)

    def _check_writers(self, who: Array, places: Array, what: str, text: str, atomic: bool = False) -> None:
        self._reach(places)
        writer, known = self.writer[places] - 1, self.clocks.known
        unordered = self.written[places] > known[who[:, None], writer]  # nobody wrote at time 0
        if atomic:
            unordered &= ~self.atomic[places]
        if unordered.any():
            i, j = np.argwhere(unordered)[0]
            self._fail(who[i], what, int(places[i, j]), "wrote", int(writer[i, j]), text)

    def read(self, who: Array, places: Array, text: str) -> None:
        """who: [lanes] threads of the cluster; places: [lanes, n] pairs of bytes."""
        self._check_writers(who, places, "reads", text)
        self.read_at[places, who[:, None]] = self.clocks.known[who, who][:, None]

    def uses(self, who: Array, place: int, text: str) -> None:
        """An mbarrier at that byte, which must have been made before."""
        self._check_writers(who, np.full((len(who), 1), place // 2), "uses", text)

    def ends(self, own: Array) -> None:
        """The block's threads have all left, and its memory with them."""
        others = np.setdiff1d(np.arange(self.clocks.threads), own)
        if not len(others):
            return
        known = self.clocks.known[own].max(0)
        late = np.argwhere(self.read_at[:, others] > known[others])
        if len(late):
            self._fail(own[0], "ends", int(late[0][0]), "read", int(others[late[0][1]]), "ret")
        writer = self.writer - 1
        late = np.flatnonzero(np.isin(writer % self.clocks.threads, others) & (self.written > known[writer]))
        if len(late):
            self._fail(own[0], "ends", int(late[0]), "wrote", int(writer[late[0]]), "ret")

    def write(self, who: Array, places: Array, text: str, copies: Array | None = None, atomic: bool = False) -> None:
        """copies: numbers of the threads' copies, if these write. atomic: two of these need no order."""
        self._check_writers(who, places, "writes", text, atomic)
        known = self.clocks.known
        for lane, mine in zip(who, places, strict=True):
            unordered = self.read_at[mine] > known[lane, : self.clocks.threads]
            if unordered.any():
                i, reader = np.argwhere(unordered)[0]
                self._fail(lane, "writes", int(mine[i]), "read", int(reader), text)
        self.read_at[places] = 0
        own = self.clocks.known[who, who] if copies is None else copies
        self.writer[places] = 1 + (who if copies is None else who + self.clocks.threads)[:, None]
        self.written[places] = own[:, None]
        self.atomic[places] = atomic

    def _fail(self, who: Any, what: str, place: int, did: str, other: int, text: str) -> None:
        copy = other >= self.clocks.threads
        whose = f"a copy of thread {other - self.clocks.threads}" if copy else f"thread {other}"
        raise Race(f"thread {who} {what} byte {2 * place} of shared memory, which {whose} {did} with nothing between: {text}")
