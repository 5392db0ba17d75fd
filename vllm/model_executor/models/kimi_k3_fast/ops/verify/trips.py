"""How often a kernel waits for global memory, one time behind the other: read from SASS, no GPU needed.

    python -m vllm.model_executor.models.kimi_k3_fast.ops.verify.trips --op attn_res [--arch sm_90a]

Small kernels of a decode step last as long as their trips to L2, some 0.6 us each on H200. In PTX loads may stand side by side
and in SASS one behind the other: for want of registers, or since two share a counter, or since an address is made of what another
brings. A load's trip is one more than that of the loads whose counters were waited for before it was issued, counted from the
dependency wait on. Where paths meet the larger number counts: two warps' branches, one behind the other in the text, may count as
one way, and so does the way of a kernel over ranks that has lost a peer. Loops count once: a ring goes on for as many turns as it
has. Bulk copies tell barriers, not counters, and are not counted.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field

from .. import build, index
from ..build import KernelSpec
from ..cubin import parameter_offsets
from . import disassemble, sass
from .flow import Instruction, Kind, Program
from .landing import following

_LOADS = ("LDG", "LD", "LDGSTS", "ATOMG", "ATOM")
_GROUPS_LEFT = re.compile(r"DEPBAR\.LE SB\d, 0x([0-9a-f]+)")


@dataclass
class _Place:
    """Before an instruction: the latest trip that was waited for (-1 before the dependency wait), those under way by the counter
    that they tell, and of groups of asynchronous copies, the open one last."""

    waited: int = -1
    under_way: dict[int, int] = field(default_factory=dict)
    groups: tuple[int, ...] = (0,)

    def met(self, other: _Place | None) -> _Place:
        if other is None:
            return self
        counters = {*self.under_way, *other.under_way}
        under_way = {c: max(self.under_way.get(c, 0), other.under_way.get(c, 0)) for c in counters}
        return _Place(max(self.waited, other.waited), under_way, max(self.groups, other.groups, key=len))


def trips(program: Program) -> list[tuple[int, Instruction]]:
    """Every load of global memory behind the dependency wait, in the order of the text, with the number of its trip."""
    places: list[_Place | None] = [None] * len(program.instructions)
    places[0] = _Place()
    found = []
    for at, instruction in enumerate(program.instructions):
        place = places[at]
        if place is None:
            continue
        place = _behind_waiting(instruction, place)
        if place.waited >= 0 and instruction.text.split()[0].partition(".")[0] in _LOADS:
            found.append((place.waited + 1, instruction))
            place = _issued(instruction, place)
        for further in following(program, at):
            if further > at:
                places[further] = place.met(places[further])
    return found


def _behind_waiting(instruction: Instruction, place: _Place) -> _Place:
    if instruction.kind is Kind.WAIT:
        return _Place(0)
    if place.waited < 0:
        return place
    waited = [trip for counter, trip in place.under_way.items() if instruction.awaits >> counter & 1]
    under_way = {counter: trip for counter, trip in place.under_way.items() if not instruction.awaits >> counter & 1}
    groups = place.groups
    if instruction.text.startswith("LDGDEPBAR"):
        groups = (*groups, 0)
    elif left := _GROUPS_LEFT.match(instruction.text):
        closed = groups[:-1]
        done = max(len(closed) - int(left[1], 16), 0)
        waited, groups = [*waited, *closed[:done]], (*closed[done:], groups[-1])
    return _Place(max([place.waited, *waited]), under_way, groups)


def _issued(instruction: Instruction, place: _Place) -> _Place:
    trip = place.waited + 1
    if instruction.text.startswith("LDGSTS"):
        return _Place(place.waited, place.under_way, (*place.groups[:-1], trip))
    if instruction.tells is None:
        return place
    return _Place(place.waited, place.under_way | {instruction.tells: trip}, place.groups)


def of(spec: KernelSpec, arch: str) -> list[tuple[int, Instruction]]:
    """The trips of a kernel, compiled now if it is missing."""
    cubin = build.artefact(spec, arch, "cubin")
    return trips(sass.parse(disassemble(cubin), parameter_offsets(cubin)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=index.OPS)
    parser.add_argument("--arch", default="sm_90a", choices=build.ARCHS)
    parser.add_argument("--loads", action="store_true", help="list each load")
    options = parser.parse_args()
    for spec in index.specs(options.op):
        loads = of(spec, options.arch)
        print(f"{max((trip for trip, _ in loads), default=0)} trips  {spec.name}  {spec.config}", flush=True)
        for trip, instruction in loads if options.loads else ():
            print(f"    {trip}  {instruction.text}")


if __name__ == "__main__":
    main()
