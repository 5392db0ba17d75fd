"""The skinny matmul with weights streamed into a ring of shared-memory stages by bulk copies: one block an SM, few registers.

A layer's matrices are read once and nothing of them is in a cache, so memory should never idle. Registers hold too little and
bind the SM; a ring of 100 to 200 KB a block is 13 to 26 MB on the card. It is filled before the dependency wait, while the small
kernels in front run beside it, and refilled without a pause by warps that do nothing else:

    fetchers   copy rows, `chunk` columns of each, as far ahead as the ring has free stages. Weights go first; the activation's
               part of the stages that were filled early follows behind the wait, a row at a time or 16 bytes a lane (`by_lanes`)
    the others multiply: every k_warps-th unit of 64 columns, `tiles` tiles of 16 rows, straight from shared memory

A block has all of K. A stage is `height` rows of the matrix, the tokens, and with a norm its weight. Rows lie an odd multiple of
64 bytes apart, so the 16-byte reads of two neighbouring rows share no bank. Rows of a stage that a block does not own are never
written, and what the tensor core makes of them is never stored.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, min
from cutlass.cutlass_dsl import select_

from ..skinny import TILE, UNIT, Shape, ceil_div
from .ptx import (
    before_copies,
    copy_async,
    copy_bulk,
    evict_first,
    load_shared,
    mma_bf16,
    multiply_bf16,
    opaque,
    opaque_address,
    store_shared_f32,
)
from .reduce import warp_sum
from .skinny import Block, Rows, Smem
from .vectors import Words, unpack_bf16

HALF = UNIT // 2  # elements: a lane's two pieces of a unit lie so far apart
PACED = 8  # rows that are copied at once while the ring is filled at a pace


class Ring(Block):
    """A block whose weights pass through a ring. `norm`: weight of the first part's activation. `rows.pair`: rows of the second
    matrix, gate and up, follow those of the first in a stage. `multiply` needs all parts' activations announced before.
    """

    def __init__(
        self, shape: Shape, rank: Any, rows: Rows, weights: list[Any], smem: Smem, exact: bool = False, norm: Any = None
    ) -> None:
        self._place(shape, rank, rows, smem, exact)
        tactic = self.tactic
        self.squares_from = tactic.k_warps
        self.weights, self.inputs, self.norm = weights, [None] * len(weights), norm
        self.policy = evict_first() if tactic.passing else None
        self.full, self.empty = smem.barriers, smem.barriers + tactic.stages
        self.consumers = tactic.row_warps * tactic.k_warps
        self.multiplies = self.warp < self.consumers
        self.own = rows.last - rows.first
        self.held = self._held()
        # Copies: lane of the fetching warps, and the rows it moves.
        self.fetcher = self.thread - 32 * self.consumers
        self.counts = [part.units for part in shape.parts]
        self.chunks = [ceil_div(count, shape.chunk_units) for count in self.counts]
        self.total = sum(self.chunks)
        self.ahead = tactic.stages if tactic.stages < self.total else self.total
        self.operands = [[self._operand(m * TILE + half) for half in (0, 8)] for m in range(tactic.tiles)]
        _prepare(self)

    def _operand(self, row: int) -> Any:
        """Where in a stage this lane's first 16 bytes of a row of its tiles are; past the last row, that one again."""
        first, last = self.row_warp * (self.tactic.tiles * TILE) + self.quad + row, self.shape.height - 1
        fits = (self.tactic.row_warps - 1) * self.tactic.tiles * TILE + 7 + row <= last
        return (first if fits else min(first, last)) * self.shape.stage_pitch + self.slot * 8

    def _held(self) -> Any:
        """Rows of a stage that this block fills."""
        if isinstance(self.rows.pair, int):
            return self.own * 2 if self.rows.pair else self.own
        return Int32(select_(self.rows.pair > 0, self.own * 2, self.own))

    # -- copies: the fetching warps ----------------------------------------

    def _where(self, chunk: Any) -> tuple[Any, Any, Any]:
        """(is it of the first part, first column, bytes of a row) of a chunk."""
        units, inside = self.shape.chunk_units, True
        start = chunk * units
        left = self.counts[0] - start
        if len(self.counts) == 2:
            inside, behind = chunk < self.chunks[0], (chunk - self.chunks[0]) * units
            start = Int32(select_(inside, start, behind))
            left = Int32(select_(inside, Int32(left), Int32(self.counts[1] - behind)))
        return inside, start * UNIT, min(left, units) * (UNIT * 2)

    def _source(self, tensors: list[Any], chunk: Any) -> tuple[Any, Any, Any]:
        """(address of the chunk in row 0, bytes between rows, bytes to copy) in the matrix or the activation of its part."""
        inside, column, size = self._where(chunk)
        bases, pitches = [t.iterator.toint() for t in tensors], [Int32(t.stride[0] * 2) for t in tensors]
        base, pitch = bases[0], pitches[0]
        if len(tensors) == 2:
            base, pitch = Int64(select_(inside, bases[0], bases[1])), Int32(select_(inside, pitches[0], pitches[1]))
        return base + Int64(column) * Int64(2), pitch, size

    def _turns(self, rows: int) -> list[Any]:
        """Rows of a stage, out of `rows`, that this lane moves."""
        lanes = 32 * self.tactic.fetchers
        return [self.fetcher + i * lanes for i in range(ceil_div(rows, lanes))]

    def expected(self, chunk: Any) -> Any:
        """Bytes that this fetching warp brings into the chunk's stage."""
        inside, _, size = self._where(chunk)
        count: Any = Int32(0)
        for row in self._turns(self.shape.height):
            count = count + cute.arch.popc(cute.arch.vote_ballot_sync(row < self.held))
        for row in self._turns(0 if self.tactic.by_lanes else self.shape.tokens):
            count = count + cute.arch.popc(cute.arch.vote_ballot_sync(row < self.shape.tokens))
        if self.norm is not None:
            count = count + Int32((self.fetcher < 32) & inside)
        return count * size

    def _target(self, stage: Any, row: Any) -> Any:
        return self.smem.activation + (stage * self.shape.stage_elements + row * self.shape.stage_pitch)

    def copy_weights(self, chunk: Any, stage: Any) -> None:
        size, rows = self.weight_rows(chunk, stage)
        for row, address, target in rows:
            copy_bulk(target, address, size, self.full + stage, row < self.held, self.policy)
        self.copy_norm(chunk, stage, size)

    def weight_rows(self, chunk: Any, stage: Any) -> tuple[Any, list[tuple[Any, Any, Any]]]:
        """(bytes of a copy, [(row of a stage, address, target)]) of what this lane copies of the matrix."""
        base, pitch, size = self._source(self.weights, chunk)
        found = []
        for row in self._turns(self.shape.height):
            source = self.rows.first + row
            if not (isinstance(self.rows.pair, int) and self.rows.pair == 0):
                source = source + Int32(select_(row < self.own, Int32(0), self.rows.pair - self.own))
            found.append((row, base + Int64(source) * Int64(pitch), self._target(stage, row)))
        return size, found

    def copy_norm(self, chunk: Any, stage: Any, size: Any) -> None:
        if self.norm is not None:
            inside, column, _ = self._where(chunk)
            target = self._target(stage, self.shape.height + self.shape.tokens)
            address = self.norm.iterator.toint() + Int64(column) * Int64(2)
            copy_bulk(target, address, size, self.full + stage, (self.fetcher == 0) & inside)

    def copy_inputs(self, chunk: Any, stage: Any) -> None:
        base, pitch, size = self._source(self.inputs, chunk)
        if self.tactic.by_lanes:
            _copy_by_lanes(self, base, pitch, size, stage)
            return
        for token in self._turns(self.shape.tokens):
            target = self._target(stage, self.shape.height + token)
            copy_bulk(target, base + Int64(token) * Int64(pitch), size, self.full + stage, token < self.shape.tokens)

    # -- the calls of `Block` ----------------------------------------

    def stage(self, p: int, x: Any) -> None:
        """x [T, columns] bf16 is the activation of part `p`."""
        self.inputs[p] = x

    def norm_words(self, p: int, weight: Any) -> Any:
        return weight

    def stage_normalised(self, p: int, x: Any, weight: Any) -> None:
        """Part `p`, the first, is bf(x * norm), x [T, columns] bf16; `inverse_rms` then knows its squares."""
        self.inputs[p] = x

    def multiply(self, p: int, pending: int = 0, staged: bool = False) -> None:
        """acc += weights of part `p` times its activation."""
        groups, tiles = self.shape.padded_tokens // 8, self.tactic.tiles
        acc = cute.make_rmem_tensor(tiles * groups * 4, Float32)
        for m in range(tiles):
            for n in range(groups):
                for i in range(4):
                    acc[(m * groups + n) * 4 + i] = self.acc[m][n][i]
        with_norm = p == 0 and self.norm is not None
        squares = cute.make_rmem_tensor(groups, Float32)
        squares.fill(0.0)
        if p == 0:
            _feed(self)
        _consume(self, acc, squares, p, with_norm)
        self.acc = [[[acc[(m * groups + n) * 4 + i] for i in range(4)] for n in range(groups)] for m in range(tiles)]

    def add_unit(self, acc: Any, squares: Any, stage: Any, unit: Any, with_norm: bool) -> None:
        """acc += this warp's rows of a unit times its tokens, half a unit at a time, as registers are few."""
        shape, groups = self.shape, self.shape.padded_tokens // 8
        for h in (0, 1):
            start = self.smem.activation + (stage * shape.stage_elements + unit * UNIT + h * HALF)
            factors = None
            if with_norm:
                factors = load_shared(start + ((shape.height + shape.tokens) * shape.stage_pitch + self.slot * 8))
            tiles = [[load_shared(start + row) for row in rows] for rows in self.operands]
            if groups > 2 and not self.exact:  # an exact block has no registers left
                tiles = [[apart(words) for words in rows] for rows in tiles]
            for n in range(groups):
                token = n * 8 + self.quad  # past the batch the last one again: their sums are not stored
                token = token if n * 8 + 8 <= shape.tokens else min(token, shape.tokens - 1)
                b = load_shared(start + ((shape.height + token) * shape.stage_pitch + self.slot * 8))
                if factors is not None:
                    total = squares[n]
                    for word in b:
                        for value in unpack_bf16(word):
                            total = total + value * value
                    squares[n] = total
                    b = tuple(multiply_bf16(x, f) for x, f in zip(b, factors, strict=True))
                for m, (top, bottom) in enumerate(tiles):
                    self._multiply(acc, (m * groups + n) * 4, top, bottom, b)

    def _multiply(self, acc: Any, at: int, top: Words, bottom: Words, b: Words) -> None:
        """Four values of acc += one tile's 32 columns; as `Block._tile`, exact blocks add in fp32."""
        own = [acc[at + i] for i in range(4)]
        sums = [Float32(0.0)] * 4 if self.exact else list(own)
        for s in (0, 2):
            mma_bf16(sums, (top[s], bottom[s], top[s + 1], bottom[s + 1]), b[s], b[s + 1])
        for i in range(4):
            acc[at + i] = own[i] + sums[i] if self.exact else sums[i]

    def put_squares(self, squares: Any) -> None:
        """The sums of squares of every token, over this warp's columns, to shared memory. Warps of other rows have the same."""
        once = self.row_warp == 0 if self.tactic.row_warps > 1 else None
        for n in range(self.shape.padded_tokens // 8):
            at = self.smem.squares.iterator + (self.k_warp * 64 + n * 8 + self.quad)
            store_shared_f32(at, warp_sum(squares[n], 4), once)

    def inverse_rms(self, eps: float, columns: int) -> Any:
        """As `Block`'s; the fetching warps have none."""
        factors = cute.make_rmem_tensor(self.shape.padded_tokens // 4, Float32)
        factors.fill(0.0)
        _find_factors(self, factors, eps, columns)
        return lambda n, c: factors[2 * n + c]

    def _publish(self) -> None:
        _publish(self)

    def _outputs(self, emit: Any, value: Any, rank: Any) -> None:
        """Deal the outputs to threads: neighbours write neighbouring rows. value(half): row of the gate or of the up matrix."""
        rows = self.shape.span
        count, threads = self.shape.tokens * rows, self.tactic.threads
        for i in range(ceil_div(count, threads)):
            raw = self.thread + i * threads
            index = min(raw, count - 1)
            token, row = index // rows, index % rows
            inside = (raw < count) & (row < self.own)
            emit(token, self.rows.first + row, lambda half, t=token, r=row: value(t, self._partial_row(r, half)), inside)

    def _partial_row(self, row: Any, half: int) -> Any:
        return min(row + self.own, self.tactic.rows - 1) if half else row


def select_tensor(conditions: list[Any], tensors: list[Any]) -> Any:
    """The first bf16 matrix [rows, K] whose condition holds, else the last; all have the same K."""
    *addresses, address = [opaque_address(tensor.iterator.toint()) for tensor in tensors]
    for condition, candidate in zip(conditions[::-1], addresses[::-1], strict=True):
        address = Int64(select_(condition, candidate, address))
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    k = tensors[0].shape[1]
    return cute.make_tensor(pointer, cute.make_layout((1, k), stride=(k, 1)))


def apart(words: Words) -> Words:
    """The same words in other registers. A load puts four words of one row side by side, a product wants words of two rows so:
    left to itself the compiler moves them before every product, eight times for 64 tokens. It does not know that the third index
    of a block is 0, as it is in every grid here, so it keeps what this computes.
    """
    zero = Uint32(cute.arch.block_idx()[2])
    first, second, third, fourth = (word | zero for word in words)
    return first, second, third, fourth


@cute.jit
def _prepare(block: Any):
    """Barriers, then the weights of the first stages: nothing here waits for another kernel."""
    stages = cutlass.const_expr(block.tactic.stages)
    if block.thread < 2 * stages:
        arrivals = Int32(block.tactic.fetchers * (1 + 32 * block.tactic.by_lanes))  # once a warp, and a lane by its copies
        if block.thread >= stages:
            arrivals = Int32(block.consumers)
        cute.arch.mbarrier_init(block.full + block.thread, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if block.warp >= block.consumers:
        began, due = Uint32(cute.arch.clock() if block.tactic.pace else 0), Uint32(0)
        for chunk in cutlass.range(0, block.ahead, unroll=1):
            _expect(block, chunk, chunk)
            if cutlass.const_expr(block.tactic.pace > 0):
                due = _pace(block, chunk, began, due)
            else:
                Ring.copy_weights(block, chunk, chunk)


@cute.jit
def _pace(block: Any, chunk: Any, began: Any, due: Any):
    """`copy_weights` of a chunk to its stage, some rows at a time. Returns when the next chunk's first rows are due."""
    size, rows = Ring.weight_rows(block, chunk, chunk)
    Ring.copy_norm(block, chunk, chunk, size)
    parts = cutlass.const_expr(ceil_div(block.shape.height, PACED))
    for part in cutlass.range(0, parts, unroll=1):
        while Uint32(cute.arch.clock()) - began < due:
            pass
        for row, address, target in rows:
            wanted = (row // PACED == part) & (row < block.held)
            copy_bulk(target, address, size, block.full + chunk, wanted, block.policy)
        due = due + Uint32(block.tactic.pace)
    return due


@cute.jit
def _copy_by_lanes(block: Any, base: Any, pitch: Any, size: Any, stage: Any):
    """A chunk of the tokens to its stage: a fetching warp takes every `fetchers`-th token. Each lane arrives when its own copies
    have landed."""
    limit = opaque(Int32(size))  # a predicate must be a register, whatever is known about it
    for token in cutlass.range(block.warp - block.consumers, block.shape.tokens, block.tactic.fetchers, unroll=2):
        source = base + Int64(token) * Int64(pitch)
        target = Ring._target(block, stage, block.shape.height + token)
        for turn in cutlass.range_constexpr(ceil_div(block.tactic.chunk, 256)):
            piece = block.lane + turn * 32
            copy_async(target + piece * 8, source + Int64(piece * 16), Int32(16), piece * 16 < limit)
    cute.arch.cp_async_mbarrier_arrive_noinc(block.full + stage)


@cute.jit
def _expect(block: Any, chunk: Any, stage: Any):
    expected = Ring.expected(block, chunk)
    if block.lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(block.full + stage, expected)
    cute.arch.sync_warp()


@cute.jit
def _feed(block: Any):
    """The fetching warps behind the wait: the activation of what is there, then all else."""
    stages = cutlass.const_expr(block.tactic.stages)
    if block.warp >= block.consumers:
        for chunk in cutlass.range(0, block.ahead, unroll=1):
            Ring.copy_inputs(block, chunk, chunk)
        for chunk in cutlass.range(block.ahead, block.total, unroll=1):
            stage = chunk % stages
            cute.arch.mbarrier_wait(block.empty + stage, (chunk // stages & 1) ^ 1)
            _expect(block, chunk, stage)
            Ring.copy_weights(block, chunk, stage)
            Ring.copy_inputs(block, chunk, stage)


@cute.jit
def _consume(block: Any, acc: Any, squares: Any, p: cutlass.Constexpr, with_norm: cutlass.Constexpr):
    """The multiplying warps through the chunks of part `p`."""
    stages = cutlass.const_expr(block.tactic.stages)
    k_warps = cutlass.const_expr(block.tactic.k_warps)
    units = cutlass.const_expr(block.shape.chunk_units)
    turns = cutlass.const_expr(-(-units // k_warps))
    whole = cutlass.const_expr(block.counts[p] % units == 0 and units % k_warps == 0)
    first = block.chunks[0] if cutlass.const_expr(p > 0) else 0
    if block.multiplies:
        for i in cutlass.range(0, block.chunks[p], unroll=1):
            chunk = first + i
            stage = chunk % stages
            cute.arch.mbarrier_wait(block.full + stage, chunk // stages & 1)
            for turn in cutlass.range(0, turns, unroll_full=turns <= 2, unroll=1):
                unit = block.k_warp + turn * k_warps
                if cutlass.const_expr(whole):  # noqa: SIM114 - one is of the trace, one of the kernel
                    Ring.add_unit(block, acc, squares, stage, unit, with_norm)
                elif unit < min(block.counts[p] - i * units, units):
                    Ring.add_unit(block, acc, squares, stage, unit, with_norm)
            before_copies()
            cute.arch.sync_warp()
            if block.lane == 0:
                cute.arch.mbarrier_arrive(block.empty + stage)
        if cutlass.const_expr(with_norm):
            Ring.put_squares(block, squares)
            cute.arch.barrier(barrier_id=1, number_of_threads=32 * block.consumers)


@cute.jit
def _find_factors(block: Any, factors: Any, eps: cutlass.Constexpr, columns: cutlass.Constexpr):
    if block.multiplies:
        factor = Block.inverse_rms(block, eps, columns)
        for i in cutlass.range_constexpr(block.shape.padded_tokens // 4):
            factors[i] = factor(i // 2, i % 2)


@cute.jit
def _publish(block: Any):
    if block.multiplies:
        Block._publish(block)
