"""The PTX machine with what kernels with rings use besides: copies onto mbarriers, named barriers, atomics, votes.

Such a copy lands at once or only when somebody waits for its barrier, by chance: a stage that is filled while it is still read
shows as well as one that is read before it is full.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import ptx_machine
from ptx_machine import BASE, LANE, LANES, POLL, Array, Launch, Step, Warp, land


class BulkLaunch(Launch):
    """A launch that knows more instructions."""

    def _step(self, name: str, operands: list[str], scopes: Any, text: str) -> Step:
        root, kind = name.split(".")[0], name.split(".")[-1]
        if name.startswith("createpolicy"):  # a hint to a cache, which this machine has not
            policy = self._named(operands[0], scopes)
            return lambda warp, mask: warp.write(policy, np.zeros(LANES, dtype=np.uint64), mask)
        if name.startswith("cp.async.bulk.shared"):
            return self._bulk(operands, scopes, text)
        if name.startswith("cp.async.mbarrier.arrive.noinc"):
            return self._arrival_of_copies(operands, scopes, text)
        if name.startswith("mbarrier.try_wait"):
            return self._landing(super()._step(name, operands, scopes, text), operands, scopes)
        if name.startswith("mbarrier.arrive.shared"):
            where = self._address(operands[1], scopes)

            def arrive(warp: Warp, mask: Array) -> None:
                for lane in np.flatnonzero(mask):
                    who = warp.threads[lane : lane + 1]
                    warp.block.barrier(int(where(warp)[lane]), who, text).arrive(warp.clocks.release(who))

            return arrive
        if name in ("bar.sync", "barrier.sync") and len(operands) == 2:
            return self._named_barrier(operands, scopes)
        if name == "trap":
            return _trap
        if root in ("atom", "red"):
            return self._atomic(name, operands, scopes, text)
        if root in ("redux", "vote"):
            return self._of_warp(name, operands, scopes)
        if name.startswith("shfl.sync.up"):
            return self._from_below(operands, scopes)
        if root in ("lop3", "popc", "div", "rem", "copysign"):
            return self._number(root, kind, operands, scopes)
        return super()._step(name, operands, scopes, text)

    def _bulk(self, operands: list[str], scopes: Any, text: str) -> Step:
        target, source, barrier = (self._address(operands[i], scopes) for i in (0, 1, 3))
        size = self._source(operands[2], "u32", scopes)

        def copy(warp: Warp, mask: Array) -> None:
            lanes = np.flatnonzero(mask)
            to, where, at, sizes = (np.broadcast_to(f(warp), LANES) for f in (target, source, barrier, size))
            numbers = warp.clocks.copy(warp.threads[lanes])
            for lane, number in zip(lanes, numbers, strict=True):
                count = int(sizes[lane])
                assert count % 16 == 0 and to[lane] % 16 == 0 and where[lane] % 16 == 0, f"misaligned copy: {text}"
                self.memory.at(where[lane] + 16 * np.arange(count // 16), 16, text)
                waiting = vars(warp.block).setdefault("copies", {}).setdefault(int(at[lane]), [])
                places, who = (int(to[lane]) + np.arange(0, count, 2))[None] // 2, warp.threads[lane : lane + 1]
                warp.block.touched.write(who, places, text, np.array([number]))
                warp.block.barrier(int(at[lane]), who, text)
                told = warp.clocks.copied(int(warp.threads[lane]), int(number))
                waiting.append((int(to[lane]), int(where[lane]) - BASE, count, told))
                if self.chance.random() < 0.5:
                    self._land(warp, int(at[lane]))

        return copy

    def _arrival_of_copies(self, operands: list[str], scopes: Any, text: str) -> Step:
        """Each lane arrives when its copies before this have landed: at once, or when somebody waits."""
        where = self._address(operands[0], scopes)

        def arrive(warp: Warp, mask: Array) -> None:
            for lane in np.flatnonzero(mask):
                at, who = int(where(warp)[lane]), warp.threads[lane : lane + 1]
                warp.block.barrier(at, who, text)
                groups = [*warp.closed[lane], warp.open[lane]]
                copies = [copy for group in groups for copy in group.copies]
                for group in groups:
                    group.copies.clear()
                told = warp.clocks.copied(int(who[0]), max((copy[-1] for copy in copies), default=0))
                vars(warp.block).setdefault("arrivals", {}).setdefault(at, []).append((copies, told))
                if self.chance.random() < 0.5:
                    self._land(warp, at)

        return arrive

    def _land(self, warp: Warp, at: int) -> None:
        for copies, told in vars(warp.block).get("arrivals", {}).pop(at, []):
            for copy in copies:
                land(warp.block, self.memory.bytes, copy)
            warp.block.barriers[at].arrive(told)
        waiting = vars(warp.block).get("copies", {}).get(at, [])
        while waiting:
            barrier = warp.block.barriers[at]
            to, source, size, told = waiting.pop()
            warp.block.shared[to : to + size] = self.memory.bytes[source : source + size]
            barrier.bytes -= size
            barrier.tell(told)
            barrier.settle()

    def _landing(self, test: Step, operands: list[str], scopes: Any) -> Step:
        where = self._address(operands[1], scopes)

        def step(warp: Warp, mask: Array) -> None:
            for at in np.unique(where(warp)[mask]):
                self._land(warp, int(at))
            test(warp, mask)

        return step

    def _named_barrier(self, operands: list[str], scopes: Any) -> Step:
        number, threads = (self._source(o, "u32", scopes) for o in operands)

        def meet(warp: Warp, mask: Array) -> None:
            rooms = vars(warp.block).setdefault("rooms", {})
            for room in np.unique(np.broadcast_to(number(warp), LANES)[mask]):
                here = mask & (np.broadcast_to(number(warp), LANES) == room)
                nothing = np.zeros(2 * warp.clocks.threads, dtype=np.int32)
                state = rooms.setdefault(int(room), {"arrived": 0, "over": 0, "since": {}, "told": nothing, "known": nothing})
                for lane in np.flatnonzero(here):
                    key = (warp.number, int(lane))
                    if key not in state["since"]:
                        state["since"][key] = state["over"]
                        state["arrived"] += 1
                        state["told"] = np.maximum(state["told"], warp.clocks.release(warp.threads[lane : lane + 1]))
                if state["arrived"] == int(np.broadcast_to(threads(warp), LANES)[0]):
                    state["arrived"], state["over"], state["known"] = 0, state["over"] + 1, state["told"]
                for lane in np.flatnonzero(here):
                    key = (warp.number, int(lane))
                    if state["since"][key] < state["over"]:
                        del state["since"][key]
                        warp.clocks.acquire(warp.threads[lane : lane + 1], state["known"])
                    else:
                        warp.pc[lane] -= 1
                        warp.status[lane] = POLL

        return meet

    def _atomic(self, name: str, operands: list[str], scopes: Any, text: str) -> Step:
        returns = name.startswith("atom")
        target = self._named(operands[0], scopes) if returns else None
        address, value = self._address(operands[returns], scopes), self._source(operands[1 + returns], "u32", scopes)
        combine = (lambda a, b: a + b) if ".add" in name else (lambda a, b: a | b)
        shared = ".shared" in name

        def step(warp: Warp, mask: Array) -> None:
            old = np.zeros(LANES, dtype=np.uint32)
            for lane in np.flatnonzero(mask):
                at = np.broadcast_to(address(warp), LANES)[lane]
                if shared:
                    space, index = warp.block.shared, int(at) + np.arange(4)
                    assert index[0] >= 0 and index[-1] < space.size, f"access outside of shared memory: {text}"
                    who = warp.threads[lane : lane + 1]
                    warp.block.touched.write(who, index[None, ::2] // 2, text, atomic=True)
                else:
                    space, index = self.memory.bytes, self.memory.at(np.array([at]), 4, text)[0]
                old[lane] = space[index].copy().view(np.uint32)[0]
                new = combine(int(old[lane]), int(np.broadcast_to(value(warp), LANES)[lane])) & 0xFFFFFFFF
                space[index] = np.array([new], dtype=np.uint32).view(np.uint8)
            if target:
                warp.write(target, old, mask)

        return step

    def _of_warp(self, name: str, operands: list[str], scopes: Any) -> Step:
        target, ballot = self._named(operands[0], scopes), name.startswith("vote.sync.ballot")
        value = self._source(operands[1], "pred" if ballot else "u32", scopes)
        reduce = np.maximum if ".max" in name else np.minimum if ".min" in name else np.add

        def step(warp: Warp, mask: Array) -> None:
            assert mask.all(), f"{name} wants a whole warp"
            warp.clocks.meet(warp.threads)
            found = np.broadcast_to(value(warp), LANES)
            result = (found.astype(np.uint64) << LANE.astype(np.uint64)).sum() if ballot else reduce.reduce(found)
            warp.write(target, np.full(LANES, result, dtype=np.uint32), mask)

        return step

    def _from_below(self, operands: list[str], scopes: Any) -> Step:
        target = self._named(operands[0].split("|")[0], scopes)
        value, by = (self._source(operands[i], "u32", scopes) for i in (1, 2))

        def step(warp: Warp, mask: Array) -> None:
            assert mask.all(), "a shuffle wants a whole warp"
            warp.clocks.meet(warp.threads)
            at = LANE - np.broadcast_to(by(warp), LANES).astype(np.int64)
            warp.write(target, np.broadcast_to(value(warp), LANES)[np.where(at >= 0, at, LANE)], mask)

        return step

    def _number(self, root: str, kind: str, operands: list[str], scopes: Any) -> Step:
        target, kind = self._named(operands[0], scopes), "u32" if root in ("lop3", "popc") else kind
        inputs = [self._source(o, kind, scopes) for o in operands[1:4]]
        assert root != "lop3" or operands[4].lower() == "0xca", "one function of three words is known: b where a, else c"

        def quotient(a: Array, b: Array) -> Array:
            if kind == "f32":
                return (a.astype(np.float64) / b).astype(np.float32)
            a, b = a.astype(np.int64), b.astype(np.int64)
            return np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))

        def compute(values: list[Array]) -> Array:
            if root == "lop3":
                return (values[0] & values[1]) | (~values[0] & values[2])
            if root == "popc":
                return np.array([bin(int(v)).count("1") for v in values[0]])
            if root == "copysign":  # PTX names the sign's donor first
                return np.copysign(values[1], values[0])
            if root == "div":
                return quotient(*values)
            return values[0].astype(np.int64) - quotient(*values) * values[1].astype(np.int64)

        def step(warp: Warp, mask: Array) -> None:
            found = compute([np.broadcast_to(f(warp), LANES) for f in inputs])
            bits = found if kind == "f32" else found.astype(np.int64).astype(np.uint32)
            warp.write(target, bits.view(np.uint32), mask)

        return step


def _trap(warp: Warp, mask: Array) -> None:
    raise AssertionError(f"the kernel gave up in block {warp.block.index}, warp {warp.number}")


run = partial(ptx_machine.run, machine=BulkLaunch)
run_ranks = partial(ptx_machine.run_ranks, machine=BulkLaunch)
run_streams = partial(ptx_machine.run_streams, machine=BulkLaunch)
