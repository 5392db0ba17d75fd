"""The order checker: no kernel reads another's memory before the wait or the acquire that orders it.

`check(spec, arch)` reads the PTX and the SASS of a kernel's artefact, follows every address back to a kernel parameter
(`flow.py`) and holds each access against what the parameter's `Access` allows:

  STATIC        read any time; never written.
  ACTIVATION, STATE, OUTPUT
                touched only where every path has executed the dependency wait; not by non-coherent loads, which promise that
                nobody writes the memory while this kernel runs: under programmatic dependent launch the producer does.
  SETTLED       as above, but read before the wait, too, by what passes L1 by: strong loads, copies into shared memory. A kernel
                that `settles` for others releases its dependents nowhere but behind its own wait.
  MAILBOX       as ACTIVATION, and read only behind an acquire of a peer's writes, or by strong system-scope loads of words that
                carry their own epoch.
  SIGNAL        as above; read by strong system-scope loads, written with release or behind a system fence.

An arrival on an mbarrier, by which another thread learns that it may overwrite shared memory, stands behind the loads of that
memory: on every path those that are used are there (`landing.py`).

A kernel in which no path executes the wait is refused: its successors could not rely on their own wait for anything older. So is
a kernel whose weight loads stand before the wait in PTX and none does in SASS: the assembler has undone the point of the launch.
What cannot be followed is an error, never a pass.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..build import Access, KernelSpec, artefact, tool
from ..cubin import parameter_offsets
from . import landing, ptx, sass
from .flow import SHARED, Flow, Instruction, Kind, Memory, Program, Space, State, Unresolved, Use

PEER = (Access.MAILBOX, Access.SIGNAL)
_ARRIVAL = re.compile(r"\bmbarrier\.arrive\.(?!expect_tx)")


@dataclass(frozen=True)
class Finding:
    """One violation: where (PTX or SASS), the instruction, and what is wrong with it."""

    stage: str
    instruction: str
    problem: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.problem}\n    {self.instruction}"


@dataclass
class Report:
    """What was found in one kernel.

    `early`: static and settled loads that start before the wait, by stage; `ordered`: accesses that stand behind it.
    """

    kernel: str
    arch: str
    findings: list[Finding] = field(default_factory=list)
    early: dict[str, int] = field(default_factory=dict)
    ordered: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        counts = ", ".join(
            f"{stage} {self.early.get(stage, 0)} early and {n} ordered accesses" for stage, n in self.ordered.items()
        )
        lines = [f"{'ok  ' if self.passed else 'FAIL'} {self.kernel} {self.arch}: {counts}", *map(str, self.findings)]
        return "\n".join(lines)


class _Judge:
    """The rules, applied to each instruction that the flow visits."""

    def __init__(self, stage: str, accesses: list[Access], pointees: list[Access | None]) -> None:
        self.stage, self.accesses, self.pointees = stage, accesses, pointees
        self.count = len(accesses)
        self.findings: dict[tuple[str, str], None] = {}
        self.early: set[int] = set()
        self.ordered: set[int] = set()
        self.waits_somewhere = False
        self.releases_early = ""

    def visit(self, instruction: Instruction, state: State, flow: Flow) -> None:
        if instruction.kind is Kind.EXIT and state.waited:
            self.waits_somewhere = True
        if instruction.kind is Kind.RELEASE and not state.waited:
            self.releases_early = instruction.text
        if instruction.kind is Kind.ARRIVAL:
            under_way = {register for _, register in landing.left(instruction, state.landing)}
            at = next(i for i, other in enumerate(flow.program.instructions) if other is instruction)
            if landing.wanted(flow.program, at, under_way):
                problem = "an arrival while loads of shared memory are under way: what they are to read may be overwritten"
                self.findings[instruction.text, problem] = None
        for memory in instruction.memory:
            if memory.space in (Space.GLOBAL, Space.GENERIC):
                bits = flow.origins(memory, state, instruction.guard)
                for problem in self._problems(instruction, memory, bits, state):
                    self.findings[instruction.text, problem] = None

    def _touched(self, bits: int) -> list[Access]:
        """What an address with these origins may point into: parameters, and what pointers kept in parameters point to."""
        found = [self.accesses[i] for i in range(self.count) if bits >> i & 1]
        found += [p for i, p in enumerate(self.pointees) if p and bits >> (self.count + i) & 1]
        return found

    def _problems(self, instruction: Instruction, memory: Memory, bits: int, state: State) -> Iterable[str]:
        touched = self._touched(bits)
        if not touched:
            if not (memory.space is Space.GENERIC and bits & SHARED) and memory.use is not Use.PREFETCH:
                yield "the address cannot be followed to a kernel parameter"
            return
        (self.ordered if state.waited else self.early).add(id(instruction))
        if memory.use is Use.PREFETCH:
            return
        for access in dict.fromkeys(touched):
            yield from self._rules(access, memory, state)

    def _rules(self, access: Access, memory: Memory, state: State) -> Iterable[str]:
        what = f"{memory.use.value} of {access.name}"
        if access is Access.STATIC:
            if memory.use is not Use.LOAD:
                yield f"{what}: a static parameter is never written"
            return
        settled = access is Access.SETTLED and memory.use is Use.LOAD
        if settled and not state.waited and not (memory.strong or memory.past_l1):
            yield f"{what} before the dependency wait by a load that may find in L1 what was there before"
        if not state.waited and not settled:
            yield f"{what} before the dependency wait, on at least one path"
        if memory.constant:
            yield f"{what} by a non-coherent load, which assumes that no other kernel writes the memory meanwhile"
        strong = memory.strong and memory.system
        if access is Access.MAILBOX and memory.use is Use.LOAD and not strong and not state.acquired:
            yield f"{what} without an acquire of the peer's writes on every path"
        if access is Access.SIGNAL and not strong:
            yield f"{what} by an access that does not synchronise at system scope"
        if access is Access.SIGNAL and memory.use is not Use.LOAD and not memory.release and not state.fenced:
            yield f"{what} without release: the peer may see the signal before the data"


def check_program(
    stage: str,
    program: Program,
    accesses: list[Access],
    pointees: list[Access | None],
    report: Report,
    settles: bool = False,
) -> None:
    """Run the rules over one program and add what they find to the report."""
    judge = _Judge(stage, accesses, pointees)
    count = len(accesses)
    tables = {1 << i: 1 << (count + i) for i, pointee in enumerate(pointees) if pointee}
    peers = sum(1 << i for i, access in enumerate(accesses) if access in PEER)
    peers |= sum(1 << (count + i) for i, pointee in enumerate(pointees) if pointee in PEER)
    try:
        Flow(program, tables, peers).run(judge.visit)
    except Unresolved as reason:
        report.findings.append(Finding(stage, "", f"not followed: {reason}"))
        return
    report.findings += [Finding(stage, text, problem) for text, problem in judge.findings]
    if not judge.waits_somewhere:
        report.findings.append(Finding(stage, "", "no thread surely executes the dependency wait before it ends"))
    if settles and judge.releases_early:
        problem = "releases its dependents before the dependency wait, on at least one path: they read what it is to settle"
        report.findings.append(Finding(stage, judge.releases_early, problem))
    report.early[stage], report.ordered[stage] = len(judge.early), len(judge.ordered)


def check_files(spec: KernelSpec, arch: str, ptx_text: str, sass_text: str, offsets: list[tuple[int, int]]) -> Report:
    """Check a kernel's PTX and its SASS listing (`disassemble`) against the accesses that the spec declares."""
    report = Report(spec.name, arch)
    accesses, pointees = [p.access for p in spec.params], [p.points_to for p in spec.params]
    for stage, parse in (("PTX", lambda: ptx.parse(ptx_text)[0]), ("SASS", lambda: sass.parse(sass_text, offsets))):
        try:
            if len(offsets) != len(spec.params):
                raise Unresolved(f"expected {len(spec.params)} kernel parameters, as the spec declares, found {len(offsets)}")
            program = parse()
        except Unresolved as reason:
            report.findings.append(Finding(stage, "", f"not followed: {reason}"))
            continue
        check_program(stage, program, accesses, pointees, report, spec.settles)
        if stage == "SASS" and _ARRIVAL.search(ptx_text) and not any(i.kind is Kind.ARRIVAL for i in program.instructions):
            report.findings.append(Finding(stage, "", "not followed: arrivals on an mbarrier in PTX, none that is known in SASS"))
    if report.early.get("PTX") and not report.early.get("SASS", 1):
        moved = f"{report.early['PTX']} static loads before the wait in PTX, none in SASS: moved by the assembler (ld.global.nc?)"
        report.findings.append(Finding("SASS", "", moved))
    return report


def check(spec: KernelSpec, arch: str) -> Report:
    """Check the artefact of one kernel for one architecture, compiling it first if it is missing."""
    cubin = artefact(spec, arch, "cubin")
    return check_files(spec, arch, artefact(spec, arch, "ptx").read_text(), disassemble(cubin), parameter_offsets(cubin))


def disassemble(cubin: Path) -> str:
    """The listing of a cubin's code: every instruction on one line with its 128 bits, the lower half first."""
    command = [tool("nvdisasm"), "-c", "-hex", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r" \*/\n\s*/\* (0x[0-9a-f]{16}) \*/", r" \1 */", listing)


__all__ = ["Finding", "Report", "check", "check_files", "check_program", "disassemble"]
