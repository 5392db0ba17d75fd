"""SASS of one kernel, as `nvdisasm` prints it, as a `flow.Program`.

SASS has no public reference; what is relied on here was read off compiled kernels and is pinned by tests:
  - `ACQBULK` is griddepcontrol.wait, `PREEXIT` is griddepcontrol.launch_dependents;
  - parameters lie in constant bank 0 from the offset that the cubin records, in declaration order;
  - an address is a register pair whose low half carries the pointer, so following the low half is enough;
  - an acquire is a `.STRONG` load followed by `CCTL.IVALL`; a release is a `MEMBAR` followed by a `.STRONG` store;
  - `SR_SWINHI` is the high half of every generic address of shared memory, a peer block's included;
  - `BSSY Bn, label` names the place to which `BSYNC Bn` sends the threads;
  - `ARRIVES.LDGSTSBAR` arrives when this thread's copies before it have landed;
  - `SYNCS.ARRIVE` with `.ART0` is an arrival alone; without, it says how many bytes will come;
  - of an instruction's 128 bits, 110 to 112 name the counter that its results tell (7: none), 116 to 121 those it waits for, as
    `DEPBAR.LE SBn, 0x0` does; `@!PT LDS` never runs.
An opcode that is not known may not touch memory: an unknown one with a memory operand is an error.
"""

from __future__ import annotations

import re

from .flow import DATA, SHARED, Instruction, Kind, Memory, Program, Space, Unresolved, Use
from .landing import UNTOLD

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_CONTROL = re.compile(r"/\* 0x[0-9a-f]{16} 0x([0-9a-f]{16}) \*/")
_EMPTIED = re.compile(r"DEPBAR\.LE SB(\d), 0x0$")
_LABEL = re.compile(r"^([.$\w]+):$")  # places in the kernel, and subroutines such as those for a division
_REGISTER = re.compile(r"\bU?R\d+\b")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:(U?R\w+)\+?)?(-?0x[0-9a-f]+)?\]")

_KINDS = {
    "ACQBULK": Kind.WAIT,
    "PREEXIT": Kind.RELEASE,
    "MEMBAR": Kind.FENCE,
    "EXIT": Kind.EXIT,
    "RET": Kind.RETURN,
    "BSSY": Kind.SET_JOIN,
    "BSYNC": Kind.JOIN,
    "CALL": Kind.CALL,
    "BRA": Kind.BRANCH,
    "JMP": Kind.BRANCH,
}
# Opcode -> (use, space of the memory operand). LDGSTS and bulk copies have a shared operand too, which does not matter here.
_MEMORY = {
    "LDG": (Use.LOAD, Space.GLOBAL),
    "LDGMC": (Use.LOAD, Space.GLOBAL),
    "LDGSTS": (Use.LOAD, Space.GLOBAL),
    "LD": (Use.LOAD, Space.GENERIC),
    "LDS": (Use.LOAD, Space.SHARED),
    "LDSM": (Use.LOAD, Space.SHARED),
    "LDL": (Use.LOAD, Space.LOCAL),
    "STG": (Use.STORE, Space.GLOBAL),
    "ST": (Use.STORE, Space.GENERIC),
    "STS": (Use.STORE, Space.SHARED),
    "STSM": (Use.STORE, Space.SHARED),
    "STAS": (Use.STORE, Space.SHARED),
    "STL": (Use.STORE, Space.LOCAL),
    "ATOMG": (Use.ATOMIC, Space.GLOBAL),
    "ATOM": (Use.ATOMIC, Space.GENERIC),
    "ATOMS": (Use.ATOMIC, Space.SHARED),
    "RED": (Use.ATOMIC, Space.GLOBAL),
    "REDG": (Use.ATOMIC, Space.GLOBAL),
    "REDAS": (Use.ATOMIC, Space.SHARED),
    "UBLKPF": (Use.PREFETCH, Space.GLOBAL),
}
_SYNCS = ("SYNCS", "ARRIVES", "UCGABAR_ARV", "UCGABAR_WAIT", "BAR", "B2R", "ERRBAR", "CGAERRBAR")
_PREDICATE_THEN_REGISTER = ("SHFL", "LOP3")  # what they write, where a predicate comes first: `SHFL.BFLY PT, R0, R1, ...`
_ONLY_PREDICATES = re.compile(r"U?(ISETP|FSETP|HSETP2|DSETP|PLOP3|R2P|FCHK|P2R|VOTE)")


