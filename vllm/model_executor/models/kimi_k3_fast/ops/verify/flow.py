"""Where an address comes from, and what a thread has surely done before it uses it: one data-flow pass for PTX and SASS alike.

A program is a list of `Instruction`s with labels. Along every path the pass carries

  origins   for each register, the kernel parameters that its value may point into (a set of bits). Arithmetic joins the sets of
            its operands; a value loaded from memory is data, unless it was loaded from a table of pointers.
  waited    on every path to here this thread has executed the dependency wait.
  acquired  on every path to here this thread has acquired a peer's writes, itself or through a barrier behind a thread that has.
  fenced    on every path to here a system fence stands behind this thread's last store into a mailbox.
  landing   loads of shared memory that may not be there yet, on some path to here: SASS alone tells (`landing.py`).

Paths that meet keep the worst of both. Joins of divergent warps (SASS `BSSY`/`BSYNC`) and calls are followed to where they lead,
each call with its own copy of the callee, so that a subroutine used before and after the wait does not mix the two.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import landing

DATA = 1 << 62  # a number loaded from memory or read from a special register: no pointer
SHARED = 1 << 61  # an address in shared or local memory


class Kind(enum.Enum):
    PLAIN = enum.auto()
    WAIT = enum.auto()  # griddepcontrol.wait
    RELEASE = enum.auto()  # griddepcontrol.launch_dependents
    FENCE = enum.auto()  # memory fence; `system` says how far it reaches
    INVALIDATE = enum.auto()  # SASS only: the L1 invalidation by which the strong load before it becomes an acquire
    BARRIER = enum.auto()  # block- or cluster-wide barrier
    ARRIVAL = enum.auto()  # SASS only: on an mbarrier, for whoever waits there
    BRANCH = enum.auto()
    CALL = enum.auto()
    RETURN = enum.auto()
    EXIT = enum.auto()
    SET_JOIN = enum.auto()  # BSSY: where the divergent threads will meet
    JOIN = enum.auto()  # BSYNC: go there


class Use(enum.Enum):
    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"
    PREFETCH = "prefetch"  # into L2, where all writes meet: reads nothing into the kernel


class Space(enum.Enum):
    GLOBAL = enum.auto()
    GENERIC = enum.auto()
    SHARED = enum.auto()
    LOCAL = enum.auto()


@dataclass(slots=True)
class Memory:
    """One memory access of an instruction. `address`: the registers and parameters that form it."""

    use: Use
    space: Space
    address: tuple[str, ...] = ()
    params: int = 0
    strong: bool = False  # relaxed, acquire, release or volatile: takes part in synchronisation
    system: bool = False  # at system scope
    acquire: bool = False
    release: bool = False
    constant: bool = False  # non-coherent load: promises that nobody writes the memory while the kernel runs
    past_l1: bool = False  # a copy into shared memory that reads L2


@dataclass(slots=True)
class Instruction:
    text: str
    kind: Kind = Kind.PLAIN
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    params: int = 0  # parameters whose pointer the instruction reads directly
    each: tuple[int, ...] = ()  # per written register, when they differ (a wide load of several parameters)
    guarded: bool = False  # under a predicate: may not execute
    guard: str = ""  # that predicate with its sign, where it is known ("@!P1")
    predicates: frozenset[str] = frozenset()  # predicates named among the operands, and so perhaps written
    targets: tuple[str, ...] = ()  # labels
    barrier: str = ""  # name of the convergence barrier of SET_JOIN and JOIN
    system: bool = False
    memory: list[Memory] = field(default_factory=list)
    stored: tuple[str, ...] = ()  # registers whose value goes to shared or local memory
    # SASS only, see `landing`: the counters that an instruction waits for, as bits, and the one that a load of shared memory
    # tells, or `UNTOLD`; or a fence; or a shuffle that surely runs.
    awaits: int = 0
    tells: int | None = None  # the counter that its results tell, whatever it is
    lands: int | None = None
    shuffles: int | None = None
    fences: bool = False  # SASS only: shared memory, against the async proxy


@dataclass
class Program:
    """Instructions, and for each label the index of the instruction behind it."""

    instructions: list[Instruction]
    labels: dict[str, int]


class Unresolved(Exception):
    """The program does something that the pass cannot follow; that is an error, never a pass."""


@dataclass
class State:
    origins: dict[str, int] = field(default_factory=dict)
    waited: bool = False
    acquired: bool = False
    may_have_acquired: bool = False
    may_have_polled: bool = False  # a strong load of a peer's memory: what a later fence turns into an acquire
    fenced: bool = False
    landing: landing.Landing = frozenset()
    joins: dict[str, frozenset[str]] = field(default_factory=dict)
    # What a register holds where the guard it was last written under is true; known within a basic block only.
    under: dict[str, tuple[str, int]] = field(default_factory=dict)

    def copy(self) -> State:
        return replace(self, origins=dict(self.origins), joins=dict(self.joins), under={})

    def of(self, register: str, guard: str) -> int:
        """Origins of a register as an instruction under `guard` sees it."""
        written_under, bits = self.under.get(register, ("", 0))
        return bits if guard and guard == written_under else self.origins.get(register, 0)

    def merge(self, other: State) -> bool:
        """Weaken this state to what holds on both paths. True if that changed it."""
        changed = False
        mine = self.origins
        for register, bits in other.origins.items():
            old = mine.get(register, 0)
            if bits & ~old:
                mine[register] = old | bits
                changed = True
        for name in ("waited", "acquired", "fenced"):
            if getattr(self, name) and not getattr(other, name):
                setattr(self, name, False)
                changed = True
        if not other.landing <= self.landing:
            self.landing |= other.landing
            changed = True
        for name in ("may_have_acquired", "may_have_polled"):
            if getattr(other, name) and not getattr(self, name):
                setattr(self, name, True)
                changed = True
        for barrier, labels in other.joins.items():
            if labels - self.joins.get(barrier, frozenset()):
                self.joins[barrier] = self.joins.get(barrier, frozenset()) | labels
                changed = True
        return changed


Point = tuple[int, tuple[int, ...]]  # instruction index, and the return points of the calls on the way there


class Flow:
    """The pass over one program.

    `pointees`: for a parameter bit, the bits of what the pointers stored in that parameter point to. `peer_bits`: the parameter
    bits of mailboxes and signals, whose stores a fence has to follow and whose loads may acquire.
    """

    def __init__(self, program: Program, pointees: dict[int, int], peer_bits: int) -> None:
        self.program = program
        self.pointees = pointees
        self.peer_bits = peer_bits
        self.starts = self._block_starts()
        self.in_shared = DATA  # what values in shared and in local memory may point to, over the whole program
        self.in_local = DATA
        self.states: dict[Point, State] = {}

    def run(self, visit: Callable[[Instruction, State, Flow], None]) -> None:
        """Solve, then call `visit` with every reachable instruction and the state before it."""
        while True:
            before = (self.in_shared, self.in_local)
            self._solve()
            if before == (self.in_shared, self.in_local):  # else a store found late widens a load met early
                break
        for point, state in self.states.items():
            self._walk(point, state.copy(), visit)

    def origins(self, memory: Memory, state: State, guard: str = "") -> int:
        """Bits of what an access of an instruction under `guard` may touch."""
        bits = memory.params
        for register in memory.address:
            bits |= state.of(register, guard)
        return bits

    # -- solving ----------------------------------------

    def _block_starts(self) -> set[int]:
        starts = {0, *self.program.labels.values()}
        for i, instruction in enumerate(self.program.instructions):
            if instruction.kind in (Kind.BRANCH, Kind.CALL, Kind.RETURN, Kind.EXIT, Kind.JOIN):
                starts.add(i + 1)
        return starts

    def _solve(self) -> None:
        self.states = {(0, ()): State()}
        waiting: list[Any] = [(0, ())]  # a heap: blocks in the order of the text, so that most are walked once
        while waiting:
            point = heapq.heappop(waiting)
            for successor, state in self._walk(point, self.states[point].copy(), None):
                if successor not in self.states:
                    self.states[successor] = state.copy()
                elif not self.states[successor].merge(state):
                    continue
                if successor not in waiting:
                    heapq.heappush(waiting, successor)

    def _walk(
        self, point: Point, state: State, visit: Callable[[Instruction, State, Flow], None] | None
    ) -> list[tuple[Point, State]]:
        """Run one basic block from `point`; the points that may follow, with the state they start from."""
        index, stack = point
        instructions = self.program.instructions
        while True:
            if index >= len(instructions):
                raise Unresolved("control runs past the end of the program")
            instruction = instructions[index]
            if visit:
                visit(instruction, state, self)
            self._step(instruction, state)
            if instruction.kind in (Kind.BRANCH, Kind.CALL, Kind.RETURN, Kind.EXIT, Kind.JOIN):
                return [(follower, state) for follower in self._followers(instruction, index, stack, state)]
            index += 1
            if index in self.starts:
                return [((index, stack), state)]

    def _followers(self, instruction: Instruction, index: int, stack: tuple[int, ...], state: State) -> list[Point]:
        fall_through = [(index + 1, stack)] if instruction.guarded else []
        if instruction.kind is Kind.EXIT:
            return fall_through
        if instruction.kind is Kind.RETURN:
            if not stack:
                raise Unresolved(f"a return outside of a call: {instruction.text}")
            return [(stack[-1], stack[:-1]), *fall_through]
        labels = instruction.targets
        if instruction.kind is Kind.JOIN:
            labels = tuple(state.joins.get(instruction.barrier, ()))
        if not labels or any(label not in self.program.labels for label in labels):
            raise Unresolved(f"a jump to an unknown place: {instruction.text}")
        if instruction.kind is Kind.CALL:
            if len(stack) > 8:
                raise Unresolved(f"calls nested too deeply, or recursive: {instruction.text}")
            stack = (*stack, index + 1)
        return [*((self.program.labels[label], stack) for label in labels), *fall_through]

    def _step(self, instruction: Instruction, state: State) -> None:
        """The effect of one instruction on the state."""
        if not instruction.guarded:
            if instruction.kind is Kind.WAIT:
                state.waited = True
            elif instruction.kind is Kind.FENCE and instruction.system:
                state.fenced = True
            elif instruction.kind is Kind.SET_JOIN:
                state.joins[instruction.barrier] = frozenset(instruction.targets)
        elif instruction.kind is Kind.SET_JOIN:
            state.joins[instruction.barrier] = state.joins.get(instruction.barrier, frozenset()) | frozenset(instruction.targets)
        if instruction.kind in (Kind.FENCE, Kind.INVALIDATE) and state.may_have_polled:
            self._acquired(instruction, state)
        elif instruction.kind is Kind.BARRIER and state.may_have_acquired:
            state.acquired = True
        for memory in instruction.memory:
            touched = self.origins(memory, state, instruction.guard)
            if memory.use is not Use.STORE and memory.strong and memory.system and touched & self.peer_bits:
                state.may_have_polled = True
                if memory.acquire:
                    self._acquired(instruction, state)
            if memory.use in (Use.STORE, Use.ATOMIC) and touched & self.peer_bits and not memory.release:
                state.fenced = False
        self._write(instruction, state)
        state.landing = landing.behind(instruction, state.landing)

    @staticmethod
    def _acquired(instruction: Instruction, state: State) -> None:
        state.may_have_acquired = True
        state.acquired |= not instruction.guarded

    def _write(self, instruction: Instruction, state: State) -> None:
        bits = instruction.params
        for register in instruction.reads:
            bits |= state.of(register, instruction.guard)
        for memory in instruction.memory:
            if memory.use in (Use.LOAD, Use.ATOMIC):
                bits = self._loaded(memory, state, instruction.guard)
            elif memory.space is not Space.GLOBAL:
                for register in instruction.stored:
                    self._remember(memory.space, state.of(register, instruction.guard))
        for register, (guard, _) in list(state.under.items()):
            if guard.lstrip("@!") in instruction.predicates:
                del state.under[register]
        for i, register in enumerate(instruction.writes):
            new = instruction.each[i] if instruction.each else bits
            state.origins[register] = new | (state.origins.get(register, 0) if instruction.guarded else 0)
            state.under.pop(register, None)
            if instruction.guard:
                state.under[register] = (instruction.guard, new)

    def _loaded(self, memory: Memory, state: State, guard: str) -> int:
        if memory.space is Space.SHARED:
            return self.in_shared
        if memory.space is Space.LOCAL:
            return self.in_local
        bits = DATA
        touched = self.origins(memory, state, guard)
        if memory.space is Space.GENERIC and touched & SHARED:
            bits |= self.in_shared | self.in_local
        for parameter, pointee in self.pointees.items():
            if touched & parameter:
                bits |= pointee
        return bits

    def _remember(self, space: Space, bits: int) -> None:
        if space is not Space.LOCAL:
            self.in_shared |= bits & ~SHARED
        if space is not Space.SHARED:
            self.in_local |= bits & ~SHARED
