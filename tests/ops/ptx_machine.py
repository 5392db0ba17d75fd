"""A small machine that runs a kernel's PTX on the CPU: numbers, bounds and synchronisation of a kernel without a GPU.

It executes what the compiler wrote, warp by warp in a random order, in bursts of random length, so that a missing barrier shows
as wrong numbers in some order. Copies into shared memory land as late as they may: when the thread waits for their group. Shared
memory starts as NaN; accesses of it that nothing orders are an error, whatever the order of warps was (`races.py`). Every access
to global memory must lie inside a tensor that was passed, and be aligned. Sums of the tensor core are taken in FP64. It knows the
instructions that the kernels tested here use, and raises on any other. It is no model of time, of caches or of the weak memory
order.

    run(spec, {"x": x, "w": w, "y": y}, grid=(blocks,))     # CPU tensors of the shapes that the spec says; outputs in place
    run_ranks(spec, [{...}, {...}], grid=(blocks,))         # the ranks of a group at once, over mailboxes
    run_streams([[Call(...), ...], [...]])                  # and of each several launches, one after the other
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import races
import torch

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.build import KernelSpec, Sym
from vllm.model_executor.models.kimi_k3_fast.ops.verify import ptx

ARCH = os.environ.get("K3FAST_PTX_ARCH", "sm_90a")  # whose PTX is run
LANES = 32
GAP = 256  # bytes between tensors, which nothing may touch
BASE = 1 << 33
SHARED_BYTES = 232448
RANK_SHIFT = 24  # a shared address of another block of the cluster carries 1 + its rank above this bit
WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
RUN, BAR, CLUSTER, POLL, DONE = range(5)
LANE = np.arange(LANES)
ALL = np.ones(LANES, dtype=bool)
TURNS = re.compile(r"bra|ret|exit|bar|barrier|mbarrier")  # where threads may part, meet or wait

Array = np.ndarray
Step = Callable[["Warp", Array], None]


def dtype_of(kind: str) -> Any:
    """numpy's type of a PTX type such as s32 or f32; bits are unsigned."""
    letter, width = kind[0], kind[1:]
    if letter == "f":
        return {"16": np.float16, "32": np.float32, "64": np.float64}[width]
    return WIDTHS[width] if letter in "bu" else np.dtype(f"int{width}").type


class Deadlock(RuntimeError):
    """No thread can go on."""


@dataclass
class Group:
    """What a thread has asked to be copied since it last closed a group."""

    copies: list[tuple[Any, ...]] = field(default_factory=list)