def parse(listing: str, offsets: list[tuple[int, int]]) -> Program:
    """The program of a listing, an instruction with its bits a line (`verify.disassemble`). `offsets`: (bank offset, size) of
    each kernel parameter. Raises Unresolved."""
    program = Program([], {})
    if len(re.findall(r"^\s*\.section\s+\.text\.", listing, flags=re.M)) != 1:
        raise Unresolved("expected one kernel in the cubin")
    for line in listing.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            program.labels[label[1]] = len(program.instructions)
            continue
        match = _LINE.search(line)
        if match:
            guard, opcode, operands = match.groups()
            read = _Reader(guard if guard and guard not in ("@PT", "@UPT") else "", opcode, operands, offsets).instruction()
            control = _CONTROL.search(line)
            if not control:
                raise Unresolved(f"expected the bits of each instruction, found none: {read.text}")
            bits = int(control[1], 16)
            read.awaits = bits >> 52 & 63
            if emptied := _EMPTIED.match(read.text):
                read.awaits |= 1 << int(emptied[1])
            told = counter if (counter := bits >> 46 & 7) < 6 else UNTOLD
            read.tells = None if told == UNTOLD else told
            if guard != "@!PT" and any(memory.use is Use.LOAD and memory.space is Space.SHARED for memory in read.memory):
                read.lands = told
            elif opcode.startswith("FENCE.VIEW.ASYNC") and not guard:
                read.lands, read.fences = told, True
            elif opcode.startswith("SHFL") and not guard:
                read.shuffles = told
            program.instructions.append(read)
    if not program.instructions:
        raise Unresolved("expected SASS instructions, found none")
    return program


