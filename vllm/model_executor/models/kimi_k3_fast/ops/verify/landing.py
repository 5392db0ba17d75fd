"""Loads of shared memory that may not be there yet, in SASS.

A ring's stage is freed by an arrival on an mbarrier and filled anew by a copy that waits for it. In PTX the arrival is ordered
behind the loads before it. The assembler keeps their order of issue, and lets the arrival go while loads are under way. It is an
error while one is whose value is still wanted, unless a proxy fence behind it is done (`FENCE.VIEW.ASYNC`).

A load tells one of six counters when its value is there, and a later instruction waits until that counter is empty. A load that
tells none is there before the next load or shuffle that does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .flow import Instruction, Program

UNTOLD = 7  # the counter of a load that tells none
# Registers that are still to be filled, each with the counter that will tell, or with the guard of the load where it tells none
# ("": none, "?": not known any more).
Landing = frozenset[tuple[int | str, str]]
FENCE = "a fence"  # in the place of all registers before it
_WIDE = re.compile(r"MMA|\.(64|128)\b")  # may read the registers behind the ones it names


def left(instruction: Instruction, landing: Landing) -> Landing:
    """Of the loads that may be under way, those that an instruction does not wait for."""
    return frozenset((by, to) for by, to in landing if isinstance(by, str) or not instruction.awaits >> by & 1)


def behind(instruction: Instruction, landing: Landing) -> Landing:
    """What may be under way behind an instruction."""
    still = left(instruction, landing)
    if instruction.predicates:  # a guard that is written anew says nothing of the loads before
        anew = instruction.predicates
        still = frozenset(("?" if isinstance(by, str) and by.lstrip("@!") in anew else by, to) for by, to in still)
    counter = instruction.shuffles if instruction.lands is None else instruction.lands
    if counter is None:
        return still
    loaded = instruction.writes if instruction.lands is not None else ()
    if instruction.fences:
        still, loaded = frozenset(), (FENCE,)
    guard = (instruction.guard or "?") if instruction.guarded and instruction.lands is not None else ""
    if counter == UNTOLD:
        return still | {(guard, to) for to in loaded}
    surely_before = {(by, to) for by, to in still if isinstance(by, str) and (not guard or by == guard != "?")}
    return still - surely_before | {(counter, to) for to in (*loaded, *(to for _, to in surely_before))}


def wanted(program: Program, at: int, registers: set[str]) -> bool:
    """Whether a register is read on some way from behind instruction `at`, before it is written; a fence is wanted. Ways that
    cannot be told apart count as ways."""
    if FENCE in registers:
        return True
    seen: dict[int, set[str]] = {}
    waiting = [(place, registers) for place in following(program, at)]
    while waiting:
        here, open_ = waiting.pop()
        open_ = open_ - seen.get(here, set())
        if not open_:
            continue
        seen.setdefault(here, set()).update(open_)
        instruction = program.instructions[here]
        if open_ & _read(instruction):
            return True
        open_ = open_ if instruction.guarded else open_ - {*instruction.writes}
        waiting += [(place, open_) for place in following(program, here)]
    return False


def _read(instruction: Instruction) -> set[str]:
    named = {*instruction.reads, *instruction.stored, *(r for memory in instruction.memory for r in memory.address)}
    if not _WIDE.search(instruction.text):
        return named
    parts = [re.fullmatch(r"(U?R)(\d+)", register) for register in named]
    return named | {f"{part[1]}{int(part[2]) + i}" for part in parts if part for i in range(4)}


def following(program: Program, at: int) -> list[int]:
    """Where control may go on from behind an instruction."""
    instruction = program.instructions[at]
    kind = instruction.kind.name
    targets = list(instruction.targets)
    if kind == "JOIN":  # to wherever threads were sent that meet there
        senders = (i for i in program.instructions if i.kind.name == "SET_JOIN" and i.barrier == instruction.barrier)
        targets = [target for sender in senders for target in sender.targets]
    elif kind == "SET_JOIN":
        targets = []
    found = [program.labels[target] for target in targets]
    if instruction.guarded or kind not in ("BRANCH", "EXIT", "JOIN", "RETURN"):
        found.append(at + 1)
    return [place for place in found if place < len(program.instructions)]