class Memory:
    """Global memory: the tensors that were passed, at addresses of their own."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.spans: list[tuple[int, int, torch.Tensor]] = []
        self.starts: dict[int, int] = {}
        self.prefetched: list[tuple[int, int]] = []  # (address, bytes) of every bulk prefetch
        self.time = self.tick = 0  # ns, and by how much each look at the clock moves it
        self.cycles = 0
        end = 0
        for tensor in tensors:
            span = tensor.untyped_storage()
            if span.data_ptr() not in self.starts:
                end += GAP
                self.starts[span.data_ptr()] = end
                self.spans.append((end, end + span.nbytes(), tensor))
                end = -(-(end + span.nbytes()) // GAP) * GAP
        self.bytes = np.zeros(end + GAP, dtype=np.uint8)
        self.valid = np.zeros(end + GAP, dtype=bool)
        for start, stop, tensor in self.spans:
            self.bytes[start:stop] = self._view(tensor)
            self.valid[start:stop] = True

    @staticmethod
    def _view(tensor: torch.Tensor) -> Array:
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return whole.numpy()

    def address(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return BASE + self.starts[storage.data_ptr()] + tensor.data_ptr() - storage.data_ptr()

    def give_back(self) -> None:
        """Copy what was written into the tensors."""
        for start, stop, tensor in self.spans:
            self._view(tensor)[:] = self.bytes[start:stop]

    def at(self, address: Array, size: int, text: str) -> Array:
        """Indices of `size` bytes at each address, checked."""
        start = address.astype(np.int64) - BASE
        if (start % size).any():
            raise AssertionError(f"misaligned access: {text}")
        index = start[:, None] + np.arange(size)
        if (index < 0).any() or (index >= len(self.valid)).any() or not self.valid[index].all():
            raise AssertionError(f"access outside of every tensor: {text}, byte offsets {start[:4]}")
        return index


@dataclass
class Barrier:
    """An mbarrier: arrivals that its phase needs and lacks, bytes it waits for, and how many phases are over."""

    count: int
    missing: int
    told: Array  # what who arrived knew (`races`); `over`: by the end of the last phase
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.over = self.told

    def tell(self, known: Array) -> None:
        self.told = np.maximum(self.told, known)

    def arrive(self, known: Array) -> None:
        """One of the arrivals that the phase needs, by who knows so much."""
        self.tell(known)
        self.missing -= 1
        self.settle()

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing, self.over = self.phase + 1, self.count, self.told


class Block:
    """One thread block."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int], launch: Launch) -> None:
        self.cluster, self.rank, self.index, self.launch = cluster, rank, index, launch
        self.shared = np.full(SHARED_BYTES, 0xFF, dtype=np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.touched = races.Shared(cluster.clocks)
        self.warps = [Warp(self, w) for w in range(launch.threads // LANES)]

    def meet(self) -> None:
        """Let the threads go that wait at the block's barrier, once all have come."""
        if all(((w.status == BAR) | (w.status == DONE)).all() for w in self.warps):
            met = [w.threads[w.status == BAR] for w in self.warps]
            if any(len(threads) for threads in met):
                self.cluster.clocks.meet(np.concatenate(met))
            for w in self.warps:
                w.status[w.status == BAR] = RUN

    def barrier(self, at: int, who: Array, text: str) -> Barrier:
        """The mbarrier there, as these threads use it."""
        if at not in self.barriers:
            raise races.Race(f"thread {who[0]} uses the mbarrier at byte {at} before it is made: {text}")
        self.touched.uses(who, at, text)
        return self.barriers[at]

    def peer(self, address: int) -> tuple[Block, int]:
        rank = address >> RANK_SHIFT
        return (self.cluster.blocks[rank - 1] if rank else self), address & ((1 << RANK_SHIFT) - 1)


class Cluster:
    def __init__(self, first: int, launch: Launch) -> None:
        self.arrived = 0
        self.threads = launch.cluster * launch.threads
        self.clocks = races.Clocks(self.threads)
        self.told = self.over = np.zeros(2 * self.threads, dtype=np.int32)  # at the cluster's barrier, as in `Barrier`
        self.blocks: list[Block] = []
        x, y, _ = launch.grid
        for rank in range(launch.cluster):
            i = first + rank
            self.blocks.append(Block(self, rank, (i % x, i // x % y, i // (x * y)), launch))


class Warp:
    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number, self.launch = block, number, block.launch
        self.threads = block.rank * block.launch.threads + number * LANES + LANE  # of the cluster
        self.clocks = block.cluster.clocks
        self.registers: dict[str, Array] = {}
        self.pc = np.zeros(LANES, dtype=np.int64)
        self.status = np.full(LANES, RUN)
        self.arrivals = np.zeros(LANES, dtype=np.int64)
        self.open = [Group() for _ in range(LANES)]
        self.closed: list[list[Group]] = [[] for _ in range(LANES)]

    def burst(self, steps: int) -> bool:
        """Run until blocked or for so many instructions; says whether anything was done."""
        waits = self.status == CLUSTER
        if waits.any():
            waits &= self.block.cluster.arrived >= self.arrivals * self.block.cluster.threads
            self.status[waits] = RUN
            if waits.any():
                self.clocks.acquire(self.threads[waits], self.block.cluster.over)
        self.status[self.status == POLL] = RUN
        done = False
        while steps > 0:
            ready = self.status == RUN
            if not ready.any():
                break
            at = int(self.pc[ready].min())
            active = ready & (self.pc == at)
            others = ready & ~active
            stop = int(self.pc[others].min()) if others.any() else len(self.launch.program)  # where they meet again
            if active.all():
                active = ALL
            while steps > 0 and at < stop:
                guard, wanted, step, straight = self.launch.program[at]
                at, steps = at + 1, steps - 1
                self.pc[active] = at
                mask = active if guard is None else active & (self.registers[guard] == wanted)
                if mask is ALL or mask.any():
                    step(self, mask)
                if not straight:
                    break
            done |= not (self.status[active] == POLL).any()
        return done

    def write(self, name: str, value: Array, mask: Array) -> None:
        """New contents of a register. Arrays are never changed in place: other registers may share them."""
        if mask is ALL:
            self.registers[name] = value if value.shape == (LANES,) else np.broadcast_to(value, LANES)
        else:
            old = self.registers.get(name)
            self.registers[name] = np.where(mask, value, np.zeros_like(value) if old is None else old)


# -- instructions ----------------------------------------


def _split(text: str) -> list[str]:
    """Operands, at commas outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def _round_bf16(x: Array) -> Array:
    """FP32 to the bits of BF16, nearest even; NaN stays NaN."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3(codes: Array) -> Array:
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).half().numpy()


def _to_e4m3(x: Array) -> Array:
    return torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16)


def _fragment(words: list[Array], half: bool) -> Array:
    """Registers of two 16-bit values as [lane, register, 2] in FP64."""
    bits = np.stack([np.stack([w & 0xFFFF, w >> 16], 1) for w in words], 1).astype(np.uint16)
    values = bits.view(np.float16) if half else _widen_bf16(bits)
    return values.astype(np.float64)


def _multiply(a: list[Array], b: list[Array], acc: list[Array], half: bool) -> list[Array]:
    quad, pair = LANE // 4, LANE % 4
    left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    fa, fb = _fragment(a, half), _fragment(b, half)
    for e in range(2):
        for i in range(4):
            left[quad + 8 * (i % 2), pair * 2 + e + 8 * (i // 2)] = fa[:, i, e]
        for i in range(2):
            right[pair * 2 + e + 8 * i, quad] = fb[:, i, e]
    for i in range(4):
        total[quad + 8 * (i // 2), pair * 2 + i % 2] = acc[i]
    with np.errstate(invalid="ignore"):
        total = total + left @ right
    return [total[quad + 8 * (i // 2), pair * 2 + i % 2].astype(np.float32) for i in range(4)]


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": abs,
}
_UNORDERED = {"ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge", "equ": "eq", "neu": "ne"}  # true where a side is NaN
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_SYNCHRONISING = ("cp.async", "mbarrier", "barrier", "bar.", "fence", "griddepcontrol", "prefetch", "st.async", "membar")
_FUNCTIONS = {"ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt}


class Launch:
    """One kernel, ready to run: its decoded program, grid and parameters. chance: what it draws from."""

    def __init__(
        self,
        spec: KernelSpec,
        arch: str,
        tensors: dict[str, Any],
        grid: tuple[int, ...],
        cluster: int,
        memory: Memory,
        chance: random.Random,
    ) -> None:
        self.chance = chance
        folder = build.ensure(spec, arch)
        text = (folder / f"{spec.name}-{build.content_hash(spec, arch)}.ptx").read_text()
        self.threads = int(re.search(r"\.reqntid (\d+)", text)[1])  # type: ignore[index]
        self.grid, self.cluster = (*grid, 1, 1)[:3], cluster
        values = [tensors[p.name] for p in spec.params]
        self.memory = memory
        self.parameters = [_parameter(p, v, self.memory) for p, v in zip(spec.params, values, strict=True)]
        text = re.sub(r"//[^\n]*", "", text)
        body = re.search(r"\.entry\s+\w+\s*\((.*?)\)[^{]*\{(.*)\}", text, flags=re.S)[2]  # type: ignore[index]
        statements = ptx._statements(body)
        self.labels: dict[str, int] = {}
        real = []
        for statement in statements:
            if statement.text.endswith(":"):
                self.labels[self._named(statement.text[:-1], statement.scopes, labels=True)] = len(real)
            else:
                real.append(statement)
        self.program = [self._decode(s.text, s.scopes) for s in real]

    @staticmethod
    def _named(name: str, scopes: Any, labels: bool = False) -> str:
        for scope in reversed(scopes):
            if name in (scope.labels if labels else scope.registers):
                return name + scope.suffix
        return name

    def clusters(self) -> Iterator[Cluster]:
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        return (Cluster(first, self) for first in range(0, blocks, self.cluster))

    # -- decoding

    def _decode(self, text: str, scopes: Any) -> tuple[str | None, bool, Step, bool]:
        guard, wanted = None, True
        match = re.match(r"@(!?)([%\w$]+)\s+(.*)", text, flags=re.S)
        if match:
            guard, wanted, text = self._named(match[2], scopes), not match[1], match[3]
        name, rest = text.split(None, 1) if len(text.split(None, 1)) == 2 else (text, "")
        operands = _split(rest)
        try:
            return guard, wanted, self._step(name, operands, scopes, text), not TURNS.match(name)
        except (KeyError, NotImplementedError) as error:
            raise NotImplementedError(f"this machine does not know {text!r}") from error

    def _source(self, operand: str, kind: str, scopes: Any) -> Callable[[Warp], Any]:
        """A function that reads an operand as a PTX type."""
        dtype = dtype_of(kind) if kind != "pred" else bool
        if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", operand):
            value = int(operand, 0)
            size = np.dtype(dtype).itemsize * 8
            bits = np.array(value & ((1 << size) - 1), dtype=WIDTHS[str(size)])
            constant = bits.view(dtype)
            return lambda warp: constant
        if operand.startswith("0f"):
            single = np.array(int(operand[2:], 16), dtype=np.uint32).view(dtype)
            return lambda warp: single
        special = self._special(operand)
        if special:
            return lambda warp: special(warp).astype(WIDTHS[str(np.dtype(dtype).itemsize * 8)]).view(dtype)
        register = self._named(operand, scopes)
        if kind == "pred":
            return lambda warp: warp.registers[register]

        def read(warp: Warp) -> Array:
            value = warp.registers[register]
            if value.dtype.itemsize != np.dtype(dtype).itemsize:  # a register of other width: its low bits
                value = value.astype(WIDTHS[str(np.dtype(dtype).itemsize * 8)])
            return value.view(dtype)

        return read

    def _special(self, operand: str) -> Callable[[Warp], Array] | None:
        if operand in ("%globaltimer", "%clock64"):
            return self._clock
        if operand == "%clock":
            return self._cycles
        if operand == "%laneid":
            return lambda warp: LANE
        if operand in ("%tid.x",):
            return lambda warp: warp.number * LANES + LANE
        if operand in ("%tid.y", "%tid.z", "__dynamic_shmem__0"):
            return lambda warp: np.zeros(LANES, dtype=np.uint32)
        if operand in ("%ntid.x",):
            return lambda warp: np.full(LANES, self.threads)
        match = re.fullmatch(r"%(n?ctaid|cluster_ctarank|nclusterid|clusterid)(?:\.([xyz]))?", operand)
        if not match:
            return None
        axis = "xyz".index(match[2] or "x")
        if match[1] == "ctaid":
            return lambda warp: np.full(LANES, warp.block.index[axis])
        if match[1] == "nctaid":
            return lambda warp: np.full(LANES, self.grid[axis])
        if match[1] == "cluster_ctarank":
            return lambda warp: np.full(LANES, warp.block.rank)
        raise NotImplementedError(operand)

    def _clock(self, warp: Warp) -> Array:
        self.memory.time += self.memory.tick
        return np.full(LANES, self.memory.time, dtype=np.uint64)

    def _cycles(self, warp: Warp) -> Array:
        """Of the SM: they always move on."""
        self.memory.cycles += 16
        return np.full(LANES, self.memory.cycles & 0xFFFFFFFF, dtype=np.uint32)

    def _address(self, operand: str, scopes: Any) -> Callable[[Warp], Array]:
        match = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match, operand
        offset = int(match[2] or 0)
        if match[1].startswith("%") or not match[1].startswith("__"):
            register = self._named(match[1], scopes)
            return lambda warp: warp.registers[register].astype(np.int64) + offset
        return lambda warp: np.full(LANES, offset, dtype=np.int64)

    def _registers(self, operand: str, scopes: Any) -> list[str]:
        inner = operand.strip("{} ") if operand.startswith("{") else operand
        return [self._named(r.strip(), scopes) for r in inner.split(",")]

    def _step(self, name: str, operands: list[str], scopes: Any, text: str) -> Step:
        parts = name.split(".")
        root, kind = parts[0], parts[-1]
        if root in ("ld", "st") and not name.startswith("st.async"):
            return self._transfer(parts, operands, scopes, text)
        if name.startswith(
            ("cp.async", "mbarrier", "barrier", "bar.", "fence", "griddepcontrol", "prefetch", "st.async", "membar")
        ):
            return self._synchronise(name, operands, scopes, text)
        if root == "bra":
            target = self.labels[self._named(operands[0], scopes, labels=True)]

            def jump(warp: Warp, mask: Array) -> None:
                warp.pc[mask] = target

            return jump
        if root in ("ret", "exit"):

            def leave(warp: Warp, mask: Array) -> None:
                warp.status[mask] = DONE
                if all((w.status == DONE).all() for w in warp.block.warps):
                    warp.block.touched.ends(np.concatenate([w.threads for w in warp.block.warps]))

            return leave
        if root in ("atom", "red"):
            return self._atomic(parts, operands, scopes, text)
        if root == "mma":
            return self._mma(parts, operands, scopes)
        if root == "shfl":
            return self._shuffle(parts, operands, scopes)
        return self._compute(root, parts, kind, operands, scopes)

    def _compute(self, root: str, parts: list[str], kind: str, operands: list[str], scopes: Any) -> Step:
        target = self._registers(operands[0], scopes)
        read = lambda i, k=kind: self._source(operands[i], k, scopes)  # noqa: E731
        bits = lambda v: np.asarray(v).view(WIDTHS[str(np.asarray(v).dtype.itemsize * 8)])  # noqa: E731

        def single(compute: Callable[[Warp], Any]) -> Step:
            def step(warp: Warp, mask: Array) -> None:
                warp.write(target[0], np.asarray(compute(warp)), mask)

            return step

        if root == "mov" and (len(target) > 1 or operands[1].startswith("{")):
            return self._pack(target, operands, kind, scopes)
        if kind == "pred" and root in ("and", "or", "xor", "not", "mov"):
            inputs = [read(i) for i in range(1, len(operands))]
            if root == "mov":
                return single(inputs[0])
            function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[root]
            return single(lambda w: function(*(f(w) for f in inputs)))
        if root == "mov":
            source = read(1)
            return single(lambda w: bits(np.broadcast_to(source(w), LANES).copy()))
        if root == "mapa":
            address, rank = read(1, "u32"), read(2, "u32")
            return single(lambda w: (address(w) | ((rank(w) + np.uint32(1)) << np.uint32(RANK_SHIFT))).astype(np.uint32))
        if root == "setp" and parts[1] in ("nan", "num"):
            a, b, wanted = read(1), read(2), parts[1] == "nan"
            return single(lambda w: np.broadcast_to((np.isnan(a(w)) | np.isnan(b(w))) == wanted, LANES))
        if root == "setp" and parts[1] in _UNORDERED:
            a, b, compare = read(1), read(2), _COMPARE[_UNORDERED[parts[1]]]
            return single(lambda w: np.broadcast_to(compare(a(w), b(w)) | np.isnan(a(w)) | np.isnan(b(w)), LANES))
        if root == "setp":
            a, b, compare = read(1), read(2), _COMPARE[parts[1]]
            if parts[1] == "ne" and kind.startswith("f"):
                return single(lambda w: (a(w) != b(w)) & ~np.isnan(a(w)) & ~np.isnan(b(w)))
            return single(lambda w: np.broadcast_to(compare(a(w), b(w)), LANES))
        if root == "selp":
            a, b, p = read(1), read(2), read(3, "pred")
            return single(lambda w: bits(np.where(p(w), a(w), b(w))))
        if root == "cvt":
            return self._convert(target, parts, operands, scopes)
        if root in ("shl", "shr"):
            a, b, width = read(1), read(2, "u32"), np.dtype(dtype_of(kind)).itemsize * 8
            shift = np.left_shift if root == "shl" else np.right_shift

            def shifted(w: Warp) -> Array:
                value, by = a(w), np.minimum(b(w), width - 1).astype(dtype_of(kind))
                result = shift(value, by)
                return bits(np.where((b(w) >= width) & ((root == "shl") | (kind[0] != "s")), 0, result).astype(dtype_of(kind)))

            return single(shifted)
        if root in ("mul", "mad") and "wide" in parts:
            wide = kind[0] + str(int(kind[1:]) * 2)
            a, b = read(1), read(2)
            c = read(3, wide) if root == "mad" else (lambda w: 0)
            return single(
                lambda w: bits((a(w).astype(dtype_of(wide)) * b(w).astype(dtype_of(wide)) + c(w)).astype(dtype_of(wide)))
            )
        if root == "mul" and "hi" in parts:
            a, b = read(1), read(2)
            return single(
                lambda w: (
                    bits(((a(w).astype(np.int64) * b(w).astype(np.int64)) >> int(kind[1:])).astype(dtype_of(kind)))
                    if kind[0] == "s"
                    else bits(((a(w).astype(np.uint64) * b(w).astype(np.uint64)) >> np.uint64(kind[1:])).astype(dtype_of(kind)))
                )
            )
        if root in ("mad", "fma"):
            a, b, c = read(1), read(2), read(3)
            if kind == "f32":
                return single(lambda w: bits((a(w).astype(np.float64) * b(w) + c(w)).astype(np.float32)))
            return single(lambda w: bits(a(w) * b(w) + c(w)))
        if root == "prmt":
            return self._permute(target, operands, scopes)
        if root in _FUNCTIONS:
            a, f = read(1), _FUNCTIONS[root]
            return single(lambda w: bits(f(a(w).astype(np.float64)).astype(np.float32)))
        if root == "mul" and kind == "bf16x2":
            a, b = read(1, "b32"), read(2, "b32")

            def product(w: Warp) -> Array:
                low = _round_bf16(_widen_bf16(a(w) & 0xFFFF) * _widen_bf16(b(w) & 0xFFFF))
                high = _round_bf16(_widen_bf16(a(w) >> 16) * _widen_bf16(b(w) >> 16))
                return low.astype(np.uint32) | (high.astype(np.uint32) << 16)

            return single(product)
        if root == "add" and parts[-2:] == ["f32", "bf16"]:  # Blackwell's: a BF16 and an FP32
            a, b = read(1, "b16"), read(2, "f32")
            return single(lambda w: bits((_widen_bf16(a(w)).astype(np.float64) + b(w)).astype(np.float32)))
        if kind == "bf16" and parts[-2] == "f32":
            raise NotImplementedError
        if root == "add" and kind == "bf16":
            a, b = read(1, "b16"), read(2, "b16")
            return single(lambda w: _round_bf16(_widen_bf16(a(w)) + _widen_bf16(b(w))))
        inputs = [read(i) for i in range(1, len(operands))]
        if root in ("min", "max") and kind.startswith("f"):
            function: Callable[..., Any] = np.fmin if root == "min" else np.fmax
        else:
            function = _ARITHMETIC[root]
        if "relu" in parts:
            return single(lambda w: bits(np.maximum(function(*(f(w) for f in inputs)), 0)))
        return single(lambda w: bits(np.asarray(function(*(f(w) for f in inputs)), dtype=dtype_of(kind))))

    def _pack(self, target: list[str], operands: list[str], kind: str, scopes: Any) -> Step:
        """mov between one wide register and its parts."""
        if len(target) > 1:
            source, width = self._source(operands[1], kind, scopes), int(kind[1:]) // len(target)

            def take(warp: Warp, mask: Array) -> None:
                value = source(warp)
                for i, name in enumerate(target):
                    if name != "_":
                        part = (value >> value.dtype.type(i * width)) & value.dtype.type((1 << width) - 1)
                        warp.write(name, part.astype(WIDTHS[str(width)]), mask)

            return take
        names = self._registers(operands[1], scopes)
        width, whole = int(kind[1:]) // len(names), WIDTHS[kind[1:]]

        def join(warp: Warp, mask: Array) -> None:
            value = np.zeros(LANES, dtype=whole)
            for i, name in enumerate(names):
                value |= warp.registers[name].astype(whole) << whole(i * width)
            warp.write(target[0], value, mask)

        return join

    def _permute(self, target: list[str], operands: list[str], scopes: Any) -> Step:
        a, b = (self._source(operands[i], "u32", scopes) for i in (1, 2))
        selector = self._source(operands[3], "u32", scopes)

        def step(warp: Warp, mask: Array) -> None:
            both = a(warp).astype(np.uint64) | (b(warp).astype(np.uint64) << np.uint64(32))
            which, result = selector(warp).astype(np.uint64), np.zeros(LANES, dtype=np.uint64)
            for i in range(4):
                at = (which >> np.uint64(4 * i)) & np.uint64(7)
                result |= ((both >> (at * np.uint64(8))) & np.uint64(0xFF)) << np.uint64(8 * i)
            warp.write(target[0], result.astype(np.uint32), mask)

        return step

    def _convert(self, target: list[str], parts: list[str], operands: list[str], scopes: Any) -> Step:
        to, source = parts[-2], parts[-1]

        def read(i: int, kind: str) -> Callable[[Warp], Any]:
            return self._source(operands[i], kind, scopes)

        def single(compute: Callable[[Warp], Any]) -> Step:
            def step(warp: Warp, mask: Array) -> None:
                value = np.asarray(compute(warp))
                warp.write(target[0], value.view(WIDTHS[str(value.dtype.itemsize * 8)]), mask)

            return step

        if to in ("bf16x2", "f16x2", "e4m3x2") and source == "f32":
            high, low = read(1, "f32"), read(2, "f32")
            narrow = {"bf16x2": _round_bf16, "f16x2": lambda x: x.astype(np.float16).view(np.uint16), "e4m3x2": _to_e4m3}[to]
            if to == "e4m3x2":
                return single(lambda w: (narrow(low(w)) | (narrow(high(w)) << np.uint16(8))).astype(np.uint16))
            return single(lambda w: narrow(low(w)).astype(np.uint32) | (narrow(high(w)).astype(np.uint32) << np.uint32(16)))
        if to == "f16x2" and source == "e4m3x2":
            pair = read(1, "u16")

            def widened(w: Warp) -> Array:
                low, high = (_e4m3((pair(w) >> np.uint16(s)) & np.uint16(0xFF)).view(np.uint16) for s in (0, 8))
                return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

            return single(widened)
        if to == "bf16":
            value = read(1, source)
            return single(lambda w: _round_bf16(value(w)))
        if source == "bf16":
            value = read(1, "b16")
            return single(lambda w: _widen_bf16(value(w)))
        value = read(1, source)
        if "sat" in parts:
            return single(lambda w: np.clip(np.nan_to_num(value(w), nan=0.0), 0, 1).astype(np.float32))
        return single(lambda w: np.broadcast_to(value(w), LANES).astype(dtype_of(to)))

    def _mma(self, parts: list[str], operands: list[str], scopes: Any) -> Step:
        if "m16n8k16" not in parts or parts[-2] not in ("bf16", "f16"):
            raise NotImplementedError
        out, a, b = (self._registers(o, scopes) for o in operands[:3])
        initial = [self._source(r, "f32", scopes) for r in operands[3].strip("{} ").replace(" ", "").split(",")]
        half = parts[-2] == "f16"

        def step(warp: Warp, mask: Array) -> None:
            assert mask.all(), "the tensor core wants a whole warp"
            warp.clocks.meet(warp.threads)
            sums = [np.broadcast_to(f(warp), LANES) for f in initial]
            words = lambda names: [warp.registers[n].view(np.uint32) for n in names]  # noqa: E731
            for name, value in zip(out, _multiply(words(a), words(b), sums, half), strict=True):
                warp.write(name, value.view(np.uint32), mask)

        return step

    def _shuffle(self, parts: list[str], operands: list[str], scopes: Any) -> Step:
        target = self._registers(operands[0].split("|")[0], scopes)[0]
        value, by, clamp = (self._source(operands[i], "b32", scopes) for i in (1, 2, 3))
        mode = parts[2]

        def step(warp: Warp, mask: Array) -> None:
            c = np.broadcast_to(clamp(warp), LANES).astype(np.int64)
            b = np.broadcast_to(by(warp), LANES).astype(np.int64) & 31
            segment = (c >> 8) & 31
            most = (LANE & segment) | (c & 31 & ~segment)
            at = LANE ^ b if mode == "bfly" else (LANE & segment) | (b & ~segment)
            at = np.where(at <= most, at, LANE)
            assert mask[at[mask]].all(), "a shuffle from a lane that is elsewhere"
            warp.clocks.meet(warp.threads[mask])
            warp.write(target, np.broadcast_to(value(warp), LANES)[at], mask)

        return step

    def _transfer(self, parts: list[str], operands: list[str], scopes: Any, text: str) -> Step:
        kind = parts[-1]
        size = int(kind[1:]) // 8
        bits = WIDTHS[kind[1:]]
        if "param" in parts:
            match = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", operands[1])
            assert match, text
            raw = self.parameters[int(match[1])][int(match[2] or 0) :][:size]
            value = np.frombuffer(raw, dtype=bits)[0]
            name = self._registers(operands[0], scopes)[0]
            return lambda warp, mask: warp.write(name, np.full(LANES, value), mask)
        load = parts[0] == "ld"
        registers = operands[0] if load else operands[1]
        address = self._address(operands[1] if load else operands[0], scopes)
        names = registers.strip("{} ").replace(" ", "").split(",") if registers.startswith("{") else [registers]
        sources = None if load else [self._source(n, "b" + kind[1:], scopes) for n in names]
        targets = [self._named(n, scopes) for n in names] if load else []
        total, shared = size * len(names), any(p.startswith("shared") for p in parts)

        def step(warp: Warp, mask: Array) -> None:
            lanes = np.flatnonzero(mask)
            at = np.broadcast_to(address(warp), LANES)[lanes]
            memory: list[tuple[Array, Any, races.Shared | None]]
            if not shared:
                index, memory = self.memory.at(at, total, text), [(self.memory.bytes, slice(None), None)]
            else:
                index, memory = _shared_places(warp, at, total, text)
            for space, rows, touched in memory:
                if touched is not None:
                    touch = touched.read if load else touched.write
                    touch(warp.threads[lanes[rows]], index[rows][:, ::2] // 2, text)
                if load:
                    data = space[index[rows]].reshape(-1, len(names), size).copy().view(bits)[:, :, 0]
                    chosen = np.zeros(LANES, dtype=bool)
                    chosen[lanes[rows]] = True
                    for i, name in enumerate(targets):
                        full = np.zeros(LANES, dtype=bits)
                        full[lanes[rows]] = data[:, i]
                        warp.write(name, full, chosen)
                else:
                    columns = [np.broadcast_to(s(warp), LANES)[lanes[rows]].astype(bits) for s in sources]  # type: ignore[union-attr]
                    data = np.stack(columns, 1).copy().view(np.uint8).reshape(-1, total)
                    space[index[rows]] = data

        return step

    def _atomic(self, parts: list[str], operands: list[str], scopes: Any, text: str) -> Step:
        loads = parts[0] == "atom"
        target = self._registers(operands[0], scopes)[0] if loads else ""
        where = self._address(operands[1 if loads else 0], scopes)
        value = self._source(operands[2 if loads else 1], parts[-1], scopes)
        function = next({"add": np.add, "max": np.maximum}[p] for p in parts if p in ("add", "max"))

        def step(warp: Warp, mask: Array) -> None:
            before = np.zeros(LANES, dtype=np.uint32)
            for lane in np.flatnonzero(mask):
                index = self.memory.at(np.broadcast_to(where(warp), LANES)[lane : lane + 1], 4, text)[0]
                old = self.memory.bytes[index].copy().view(dtype_of(parts[-1]))
                before[lane] = old.view(np.uint32)[0]
                new = function(old, np.broadcast_to(value(warp), LANES)[lane]).astype(old.dtype)
                self.memory.bytes[index] = new.view(np.uint8)
            if loads:
                warp.write(target, before, mask)

        return step

    def _synchronise(self, name: str, operands: list[str], scopes: Any, text: str) -> Step:
        if name.startswith("bar.warp.sync"):  # a warp's lanes meet by themselves
            return lambda warp, mask: warp.clocks.meet(warp.threads[mask])
        if name.startswith(("griddepcontrol", "fence", "prefetch", "membar")):
            return lambda warp, mask: None
        if name.startswith("cp.async.bulk.prefetch.L2"):
            first, length = self._address(operands[0], scopes), self._source(operands[1], "u32", scopes)

            def ask(warp: Warp, mask: Array) -> None:
                for lane in np.flatnonzero(mask):
                    at, size = int(first(warp)[lane]), int(np.broadcast_to(length(warp), LANES)[lane])
                    self.memory.at(np.arange(at, at + size, 16), 16, text)
                    self.memory.prefetched.append((at, size))

            return ask
        if name.startswith("cp.async.commit_group"):
            return _commit
        if name.startswith("cp.async.wait_group"):
            left = int(operands[0])
            return lambda warp, mask: _wait_group(warp, mask, left)
        if name.startswith(("cp.async.cg", "cp.async.ca")):
            target, source = self._address(operands[0], scopes), self._address(operands[1], scopes)
            size = int(operands[2])
            taken = self._source(operands[3], "u32", scopes) if len(operands) > 3 else (lambda w: np.uint32(size))

            def copy(warp: Warp, mask: Array) -> None:
                to, where, count = (np.broadcast_to(f(warp), LANES) for f in (target, source, taken))
                wanted = mask & (count > 0)
                if wanted.any():
                    self.memory.at(where[wanted], size, text)  # out of bounds now, not when it lands
                numbers = warp.clocks.copy(warp.threads[mask])
                places = (to[mask][:, None].astype(np.int64) + np.arange(0, size, 2)) // 2
                warp.block.touched.write(warp.threads[mask], places, text, numbers)
                for lane, number in zip(np.flatnonzero(mask), numbers, strict=True):
                    warp.open[lane].copies.append((int(to[lane]), int(where[lane]) - BASE, size, int(count[lane]), int(number)))

            return copy
        if name.startswith("bar.sync") or name.startswith("barrier.sync"):

            def meet(warp: Warp, mask: Array) -> None:
                warp.status[mask] = BAR

            return meet
        if name.startswith("barrier.cluster.arrive"):

            def arrive(warp: Warp, mask: Array) -> None:
                cluster = warp.block.cluster
                warp.arrivals[mask] += 1
                cluster.arrived += int(mask.sum())
                cluster.told = np.maximum(cluster.told, warp.clocks.release(warp.threads[mask]))
                if cluster.arrived % cluster.threads == 0:
                    cluster.over = cluster.told

            return arrive
        if name.startswith("barrier.cluster.wait"):

            def wait(warp: Warp, mask: Array) -> None:
                warp.status[mask] = CLUSTER

            return wait
        if name.startswith("st.async"):
            where, value = self._address(operands[0], scopes), self._source(operands[1], "b32", scopes)
            barrier = self._address(operands[2], scopes)

            def send(warp: Warp, mask: Array) -> None:
                numbers = warp.clocks.copy(warp.threads[mask])
                for lane, number in zip(np.flatnonzero(mask), numbers, strict=True):
                    block, at = warp.block.peer(int(where(warp)[lane]))
                    who = warp.threads[lane : lane + 1]
                    block.touched.write(who, at // 2 + np.arange(2)[None], text, np.array([number]))
                    block.shared[at : at + 4] = np.frombuffer(np.uint32(value(warp)[lane]).tobytes(), dtype=np.uint8)
                    owner, place = warp.block.peer(int(barrier(warp)[lane]))
                    waiting = owner.barrier(place, who, text)
                    waiting.bytes -= 4
                    waiting.tell(warp.clocks.copied(int(who[0]), int(number)))
                    waiting.settle()

            return send
        return self._mbarrier(name, operands, scopes, text)

    def _mbarrier(self, name: str, operands: list[str], scopes: Any, text: str) -> Step:
        if name.startswith("mbarrier.init"):
            where, count = self._address(operands[0], scopes), self._source(operands[1], "u32", scopes)

            def make(warp: Warp, mask: Array) -> None:
                for lane in np.flatnonzero(mask):
                    wanted = int(np.broadcast_to(count(warp), LANES)[lane])
                    nothing, at = np.zeros(2 * warp.block.cluster.threads, dtype=np.int32), int(where(warp)[lane])
                    warp.block.touched.write(warp.threads[lane : lane + 1], at // 2 + np.arange(4)[None], text)
                    warp.block.barriers[at] = Barrier(wanted, wanted, nothing)

            return make
        if name.startswith("mbarrier.arrive.expect_tx"):
            where, count = self._address(operands[1], scopes), self._source(operands[2], "u32", scopes)

            def expect(warp: Warp, mask: Array) -> None:
                for lane in np.flatnonzero(mask):
                    who = warp.threads[lane : lane + 1]
                    barrier = warp.block.barrier(int(where(warp)[lane]), who, text)
                    barrier.bytes += int(np.broadcast_to(count(warp), LANES)[lane])
                    barrier.arrive(warp.clocks.release(who))

            return expect
        if name.startswith("mbarrier.try_wait.parity"):
            target = self._named(operands[0], scopes)
            where, parity = self._address(operands[1], scopes), self._source(operands[2], "u32", scopes)

            def test(warp: Warp, mask: Array) -> None:
                result = np.zeros(LANES, dtype=bool)
                for lane in np.flatnonzero(mask):
                    who = warp.threads[lane : lane + 1]
                    barrier = warp.block.barrier(int(where(warp)[lane]), who, text)
                    result[lane] = (barrier.phase - 1) % 2 == int(np.broadcast_to(parity(warp), LANES)[lane]) % 2
                    if result[lane]:
                        warp.clocks.acquire(who, barrier.over)
                warp.write(target, result, mask)
                failed = mask & ~result
                warp.pc[failed] -= 1
                warp.status[failed] = POLL

            return test
        raise NotImplementedError(name)


def _shared_places(warp: Warp, address: Array, size: int, text: str) -> tuple[Array, list[tuple[Array, Any, races.Shared]]]:
    """Byte indices in shared memory, and for each block they lie in, its memory, the rows and who touched it."""
    if (address % size).any():
        raise AssertionError(f"misaligned access: {text}")
    rank, local = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
    index = local[:, None] + np.arange(size)
    if (index >= SHARED_BYTES).any():
        raise AssertionError(f"access outside of shared memory: {text}")
    found = []
    for r in np.unique(rank):
        if r > len(warp.block.cluster.blocks):
            raise AssertionError(f"access outside of the cluster: {text}")
        block = warp.block if r == 0 else warp.block.cluster.blocks[r - 1]
        found.append((block.shared, np.flatnonzero(rank == r), block.touched))
    return index, found


def _commit(warp: Warp, mask: Array) -> None:
    for lane in np.flatnonzero(mask):
        warp.closed[lane].append(warp.open[lane])
        warp.open[lane] = Group()


def _wait_group(warp: Warp, mask: Array, left: int) -> None:
    memory = warp.launch.memory.bytes
    for lane in np.flatnonzero(mask):
        groups = warp.closed[lane]
        while len(groups) > left:
            for copy in groups.pop(0).copies:
                warp.clocks.landed(int(warp.threads[lane]), copy[-1])
                land(warp.block, memory, copy)


def land(block: Block, memory: Array, copy: tuple[Any, ...]) -> None:
    """Carry out a thread's asynchronous copy: what is not taken from memory becomes zero."""
    to, source, size, count, _ = copy
    block.shared[to : to + size] = 0
    block.shared[to : to + count] = memory[source : source + count]


def _parameter(param: Any, value: Any, memory: Memory) -> bytes:
    """A kernel parameter as the compiler lays it out: the pointer, then the sizes and strides that are known only at run."""
    if not isinstance(value, torch.Tensor):
        return np.int32(value).tobytes()
    fields = bytearray(np.uint64(memory.address(value)).tobytes())
    seen = [
        (s, n)
        for sizes, actual in ((param.shape, value.shape), (param.strides or (), value.stride()))
        for s, n in zip(sizes, actual, strict=False)
        if isinstance(s, Sym)
    ]
    for symbol, number in seen:
        width = symbol.bits // 8
        fields += bytes(-len(fields) % width) + np.dtype(f"int{symbol.bits}").type(number).tobytes()
    return bytes(fields) + bytes(-len(fields) % 8)


PATIENCE = 300  # bursts for which one stream is ahead of the others


class Stream:
    """Launches that follow each other, each when the one before has ended: a list of clusters for each."""

    def __init__(self, launches: Iterator[list[Cluster]]) -> None:
        self.launches, self.warps = launches, []

    def goes_on(self) -> bool:
        while not self.warps:
            clusters = next(self.launches, None)
            if clusters is None:
                return False
            self.warps = [w for cluster in clusters for b in cluster.blocks for w in b.warps]
        return True


def _run_together(streams: list[Stream], order: random.Random, most: float = math.inf) -> None:
    """Run all streams to their end, at paces of chance: now this one hurries, now that one. most: bursts, after which a thread
    that looks for what does not come is taken for one that waits for ever."""
    idle, turn = 0, 0
    with np.errstate(all="ignore"):
        while streams := [stream for stream in streams if stream.goes_on()]:
            if turn % PATIENCE == 0:
                ahead = order.random()
            stream = streams[int(ahead * len(streams))] if order.random() < 0.8 else order.choice(streams)
            warp = order.choice(stream.warps)
            idle, turn = 0 if warp.burst(order.choice((3, 40, 400))) else idle + 1, turn + 1
            warp.block.meet()
            if (warp.status == DONE).all():
                stream.warps.remove(warp)
            if idle > 200 * sum(len(stream.warps) for stream in streams) + 200 + PATIENCE or turn > most:
                left = [w for stream in streams for w in stream.warps]
                where = {(w.block.index, w.number): (int(w.pc[0]), int(w.status[0])) for w in left}
                raise Deadlock(f"no thread goes on: block and warp -> (pc, status): {where}")


def run(
    spec: KernelSpec,
    tensors: dict[str, Any],
    grid: tuple[int, ...],
    cluster: int = 1,
    arch: str = ARCH,
    seed: int = 0,
    prefetched: list[tuple[int, int]] | None = None,
    machine: type[Launch] = Launch,
) -> None:
    """Run one launch to its end, a cluster after the other. `grid` and `cluster` as the kernel's entry launches it. Outputs are
    written into `tensors`; what was asked into L2, address and bytes, is appended to `prefetched`. machine: by what it knows."""
    memory = Memory([t for t in tensors.values() if isinstance(t, torch.Tensor)])
    order = random.Random(seed)
    launch = machine(spec, arch, tensors, grid, cluster, memory, order)
    _run_together([Stream([one] for one in launch.clusters())], order)
    memory.give_back()
    if prefetched is not None:
        prefetched += memory.prefetched


@dataclass(frozen=True)
class Call:
    """One launch: what `run` takes."""

    spec: KernelSpec
    tensors: dict[str, Any]
    grid: tuple[int, ...]
    cluster: int = 1


def run_ranks(
    spec: KernelSpec,
    tensors: list[dict[str, Any]],
    grid: tuple[int, ...],
    cluster: int = 1,
    arch: str = ARCH,
    seed: int = 0,
    missing: int | None = None,
    machine: type[Launch] = Launch,
) -> None:
    """As `run`, a launch of every rank, all at once. `missing`: a rank that does not launch."""
    run_streams([[Call(spec, own, grid, cluster)] for own in tensors], arch, seed, missing, machine)


def run_streams(
    ranks: list[list[Call]],
    arch: str = ARCH,
    seed: int = 0,
    missing: int | None = None,
    machine: type[Launch] = Launch,
    most: float = math.inf,
) -> None:
    """The ranks of a group over one memory, each with launches that follow each other. `peers` of each rank, a table of
    addresses, is filled in here: where the ranks' `box` tensors lie. Time stands still, so that no wait is too long, unless a
    rank is `missing`, which does not launch: then each look at the clock takes a nanosecond. most: see `_run_together`."""
    memory = Memory([t for calls in ranks for call in calls for t in call.tensors.values() if isinstance(t, torch.Tensor)])
    boxes = torch.tensor([memory.address(calls[0].tensors["box"]) for calls in ranks], dtype=torch.int64)
    for calls in ranks:
        peers = calls[0].tensors["peers"]
        peers.copy_(boxes)
        start = memory.address(peers) - BASE
        memory.bytes[start : start + 8 * len(boxes)] = boxes.view(torch.uint8).numpy()
    memory.tick = 0 if missing is None else 1
    order = random.Random(seed)

    def launches(calls: list[Call]) -> Iterator[list[Cluster]]:
        for call in calls:
            launch = machine(call.spec, arch, call.tensors, call.grid, call.cluster, memory, order)
            yield list(launch.clusters())

    _run_together([Stream(launches(calls)) for rank, calls in enumerate(ranks) if rank != missing], order, most)
    memory.give_back()