class _Reader:
    """One SASS instruction taken apart."""

    def __init__(self, guard: str, opcode: str, operands: str, offsets: list[tuple[int, int]]) -> None:
        self.guard, self.guarded, self.opcode = guard.strip(), bool(guard), opcode
        self.head, *self.parts = opcode.split(".")
        self.operands = [
            part.strip().replace(".reuse", "") for part in re.sub(r"\(\*.*?\*\)", "", operands).split(",") if part.strip()
        ]
        self.offsets = offsets
        self.text = f"{opcode} {operands}".strip()

    @property
    def width(self) -> int:
        """Registers that the access fills: its size in 32-bit words."""
        sizes = [int(part) for part in self.parts if part in ("64", "128", "256")]
        return sizes[0] // 32 if sizes else 1

    def instruction(self) -> Instruction:
        result = Instruction(self.text, guarded=self.guarded, kind=self._kind(), system="SYS" in self.parts)
        result.predicates = frozenset(re.findall(r"\bU?P\d\b", " ".join(self.operands)))
        if result.kind in (Kind.BRANCH, Kind.CALL, Kind.SET_JOIN):
            self._jump(result)
            return result
        if result.kind is Kind.JOIN:
            result.barrier = self.operands[0]
            return result
        result.memory = self._accesses()
        written = self._written()
        result.writes = tuple(written)
        result.guard = self.guard
        sources = self.operands[1:] if written and _REGISTER.fullmatch(self.operands[0]) else self.operands
        if written and self.head in _PREDICATE_THEN_REGISTER and not _REGISTER.fullmatch(self.operands[0]):
            sources = self.operands[2:]
        elif written and not _REGISTER.fullmatch(self.operands[0]):
            # A predicate comes first: which register is written is a guess, so nothing is forgotten.
            result.guarded, result.guard = True, ""
        result.reads = tuple(register for operand in sources for register in _REGISTER.findall(_without_descriptor(operand)))
        self._constants(result, sources)
        if any(
            use in (Use.STORE, Use.ATOMIC) and space is not Space.GLOBAL for use, space in [_MEMORY.get(self.head, (None, None))]
        ):
            plain = [_REGISTER.fullmatch(operand) for operand in self.operands]
            result.stored = tuple(name for match in plain if match for name in _span(match.group(), self.width))
        if self.head in ("S2R", "S2UR"):
            result.params |= SHARED if "SR_SWINHI" in self.operands else DATA
        return result

    def _kind(self) -> Kind:
        if self.head in ("BRX", "BRXU", "JMX", "JMXU", "LEPC", "RPCMOV"):
            raise Unresolved(f"an indirect branch: {self.text}")
        if self.head == "CCTL" and "IVALL" in self.parts:
            return Kind.INVALIDATE
        if (self.head == "BAR" and "ARV" not in self.parts) or self.head in ("UCGABAR_WAIT", "BARWAIT"):
            return Kind.BARRIER
        if self.head == "SYNCS" and {"ARRIVE", "ART0"} <= {*self.parts}:
            return Kind.ARRIVAL
        return _KINDS.get(self.head, Kind.PLAIN)

    def _jump(self, result: Instruction) -> None:
        """Targets.

        A branch may carry its condition as an operand (`BRA P0, label`) or be taken where warps diverge (`BRA.DIV`).
        """
        result.targets = tuple(re.findall(r"`\(([.$\w]+)\)", self.text))
        conditions = [operand for operand in self.operands if re.fullmatch(r"!?U?P\d", operand)]
        result.guarded |= bool(conditions) or "DIV" in self.parts or "CONV" in self.parts
        if result.kind is Kind.SET_JOIN:
            result.barrier = self.operands[0]

    def _written(self) -> list[str]:
        """Registers written.

        The first operand, when it is a register; behind leading predicates for opcodes that may have one.
        """
        if not self.operands or self.head in ("RET", "BAR", "NANOSLEEP", "WARPSYNC", "BMOV", "DEPBAR", "R2P", "USETMAXREG"):
            return []
        first = next((i for i, operand in enumerate(self.operands) if not re.fullmatch(r"!?U?P(\d|T)", operand)), None)
        if first is None or (first and _ONLY_PREDICATES.match(self.head)):
            return []
        if not _REGISTER.fullmatch(self.operands[first]) or self.head in ("STG", "ST", "STS", "STL", "RED", "REDG"):
            return []
        wide = self.width
        if "WIDE" in self.parts or (self.head in ("I2F", "F2F", "DADD", "DMUL", "DFMA") and "F64" in self.parts):
            wide = 2
        if self.head == "HMMA" and "F32" in self.parts:
            wide = 4
        return _span(self.operands[first], wide)

    def _constants(self, result: Instruction, sources: list[str]) -> None:
        """Constant-bank operands: which parameters' pointers they read.

        A wide load gives each register the words of its own offset.
        """
        for operand in sources:
            for bank, index, offset in _CONSTANT.findall(operand):
                if int(bank, 16) != 0:
                    continue
                if index and index not in ("RZ", "URZ"):
                    result.params |= self._any_pointer()
                    continue
                start = int(offset or "0", 16)
                if self.head in ("LDC", "ULDC", "LDCU") and len(result.writes) > 1:
                    result.each = tuple(self._pointer_at(start + 4 * i) for i in range(len(result.writes)))
                else:
                    result.params |= self._pointer_at(start)
            if "cx[" in operand:
                raise Unresolved(f"a bindless constant: {self.text}")

    def _pointer_at(self, offset: int) -> int:
        """The parameter whose pointer holds this byte of the bank; what stands behind a pointer are sizes."""
        for i, (start, size) in enumerate(self.offsets):
            if start <= offset < start + size:
                return 1 << i if offset < start + 8 else DATA
        return DATA

    def _any_pointer(self) -> int:
        return sum(1 << i for i in range(len(self.offsets)))

    def _accesses(self) -> list[Memory]:
        if self.head == "CCTL" and any("[" in operand for operand in self.operands):
            use = Use.PREFETCH if "PF2" in self.parts else Use.LOAD if any(p.startswith("PF") for p in self.parts) else Use.STORE
            return [self._access(use, Space.GLOBAL, self.operands[-1])]
        if self.head == "UBLKCP":
            return self._bulk_copy()
        if self.head in _MEMORY:
            use, space = _MEMORY[self.head]
            brackets = [operand for operand in self.operands if "[" in operand and not operand.startswith("c[")]
            return [self._access(use, space, brackets[-1])]
        if self.head not in _SYNCS and any(
            "[" in operand and not operand.startswith(("c[", "gdesc[")) for operand in self.operands
        ):
            raise Unresolved(f"a memory access that is not modelled: {self.text}")
        return []

    def _bulk_copy(self) -> list[Memory]:
        """`UBLKCP.S.G [shared], [global], size` and `UBLKCP.G.S [global], [shared], size`."""
        brackets = [operand for operand in self.operands if operand.startswith(("[", "desc["))]
        if self.parts[:2] == ["S", "G"]:
            return [self._access(Use.LOAD, Space.GLOBAL, brackets[1])]
        if self.parts[:2] == ["G", "S"]:
            return [self._access(Use.STORE, Space.GLOBAL, brackets[0])]
        if self.parts[:1] == ["T"] or "S" in self.parts:
            return []  # shared memory to shared memory
        raise Unresolved(f"a bulk copy that is not modelled: {self.text}")

    def _access(self, use: Use, space: Space, operand: str) -> Memory:
        address = tuple(_REGISTER.findall(_without_descriptor(operand)))
        if space is Space.GENERIC:  # the high half tells whether it lies in the window of shared memory
            address = tuple(half for register in address for half in _span(register, 2))
        return Memory(
            use,
            space,
            address,
            strong="STRONG" in self.parts,
            system="SYS" in self.parts,
            constant="CONSTANT" in self.parts,
            past_l1=self.head == "UBLKCP" or "BYPASS" in self.parts,
        )


def _without_descriptor(operand: str) -> str:
    """`desc[UR4][R2.64+0x8]` without the descriptor, which holds no address."""
    return re.sub(r"\bg?desc\[\w+\]", "", operand)


def _span(register: str, count: int) -> list[str]:
    """`count` neighbouring registers."""
    letters, number = re.fullmatch(r"(U?R)(\d+)", register).groups()  # type: ignore[union-attr]
    return [f"{letters}{int(number) + i}" for i in range(count)]
