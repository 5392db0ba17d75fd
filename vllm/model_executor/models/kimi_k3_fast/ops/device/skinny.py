"""The skinny matmul on the tensor core, weights from global memory straight into registers. `ops/skinny.py` explains the
geometry.

A kernel uses it in this order, so that the weights' stream starts before the kernel may read anything else:

    block = make_block(shape, rank, rows, [w.early(), ...], Smem(shape))  # who am I, which rows; issues the first loads of
    weights token = dependency_wait() block.stage(0, x.after(token))                   # the activation into shared memory
    block.multiply(0)                                # through a part of K; the ring of loads runs on into the next part
    block.reduce(emit)                               # over warps and the cluster; emit(token, row, value, predicate) stores

The ring of loads is a register tensor with constant indices: the loop's body goes once around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, min
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..skinny import TILE, UNIT, Shape, ceil_div
from .ptx import cluster_barrier, copy_async, load_shared, mma_bf16, peer_f32, prefetch_bytes, store_shared, store_shared_f32
from .reduce import warp_sum
from .vectors import Words, load_words, load_words_streaming, pack_bf16, unpack_bf16

PAIR_WORDS = 16  # 4-byte words a lane holds of a tile's 64 columns


@dataclass
class Rows:
    """The rows of one group. `pair` > 0: row r of a tile's second half lies `pair` rows after row r of its first half (gate
    and up).
    """

    first: Any
    last: Any  # exclusive
    pair: int = 0

    @property
    def per_tile(self) -> int:
        return TILE // 2 if self.pair else TILE


def even_share(total: int, groups: int, group: Any, whole: int = 1) -> tuple[Any, Any]:
    """[first, last) of `group` when `total` rows are dealt as evenly as possible, so many together."""
    if whole > 1:
        first, last = even_share(total // whole, groups, group)
        return first * whole, last * whole
    return group * total // groups, (group + 1) * total // groups


class Block:
    """One thread's part in the block's work. See the module head for the order of calls."""

    def __init__(self, shape: Shape, rank: Any, rows: Rows, weights: list[Any], smem: Smem, exact: bool = False) -> None:
        self._place(shape, rank, rows, smem, exact)
        self.squares_from = self.tactic.k_warps  # so many partial sums of a token's squares
        self.bases = [
            [self._row_bases(w, part, tile) for tile in range(self.tactic.tiles)]
            for w, part in zip(weights, shape.parts, strict=True)
        ]
        self.ring = cute.make_rmem_tensor(shape.ahead * self.tactic.tiles * PAIR_WORDS, Uint32)
        for s in range(min_int(shape.ahead, shape.steps)):
            for m in range(self.tactic.tiles):
                self._load(*self._place_of(s), s % shape.ahead, m)
        self._prefetch(weights)

    def _place(self, shape: Shape, rank: Any, rows: Rows, smem: Smem, exact: bool) -> None:
        """Who this thread is."""
        self.shape, self.tactic, self.rows, self.rank, self.smem, self.exact = shape, shape.tactic, rows, rank, smem, exact
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread
        self.lane, self.warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        self.row_warp, self.k_warp = self.warp // self.tactic.k_warps, self.warp % self.tactic.k_warps
        self.quad, self.slot = self.lane // 4, self.lane % 4  # row within 8; which 16 bytes of 64
        self.acc = [[[Float32(0.0)] * 4 for _ in range(shape.padded_tokens // 8)] for _ in range(self.tactic.tiles)]

    # -- weights ----------------------------------------

    def _row_bases(self, weight: Any, part: Any, tile: int) -> list[Any]:
        """Where this lane starts in its two rows of a tile. Rows past the share are its last row again: the same line, no
        extra traffic.
        """
        index = self.rows.first + (self.row_warp * self.tactic.tiles + tile) * self.rows.per_tile + self.quad
        last = self.rows.last - 1
        half = self.rows.pair or TILE // 2
        rows = [min(index, last), min(index, last) + half] if self.rows.pair else [min(index, last), min(index + half, last)]
        return [weight.iterator + (row * weight.stride[0] + self.slot * 8) for row in rows]

    def _unit(self, p: int, j: int) -> Any:
        """Column unit of step `j`; a padding unit reads the last one again and meets zeros in the activation."""
        part, k_warps = self.shape.parts[p], self.tactic.k_warps
        unit = self.rank * part.share + self.k_warp + j * k_warps
        inside = isinstance(j, int) and (j + 1) * k_warps <= part.share
        even = (inside or part.share == part.steps * k_warps) and self.tactic.splits * part.share == part.units
        return unit if even else min(unit, part.units - 1)

    def _place_of(self, step: int) -> tuple[int, int]:
        """(part, step within it) of a step counted through all parts."""
        p = 0
        while step >= self.shape.parts[p].steps:
            step, p = step - self.shape.parts[p].steps, p + 1
        return p, step

    def _load(self, p: int, j: Any, slot: int, m: int) -> None:
        """Start the loads of tile `m` at step `j` of part `p` into a slot of the ring."""
        column, at = self._unit(p, j) * UNIT, (slot * self.tactic.tiles + m) * PAIR_WORDS
        for r, base in enumerate(self.bases[p][m]):
            for h in (0, 1):
                for i, word in enumerate(load_words_streaming(base + column + h * 32)):
                    self.ring[at + r * 8 + h * 4 + i] = word

    def _prefetch(self, weights: list[Any]) -> None:
        """Ask for the columns behind the first loads, one thread for a row: the steps that `prefetch` KiB of all rows hold."""
        step_bytes = self.tactic.rows * self.tactic.k_warps * UNIT * 2
        start = self.shape.ahead
        end = start + self.tactic.prefetch * 1024 // step_bytes
        for p, (weight, part) in enumerate(zip(weights, self.shape.parts, strict=True)):
            skipped = self.first_step(p)
            first, last = (
                max_int(start - skipped, 0) * self.tactic.k_warps,
                min_int(end - skipped, part.steps) * self.tactic.k_warps,
            )
            if first >= last:
                continue
            unit = self.rank * part.share + first
            units = min(min(last, part.share) - first, part.units - unit)
            row = self._row(self.thread)
            wanted = (self.thread < self.tactic.rows) & (units > 0)
            prefetch_bytes(weight.iterator + (row * weight.stride[0] + unit * UNIT), units * (UNIT * 2), wanted)

    def _row(self, index: Any) -> Any:
        """Row of the matrix behind row `index` of this block's tiles."""
        per_tile, within = self.rows.per_tile, index % TILE
        if not self.rows.pair:
            return min(self.rows.first + index, self.rows.last - 1)
        row = min(self.rows.first + index // TILE * per_tile + within % per_tile, self.rows.last - 1)
        return row + within // per_tile * self.rows.pair

    # -- activation ----------------------------------------

    def first_step(self, p: int) -> int:
        return sum(part.steps for part in self.shape.parts[:p])

    def columns(self, p: int, j: int) -> tuple[Any, Any]:
        """(column in global memory, bytes to copy) of this warp's unit at step `j`: 0 bytes for padding."""
        part = self.shape.parts[p]
        local = self.k_warp + j * self.tactic.k_warps
        real = (local < part.share) & (self.rank * part.share + local < part.units)
        return self._unit(p, j) * UNIT, Int32(real) * 16

    def target(self, p: int, j: int, token: Any, chunk: Any) -> Any:
        """Shared-memory address of 16 bytes of the activation."""
        slot = (self.first_step(p) + j) * self.tactic.k_warps + self.k_warp
        return self.smem.activation + (token * self.shape.pitch + slot * UNIT + chunk * 8)

    def pieces(self) -> list[tuple[Any, Any, Any]]:
        """(token, chunk, predicate) of each 16 bytes of a unit that this lane moves. Row warps share the tokens of their
        common units.
        """
        lanes, tokens = 32 * self.tactic.row_warps, self.shape.tokens
        pieces = []
        for i in range(ceil_div(tokens * 8, lanes)):
            index = self.row_warp * 32 + self.lane + i * lanes
            pieces.append((index // 8, index % 8, None if (i + 1) * lanes <= tokens * 8 else index < tokens * 8))
        return pieces

    def stage(self, p: int, x: Any) -> None:
        """Start copying part `p` of the activation x [T, columns]: one asynchronous group."""
        _copy(self, p, x, self.shape.parts[p].steps)
        cute.arch.cp_async_commit_group()

    def stage_normalised(self, p: int, x: Any, weight: list[Words]) -> None:
        """Part `p` as bf(x * weight), and the sums of squares of x, to shared memory. The factor rsqrt(mean + eps) is one per
        token and commutes with the product: `scale` applies it afterwards, so nothing waits for a reduction. Ends with a
        barrier of the block.
        """
        squares = [Float32(0.0) for _ in self.pieces()]
        for j in range(self.shape.parts[p].steps):
            column, wanted = self.columns(p, j)
            factors = [f for word in weight[j] for f in unpack_bf16(word)]
            for i, (token, chunk, inside) in enumerate(self.pieces()):
                at = token if inside is None else min(token, self.shape.tokens - 1)
                values = [select_(wanted != 0, v, Float32(0.0)) for v in load_eight(x, at, column + chunk * 8)]
                for v in values:
                    squares[i] = squares[i] + v * v
                scaled = [v * f for v, f in zip(values, factors, strict=True)]
                words = tuple(pack_bf16(a, b) for a, b in zip(scaled[0::2], scaled[1::2], strict=True))
                store_shared(self.target(p, j, token, chunk), words, inside)
        for (token, _, inside), square in zip(self.pieces(), squares, strict=True):
            at = token if inside is None else min(token, 63)
            self.smem.squares[self.k_warp * 64 + at] = warp_sum(square, 8)
        cute.arch.sync_threads()

    def norm_words(self, p: int, weight: Any) -> list[Words]:
        """This lane's 16 bytes of a norm weight at every step of part `p`."""
        return [
            load_words(weight.iterator + (self._unit(p, j) * UNIT + self.lane % 8 * 8)) for j in range(self.shape.parts[p].steps)
        ]

    def inverse_rms(self, eps: float, columns: int) -> Callable[[int, int], Any]:
        """factor(n, c) for `scale`: rsqrt(mean(x^2) + eps) of token 8n + 2 slot + c. In a cluster, its blocks meet here."""
        if self.tactic.splits > 1:
            cluster_barrier()

        def factor(n: int, c: int) -> Any:
            token, total = n * 8 + self.slot * 2 + c, Float32(0.0)
            for rank in range(self.tactic.splits):
                for warp in range(self.squares_from):
                    at = warp * 64 + token
                    total = total + (
                        self.smem.squares[at] if self.tactic.splits == 1 else peer_f32(self.smem.squares.iterator + at, rank)
                    )
            return cute.math.rsqrt(total / Float32(columns) + Float32(eps))

        return factor

    # -- product ----------------------------------------

    def multiply(self, p: int, pending: int = 0, staged: bool = False) -> None:
        """acc += weights of part `p` times its activation. `pending`: asynchronous groups started after this part's.

        `staged`: the activation is in shared memory already and all who wrote it have met.
        """
        if not staged:
            cute.arch.cp_async_wait_group(pending)
            if self.tactic.row_warps > 1:  # several warps filled what one reads
                cute.arch.sync_threads()
            else:
                cute.arch.sync_warp()
        tiles, groups, ahead = self.tactic.tiles, self.shape.padded_tokens // 8, self.shape.ahead
        steps, first = self.shape.parts[p].steps, self.first_step(p)
        acc = cute.make_rmem_tensor(tiles * groups * 4, Float32)
        for m in range(tiles):
            for n in range(groups):
                for i in range(4):
                    acc[(m * groups + n) * 4 + i] = self.acc[m][n][i]
        turns = max_int(steps - ahead, 0) // ahead  # of the loop: their loads stay within the part
        if turns > 1:
            _turns(self, acc, p, turns)
        else:
            turns = 0
        for j in range(turns * ahead, steps):
            self.step(
                acc,
                p,
                j,
                (first + j) % ahead,
                self._place_of(first + j + ahead) if first + j + ahead < self.shape.steps else None,
            )
        self.acc = [[[acc[(m * groups + n) * 4 + i] for i in range(4)] for n in range(groups)] for m in range(tiles)]

    def step(self, acc: Any, p: int, j: Any, slot: int, following: tuple[int, Any] | None) -> None:
        """acc += one step; the slots it frees take the loads of the step `following` = (part, step)."""
        groups = range(self.shape.padded_tokens // 8)
        if len(groups) <= 2:  # few tokens: their operand stays in registers, and a tile's slot is free as soon as it is used
            held = [self._activation(p, j, n) for n in groups]
            for m in range(self.tactic.tiles):
                for n in groups:
                    self._tile(acc, slot, m, n, held[n])
                if following:
                    self._load(*following, slot, m)
            return
        for n in groups:
            operand = self._activation(p, j, n)
            for m in range(self.tactic.tiles):
                self._tile(acc, slot, m, n, operand)
        for m in range(self.tactic.tiles if following else 0):
            self._load(*following, slot, m)

    def _activation(self, p: int, j: int, n: int) -> list[Words]:
        """This lane's 2 x 16 bytes of token 8n + quad; tokens past the batch repeat the last one and their sums are not
        stored.
        """
        token = min(n * 8 + self.quad, self.shape.tokens - 1) if self.shape.tokens < n * 8 + 8 else n * 8 + self.quad
        return [load_shared(self.target(p, j, token, self.slot + 4 * h)) for h in (0, 1)]

    def _tile(self, acc: Any, slot: int, m: int, n: int, operand: list[Words]) -> None:
        """acc += one tile's 64 columns. The tensor core cuts what it adds below the last bit of its sum; an exact block lets
        it add up 64 columns only, and adds those sums in fp32.
        """
        at, ring = (m * (self.shape.padded_tokens // 8) + n) * 4, (slot * self.tactic.tiles + m) * PAIR_WORDS
        own = [acc[at + i] for i in range(4)]
        sums = [Float32(0.0)] * 4 if self.exact else list(own)
        for h in (0, 1):
            for s in (0, 2):
                top, bottom = ring + h * 4 + s, ring + 8 + h * 4 + s
                a = (self.ring[top], self.ring[bottom], self.ring[top + 1], self.ring[bottom + 1])
                mma_bf16(sums, a, operand[h][s], operand[h][s + 1])
        for i in range(4):
            acc[at + i] = own[i] + sums[i] if self.exact else sums[i]

    def scale(self, factor: Callable[[int, int], Any]) -> None:
        """acc *= factor(n, c) for the token 8n + 2 slot + c of each accumulator column."""
        for n in range(self.shape.padded_tokens // 8):
            columns = [factor(n, c) for c in (0, 1)]
            for tile in self.acc:
                tile[n] = [value * columns[i % 2] for i, value in enumerate(tile[n])]

    # -- sums ----------------------------------------

    def reduce(self, emit: Callable[[Any, Any, Callable[[Any], Any], Any], None]) -> None:
        """Sum over the block's k warps, then over the cluster, both in order of rank, and hand each output of this block to
        `emit`.

        emit(token, row, value, predicate): `row` counts from the group's first row; `value(row)` gives the sum of any row of
        the same tile.
        """
        cute.arch.sync_threads()  # the partial sums take the place of the activation
        self._publish()
        cute.arch.sync_threads()
        if self.tactic.splits == 1:
            self._outputs(emit, lambda token, row: self._over_warps(token, row), 0)
            return
        if self.tactic.k_warps > 1:
            self._combine()
        cluster_barrier()
        self._outputs(emit, self._over_cluster, self.rank)
        cluster_barrier()  # a block's shared memory lives until its peers have read it

    def _publish(self) -> None:
        """This warp's accumulators to shared memory: partials[k_warp, token, row]."""
        for m, tile in enumerate(self.acc):
            row = (self.row_warp * self.tactic.tiles + m) * TILE + self.quad
            for n, values in enumerate(tile):
                for i, value in enumerate(values):
                    token = n * 8 + self.slot * 2 + i % 2
                    at = self.k_warp * self.shape.partial_floats + token * self.shape.partial_pitch + row + 8 * (i // 2)
                    self.smem.partials[at] = value

    def _over_warps(self, token: Any, row: Any) -> Any:
        at = token * self.shape.partial_pitch + row
        total = self.smem.partials[at]
        for warp in range(1, self.tactic.k_warps):
            total = total + self.smem.partials[at + warp * self.shape.partial_floats]
        return total

    def _combine(self) -> None:
        """The sums over this block's warps, in place of the first warp's, for the peers to read."""
        count, threads = self.shape.tokens * self.tactic.rows, self.tactic.threads
        for i in range(ceil_div(count, threads)):
            raw = self.thread + i * threads
            index = min(raw, count - 1)
            token, row = index // self.tactic.rows, index % self.tactic.rows
            inside = None
            if (i + 1) * threads > count:  # a thread without an output reads behind the rows, where nobody writes
                inside = raw < count
                row = Int32(select_(inside, row, self.tactic.rows))
            at = self.smem.partials.iterator + (token * self.shape.partial_pitch + row)
            store_shared_f32(at, self._over_warps(token, row), inside)

    def _over_cluster(self, token: Any, row: Any) -> Any:
        where = self.smem.partials.iterator + (token * self.shape.partial_pitch + row)
        total = peer_f32(where, 0)
        for rank in range(1, self.tactic.splits):
            total = total + peer_f32(where, rank)
        return total

    def _outputs(self, emit: Callable[..., None], value: Callable[[Any, Any], Any], rank: Any) -> None:
        """Deal the block's (or, in a cluster, the group's) outputs to threads: neighbours write neighbouring rows."""
        per_tile = self.rows.per_tile
        rows = self.tactic.rows // TILE * per_tile
        count, threads = self.shape.tokens * rows, self.tactic.threads * self.tactic.splits
        for i in range(ceil_div(count, threads)):
            raw = self.thread + rank * self.tactic.threads + i * threads
            index = min(raw, count - 1)
            token, row = index // rows, index % rows
            inside = (raw < count) & (self.rows.first + row < self.rows.last)
            tile_row = row // per_tile * TILE + row % per_tile
            emit(token, self.rows.first + row, lambda half, t=token, r=tile_row: value(t, r + half * (TILE // 2)), inside)


@cute.jit
def _copy(block: Any, p: cutlass.Constexpr, x: Any, steps: cutlass.Constexpr):
    for j in cutlass.range(0, steps, unroll=1):
        _copy_step(block, p, x, j)


@cute.jit
def _turns(block: Any, acc: Any, p: cutlass.Constexpr, turns: cutlass.Constexpr):
    """`turns` times the `ahead` steps of the ring. A loop, not straight code: between two launches of this kernel a layer's other
    kernels and weights push its code out of the caches, and straight code would wait for memory line by line."""
    for turn in cutlass.range(0, turns, unroll=1):
        _once_around(block, acc, p, turn)


def _copy_step(block: Block, p: int, x: Any, j: Any) -> None:
    column, wanted = block.columns(p, j)
    for token, chunk, inside in block.pieces():
        source = x.iterator + (token * x.stride[0] + column + chunk * 8)
        copy_async(block.target(p, j, token, chunk), source, wanted, inside)


def _once_around(block: Block, acc: Any, p: int, turn: Any) -> None:
    ahead = block.shape.ahead
    for i in range(ahead):
        j = turn * ahead + i
        block.step(acc, p, j, (block.first_step(p) + i) % ahead, (p, j + ahead))


def load_eight(x: Any, token: Any, column: Any) -> list[Any]:
    """Eight neighbouring values of x [T, columns], bf16 or fp32, as fp32."""
    pointer = x.iterator + (token * x.stride[0] + column)
    if x.element_type is BFloat16:
        return [value for word in load_words(pointer) for value in unpack_bf16(word)]
    return [word.bitcast(Float32) for half in (0, 4) for word in load_words(pointer + half)]


class Smem:
    """Shared memory of a block: the activation, or stages, and, once they are used up, in their place the warps' partial sums;
    sums of squares for a norm; a ring's barriers (full, then empty)."""

    def __init__(self, shape: Shape) -> None:
        allocator, tactic = SmemAllocator(), shape.tactic
        both = allocator.allocate_array(Float32, shape.shared_floats, byte_alignment=128)
        self.activation = cute.recast_ptr(both, dtype=BFloat16)
        self.partials = cute.make_tensor(both, cute.make_layout(shape.partial_floats * tactic.k_warps))
        self.squares = allocator.allocate_tensor(Float32, cute.make_layout(64 * tactic.k_warps), byte_alignment=16)
        if tactic.chunk:
            self.barriers = allocator.allocate_array(Int64, 2 * tactic.stages, byte_alignment=8)


def min_int(a: int, b: int) -> int:
    return a if a < b else b


def max_int(a: int, b: int) -> int:
    return a if a > b else b
