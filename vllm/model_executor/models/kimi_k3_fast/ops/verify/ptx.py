"""PTX of one kernel as a `flow.Program`. Instruction semantics: the PTX ISA manual, 9.7 (instructions) and 8 (memory model)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .flow import DATA, SHARED, Instruction, Kind, Memory, Program, Space, Unresolved, Use

_REGISTER = re.compile(r"%?[A-Za-z_$][\w$@]*|%\w+")
_NO_RESULT = re.compile(
    r"(st|red|bar|barrier|membar|fence|bra|ret|exit|trap|brkpt|griddepcontrol|nanosleep|prefetch|prefetchu|discard|applypriority"
    r"|stmatrix|pmevent|setmaxnreg|cp|mbarrier\.(init|inval|expect_tx|complete_tx)|multimem\.(st|red)|tensormap|clusterlaunchcontrol"
    r"|wgmma\.(fence|commit_group|wait_group)|tcgen05\.(st|cp|mma|commit|fence|wait|dealloc|relinquish_alloc_permit|shift))\b"
)


@dataclass
class _Scope:
    """A `{ }` block: names declared inside get a suffix, as inline assembly reuses names."""

    suffix: str
    registers: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)


@dataclass
class _Statement:
    text: str
    scopes: tuple[_Scope, ...]


def parse(text: str) -> tuple[Program, list[int]]:
    """The program of the one `.entry` in a PTX file, and the sizes in bytes of its parameters. Raises Unresolved."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    count = len(re.findall(r"\.(?:entry|func)\b", text))
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)[^{]*\{(.*)\}", text, flags=re.S)
    if count != 1 or entry is None:
        raise Unresolved(f"expected one kernel and no function in the PTX, found {count}")
    declared, body = entry.groups()
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\S*\s+)?(\w+)(?:\[(\d+)\])?", declared)
    widths = [int(count) if count else int(re.sub(r"\D", "", kind)) // 8 for kind, _, count in found]
    names = {parameter: i for i, (_, parameter, _) in enumerate(found)}
    program = Program([], {})
    for statement in _statements(body):
        _add(statement, names, program)
    return program, widths


def _statements(body: str) -> list[_Statement]:
    """Split a body at `;`, at labels and at the braces that open and close scopes (not those of vector operands)."""
    statements: list[_Statement] = []
    scopes: tuple[_Scope, ...] = (_Scope(""),)
    count, start, depth = 0, 0, 0
    for match in re.finditer(r"[;{}]|[\w$]+:(?!:)", body):
        pending = body[start : match.start()].strip()
        mark = match.group()
        if mark == "{" and (pending or depth):
            depth += 1
            continue
        if mark == "}" and depth:
            depth -= 1
            continue
        if mark.endswith(":") and pending:
            continue  # part of an operand
        start = match.end()
        if mark == "{":
            count += 1
            scopes = (*scopes, _Scope(f"@{count}"))
        elif mark == "}":
            scopes = scopes[:-1]
        elif mark == ";":
            if pending.startswith(".reg"):
                scopes[-1].registers.update(_declared(pending))
            elif pending and not pending.startswith("."):
                statements.append(_Statement(pending, scopes))
        else:
            scopes[-1].labels.add(mark[:-1])
            statements.append(_Statement(mark, scopes))
    return statements


def _declared(text: str) -> list[str]:
    return [name.split("<")[0].strip() for name in re.sub(r"^\.reg\s+(\.\w+\s+)+", "", text).split(",")]


def _scoped(name: str, statement: _Statement, kind: str) -> str:
    """The name made unique: the innermost enclosing scope that declares it decides."""
    for scope in reversed(statement.scopes):
        if name in getattr(scope, kind):
            return name + scope.suffix
    return name


def _add(statement: _Statement, names: dict[str, int], program: Program) -> None:
    if statement.text.endswith(":"):
        program.labels[_scoped(statement.text[:-1], statement, "labels")] = len(program.instructions)
    else:
        program.instructions.append(_Reader(statement, names).instruction())


class _Reader:
    """One PTX instruction taken apart."""

    def __init__(self, statement: _Statement, names: dict[str, int]) -> None:
        match = re.match(r"(@!?\S+\s+)?(\S+)\s*(.*)", statement.text, flags=re.S)
        assert match
        self.statement, self.names = statement, names
        self.guarded, self.opcode, self.operands = bool(match[1]), match[2], _split(match[3])
        self.parts = self.opcode.split(".")
        self.text = " ".join(statement.text.split())

    def registers(self, operand: str) -> tuple[str, ...]:
        words = _REGISTER.findall(operand)
        return tuple(_scoped(word, self.statement, "registers") for word in words if word not in self.names)

    def pointers(self, operand: str) -> int:
        bits = SHARED if "shmem" in operand else 0
        return bits | sum(1 << self.names[word] for word in set(_REGISTER.findall(operand)) if word in self.names)

    def has(self, *parts: str) -> bool:
        return bool(set(parts) & set(self.parts))

    def instruction(self) -> Instruction:
        result = Instruction(self.text, guarded=self.guarded, kind=self._kind(), system=self.has("sys"))
        if result.kind is Kind.BRANCH:
            result.targets = (_scoped(self.operands[0], self.statement, "labels"),)
            return result
        if self.parts[0] == "ld" and self.has("param"):
            result.writes, result.reads = self.registers(self.operands[0]), self.registers(self.operands[1])
            result.params = self._parameter()
            return result
        sources = self.operands
        if sources and not _NO_RESULT.match(self.opcode) and not sources[0].startswith("["):
            result.writes, sources = self.registers(sources[0]), sources[1:]
        for operand in sources:
            result.reads += self.registers(operand)
            result.params |= self.pointers(operand)
        if self.parts[0] == "cvta" and self.has("shared", "local") and not self.has("to"):
            result.params |= SHARED
        result.memory = self._accesses()
        if self.parts[0] in ("st", "atom"):
            result.stored = tuple(name for operand in self.operands[1:] for name in self.registers(operand))
        return result

    def _kind(self) -> Kind:
        head = self.parts[0]
        if head in ("call", "brx", "tensormap", "clusterlaunchcontrol"):
            raise Unresolved(f"an instruction that is not modelled: {self.text}")
        if self.opcode.startswith("griddepcontrol.wait"):
            return Kind.WAIT
        if self.opcode.startswith("griddepcontrol.launch_dependents"):
            return Kind.RELEASE
        if head == "bra":
            return Kind.BRANCH
        if head in ("ret", "exit", "trap"):
            return Kind.EXIT  # there are no functions, so a return ends the thread
        if head in ("fence", "membar") and not self.has("proxy", "mbarrier_init"):
            return Kind.FENCE
        if head in ("bar", "barrier") and self.has("sync", "red", "wait"):
            return Kind.BARRIER
        return Kind.PLAIN

    def _parameter(self) -> int:
        """`ld.param`: the first eight bytes of a tensor parameter are its pointer; sizes and strides follow.

        Where the compiler chose among parameters at run time, the address is in a register, whose origins are the candidates.
        """
        match = re.fullmatch(r"\[\s*([\w%]+)\s*(?:\+\s*(\d+))?\s*\]", self.operands[1])
        if not match:
            raise Unresolved(f"a parameter read at an unknown offset: {self.text}")
        if match[1] not in self.names:
            return 0
        return 1 << self.names[match[1]] if int(match[2] or 0) < 8 else DATA

    def _accesses(self) -> list[Memory]:
        """The memory accesses, in the order of the bracketed operands."""
        head, brackets = self.parts[0], [operand for operand in self.operands if operand.startswith("[")]
        if head in ("ld", "ldu", "st", "atom", "red"):
            use = {"ld": Use.LOAD, "ldu": Use.LOAD, "st": Use.STORE}.get(head, Use.ATOMIC)
            return [] if self.has("const") else [self._access(use, self._space(), brackets[0])]
        if head == "multimem":
            return [self._access(Use.LOAD if self.has("ld_reduce") else Use.STORE, Space.GLOBAL, brackets[0])]
        if self.opcode.startswith("cp.async.bulk.prefetch"):
            return [self._access(Use.PREFETCH, Space.GLOBAL, brackets[0])]
        if head == "cp" and len(brackets) > 1:
            return self._copy(brackets)
        if head in ("prefetch", "prefetchu"):
            use = Use.PREFETCH if self.has("L2", "tensormap") else Use.LOAD
            return [self._access(use, self._space(), brackets[0])]
        if head in ("discard", "applypriority"):
            return [self._access(Use.STORE, self._space(), brackets[0])]
        return []

    def _access(self, use: Use, space: Space, operand: str) -> Memory:
        return Memory(
            use,
            space,
            self.registers(operand),
            self.pointers(operand),
            strong=self.has("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"),
            system=self.has("sys", "volatile", "mmio"),
            acquire=self.has("acquire", "acq_rel"),
            release=self.has("release", "acq_rel"),
            constant=self.has("nc"),
            past_l1=self.has("cg", "bulk"),
        )

    def _copy(self, brackets: list[str]) -> list[Memory]:
        """`cp.async*`: destination first, source second; a reduction both reads and writes its destination."""
        target, source = re.findall(r"\.(shared|global)(?:::\w+)?", self.opcode)[:2]
        found = []
        if source == "global":
            found.append(self._access(Use.LOAD, Space.GLOBAL, brackets[1]))
        if target == "global":
            found.append(self._access(Use.ATOMIC if self.has("reduce") else Use.STORE, Space.GLOBAL, brackets[0]))
        return found

    def _space(self) -> Space:
        for part in self.parts:
            if part.startswith("shared"):
                return Space.SHARED
            if part in ("global", "local"):
                return Space[part.upper()]
        return Space.GENERIC


def _split(operands: str) -> list[str]:
    """Operands, split at the commas outside of brackets and braces."""
    parts, depth, current = [], 0, ""
    for letter in operands:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()] if current.strip() else parts
