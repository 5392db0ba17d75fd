"""The skinny matmul for more tokens than `skinny.Block` can hold in shared memory: 64 columns of both operands at a time,
through a ring of stages that asynchronous copies fill. Same calls, same sums over warps and cluster.

A stage is rows of 128 bytes: the block's rows of the matrix, the tokens, and one row for a norm weight. Odd rows have their
halves swapped, so that the 16-byte reads of two neighbouring rows share no bank. Two warps share a row's 64 columns, a half
each.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, max, min
from cutlass.cutlass_dsl import select_

from ..skinny import TILE, UNIT, Shape, ceil_div
from .ptx import copy_async, load_shared, mma_bf16, multiply_bf16, opaque, stream_async
from .reduce import warp_sum
from .ring import Ring, apart
from .skinny import Block, Rows, Smem
from .vectors import unpack_bf16

ROW = 64  # bf16 elements of a row in a stage
CHUNK = 8  # of them in 16 bytes


class Streamed(Block):
    """A block whose operands pass through stages. `multiply` needs all parts' activations announced before."""

    def __init__(self, shape: Shape, rank: Any, rows: Rows, weights: list[Any], smem: Smem, exact: bool = False) -> None:
        self._place(shape, rank, rows, smem, exact)
        self.squares_from = 1
        self.weights, self.inputs, self.norm = weights, [None] * len(weights), None
        self.counts = [self._count(p) for p in range(len(weights))]
        self.total = opaque(
            Int32(sum(self.counts[1:], self.counts[0]))
        )  # a predicate must be a register, whatever is known about it
        self.filled = False
        self.stage_elements = shape.stage_rows * ROW
        # Copies: this thread moves one 16-byte chunk of every (threads / 8)-th row.
        self.copy_row, self.copy_chunk = self.thread // 8, self.thread % 8
        self.rows_apart = self.tactic.threads // 8
        moved = ceil_div(self.tactic.rows, self.rows_apart)
        self.local_rows = [self.copy_row + i * self.rows_apart for i in range(moved)]
        self.global_rows = [self._row(row) for row in self.local_rows]
        held = (rows.last - rows.first) * (2 if rows.pair else 1)  # rows behind it stay what they are: nobody stores their sums
        last_tile = ceil_tile(held)
        self.wanted = [row < min(last_tile, self.tactic.rows) for row in self.local_rows]
        # Operands: this lane's 16 bytes of a row in its half.
        half = self.k_warp if self.tactic.k_warps == 2 else Int32(0)
        self.operand = self.quad * ROW + ((self.slot + 4 * half) ^ (self.quad % 2 * 4)) * CHUNK
        self.norm_chunk = (self.slot + 4 * half) * CHUNK
        for unit in range(self.tactic.stages - 1):
            self.fetch_weights(Int32(unit), unit)

    def _count(self, p: int) -> Any:
        """Units of part `p` in this split."""
        part = self.shape.parts[p]
        if part.share * self.tactic.splits == part.units:
            return part.share
        return max(min(part.units - self.rank * part.share, part.share), 0)

    def _where(self, unit: Any) -> tuple[Any, Any]:
        """(is it of the first part, column) of this split's unit."""
        first, last = self.shape.parts[0], self.shape.parts[-1]
        if len(self.counts) == 1:
            return True, (self.rank * first.share + unit) * UNIT
        inside = unit < self.counts[0]
        return inside, Int32(
            select_(inside, self.rank * first.share + unit, self.rank * last.share + unit - self.counts[0])
        ) * UNIT

    def _source(self, tensors: list[Any], unit: Any) -> tuple[Any, Any]:
        """(address of this thread's chunk in row 0, bytes of a row) of the unit in the matrix or the activation of its part."""
        inside, column = self._where(unit)
        bases, pitches = [t.iterator.toint() for t in tensors], [Int32(t.stride[0] * 2) for t in tensors]
        base, pitch = bases[0], pitches[0]
        if len(tensors) == 2:
            base, pitch = Int64(select_(inside, bases[0], bases[1])), Int32(select_(inside, pitches[0], pitches[1]))
        return base + Int64((column + self.copy_chunk * CHUNK) * 2), pitch

    def _target(self, stage: Any, row: Any) -> Any:
        """Shared-memory address of this thread's chunk in a row of a stage."""
        return self.smem.activation + (stage * self.stage_elements + row * ROW + (self.copy_chunk ^ (row % 2 * 4)) * CHUNK)

    def fetch_weights(self, unit: Any, stage: Any) -> None:
        """Start copying this block's rows of a unit; nothing behind the last unit."""
        base, pitch = self._source(self.weights, unit)
        for local, row, wanted in zip(self.local_rows, self.global_rows, self.wanted, strict=True):
            stream_async(self._target(stage, local), base + Int64(row) * Int64(pitch), wanted & (unit < self.total))

    def fetch_activation(self, unit: Any, stage: Any) -> None:
        base, pitch = self._source(self.inputs, unit)
        tokens = self.shape.tokens
        for i in range(ceil_div(tokens, self.rows_apart)):
            token = self.copy_row + i * self.rows_apart
            wanted = (token < tokens) & (unit < self.total)
            target = self._target(stage, self.tactic.rows + token)
            copy_async(target, base + Int64(min(token, tokens - 1)) * Int64(pitch), Int32(16), wanted)

    def fetch_norm(self, unit: Any, stage: Any) -> None:
        _, column = self._where(unit)
        target = self._target(stage, self.tactic.rows + self.shape.padded_tokens)
        wanted = (self.thread < 8) & (unit < self.counts[0])
        source = self.norm.iterator + min(column + self.copy_chunk * CHUNK, self.norm.shape[0] - CHUNK)
        copy_async(target, source, Int32(16), wanted)

    # -- the calls of `Block` ----------------------------------------

    def stage(self, p: int, x: Any) -> None:
        """x [T, columns] bf16 is the activation of part `p`."""
        self.inputs[p] = x

    def norm_words(self, p: int, weight: Any) -> Any:
        """The norm weight of part `p`, which must be the first."""
        self.norm = weight
        for unit in range(self.tactic.stages - 1):
            self.fetch_norm(Int32(unit), unit)
        return weight

    def stage_normalised(self, p: int, x: Any, weight: Any) -> None:
        """Part `p` is bf(x * weight), x [T, columns] bf16; `inverse_rms` then knows its squares."""
        self.inputs[p] = x

    def multiply(self, p: int, pending: int = 0, staged: bool = False) -> None:
        """acc += weights of part `p` times its activation."""
        if not self.filled:
            for unit in range(self.tactic.stages - 1):
                self.fetch_activation(Int32(unit), unit)
                cute.arch.cp_async_commit_group()
            self.filled = True
        groups = self.shape.padded_tokens // 8
        acc = cute.make_rmem_tensor(self.tactic.tiles * groups * 4, Float32)
        for m in range(self.tactic.tiles):
            for n in range(groups):
                for i in range(4):
                    acc[(m * groups + n) * 4 + i] = self.acc[m][n][i]
        with_norm = p == 0 and self.norm is not None
        squares = cute.make_rmem_tensor(ceil_div(self.shape.tokens * 4, self.tactic.threads), Float32)
        squares.fill(0.0)
        first = 0 if p == 0 else self.counts[0]
        _stream(self, acc, squares, first, first + self.counts[p], with_norm)
        self.acc = [[[acc[(m * groups + n) * 4 + i] for i in range(4)] for n in range(groups)] for m in range(self.tactic.tiles)]
        if with_norm:
            for i, (token, _, inside) in enumerate(self._quarters()):
                self.smem.squares[select_(inside, token, Int32(63))] = warp_sum(squares[i], 4)
            cute.arch.sync_threads()

    def _quarters(self) -> list[tuple[Any, Any, Any]]:
        """(token, quarter, whether it exists) of the columns whose squares this thread adds up."""
        found, tokens = [], self.shape.tokens
        for i in range(ceil_div(tokens * 4, self.tactic.threads)):
            index = self.thread + i * self.tactic.threads
            found.append((index // 4, index % 4, index < tokens * 4))
        return found

    def add_squares(self, squares: Any, stage: Any) -> None:
        """squares += those of this thread's 16 columns of a token."""
        for i, (token, quarter, _) in enumerate(self._quarters()):
            row = self.tactic.rows + min(token, self.shape.tokens - 1)
            total = squares[i]
            for c in (0, 1):
                chunk = (quarter * 2 + c) ^ (row % 2 * 4)
                for word in load_shared(self.smem.activation + (stage * self.stage_elements + row * ROW + chunk * CHUNK)):
                    for value in unpack_bf16(word):
                        total = total + value * value
            squares[i] = total

    def add_product(self, acc: Any, stage: Any, with_norm: bool) -> None:
        """acc += this warp's rows of a stage times its tokens, over this warp's half of the columns."""
        groups, tiles = self.shape.padded_tokens // 8, self.tactic.tiles
        start = self.smem.activation + (stage * self.stage_elements)
        for h in range(2 // self.tactic.k_warps):
            lane = self.operand if h == 0 else self.operand ^ (4 * CHUNK)
            rows = start + (self.row_warp * (tiles * TILE * ROW) + lane)
            tops = [apart(load_shared(rows + m * TILE * ROW)) for m in range(tiles)]
            bottoms = [apart(load_shared(rows + (m * TILE + 8) * ROW)) for m in range(tiles)]
            factors = None
            if with_norm:
                norm = (self.tactic.rows + self.shape.padded_tokens) * ROW
                factors = load_shared(start + (norm + self.norm_chunk + h * 4 * CHUNK))
            for n in range(groups):
                b = load_shared(start + ((self.tactic.rows + n * 8) * ROW + lane))
                if factors is not None:
                    b = tuple(multiply_bf16(word, factor) for word, factor in zip(b, factors, strict=True))
                for m, (top, bottom) in enumerate(zip(tops, bottoms, strict=True)):
                    at = (m * groups + n) * 4
                    own = [acc[at + i] for i in range(4)]
                    sums = [Float32(0.0)] * 4 if self.exact else list(own)
                    for s in (0, 2):
                        mma_bf16(sums, (top[s], bottom[s], top[s + 1], bottom[s + 1]), b[s], b[s + 1])
                    for i in range(4):
                        acc[at + i] = own[i] + sums[i] if self.exact else sums[i]


def make_block(
    shape: Shape, rank: Any, rows: Rows, weights: list[Any], smem: Smem, exact: bool = False, norm: Any = None
) -> Block:
    """The block of a tactic: a ring, stages or neither. `norm`: the weight of part 0's norm, where there is one."""
    if shape.tactic.chunk:
        return Ring(shape, rank, rows, weights, smem, exact, norm)
    return (Streamed if shape.tactic.stages else Block)(shape, rank, rows, weights, smem, exact)


def ceil_tile(rows: Any) -> Any:
    """Rows rounded up to whole tiles."""
    return (rows + TILE - 1) // TILE * TILE


@cute.jit
def _stream(block: Any, acc: Any, squares: Any, first: Any, last: Any, with_norm: cutlass.Constexpr):
    """Units [first, last): each is multiplied while the copies of the next stages - 1 run."""
    for unit in cutlass.range(first, last, unroll=1):
        _step(block, acc, squares, unit, with_norm)


def _step(block: Streamed, acc: Any, squares: Any, unit: Any, with_norm: bool) -> None:
    """One unit. Behind the barrier its copies are there for all, and the stage of the unit before is free to be filled."""
    stages = block.tactic.stages
    cute.arch.cp_async_wait_group(stages - 2)
    cute.arch.sync_threads()
    ahead = unit + (stages - 1)
    block.fetch_weights(ahead, ahead % stages)
    block.fetch_activation(ahead, ahead % stages)
    if with_norm:
        block.fetch_norm(ahead, ahead % stages)
    cute.arch.cp_async_commit_group()
    if with_norm:
        block.add_squares(squares, unit % stages)
    block.add_product(acc, unit % stages, with_norm)
