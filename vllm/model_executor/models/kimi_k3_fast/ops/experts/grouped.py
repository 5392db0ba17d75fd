"""MXFP4 experts for pairs grouped by expert: an expert's weights are the 16-row operand of mma.sync m16n8k16, up to 8 of its
tokens the other.

Which expert is read is known only after the dependency wait, so no weight can be fetched before it, and all depends on bytes
in flight. Bulk copies into a ring of shared-memory stages keep them there, across tiles and experts:
    w13  a block walks over neighbouring (expert, tile) items. Four warps fetch, as far ahead as the ring allows; the others
         share a tile's columns, and two of them in turn add the parts and apply SiTU while the rest goes on.
    w2   a block owns a few rows of the output for all tokens. Every warp fetches and multiplies its own experts and adds into
         its own fp32 sums in shared memory; at the end the warps' sums are added in order. No partial products in memory, no
         atomics.

All 16 columns of an instruction are of one scale group, so the scale is applied to the four fp32 sums and costs nothing per
value: 2^(s - 127) for the codes 1..254, 0 for 0, infinity for 255. How values are decoded, and how activations become fp16:
`common`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ..device.ptx import load_shared, store_shared
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from .common import (
    SHIFT,
    bulk,
    byte,
    clear,
    decode,
    init_barriers,
    list_groups,
    load_row,
    mma,
    read_scale,
    read_word,
    situ,
    span,
    store_half,
    write_sums,
)
from .layout import GROUP, TILE, GroupedFirst, GroupedSecond

FETCHERS = 4  # fetching warps of w13: a bulk copy takes its addresses from uniform registers, so a warp issues one at a time


# -- multiplying ----------------------------------------


@dataclass
class Rows:
    """A lane's part in 16 weight rows: pointers to its bytes of group 0, and to the scales, in its rows g and g + 8."""

    codes: tuple[Any, Any]
    scales: tuple[Any, Any]

    def read(self, group: int) -> tuple[list[Any], list[Any]]:
        """Words and factors of one scale group."""
        words = [read_word(pointer + group * (GROUP // 2)) for pointer in self.codes]
        return words, [read_scale(pointer + group) for pointer in self.scales]


def _product(tiles: list[Rows], token: Any, groups: int, together: int) -> list[list[Any]]:
    """acc[tile] = weights times activations, four fp32 a lane. token: pointer to this lane's activations of group 0.

    `together` groups of all tiles are multiplied at a time, so that chains of dependent instructions overlap, and the next ones
    are read meanwhile.
    """

    def read(first: int) -> list[tuple[int, Any, Any, Any]]:
        found = []
        for group in range(first, min(first + together, groups)):
            columns = list(load_shared(token + group * 64))
            found += [(index, *tile.read(group), columns) for index, tile in enumerate(tiles)]
        return found

    acc = [[Float32(0.0)] * 4 for _ in tiles]
    ahead = read(0)
    for first in range(0, groups, together):
        now, ahead = ahead, read(first + together)
        decoded = [[decode(word) for word in words] for _, words, _, _ in now]
        parts = [[Float32(0.0)] * 4 for _ in now]
        for half in (0, 2):
            for i, (lower, upper) in enumerate(decoded):
                a = [lower[half], upper[half], lower[half + 1], upper[half + 1]]
                parts[i] = mma(a, now[i][3][half : half + 2], parts[i])
        for (index, _, (low, high), _), part in zip(now, parts, strict=True):
            factors = (low, low, high, high)
            acc[index] = [total + value * f for total, value, f in zip(acc[index], part, factors, strict=True)]
    return acc


# -- w13 ----------------------------------------


@cute.jit
def _load_tokens(c: cutlass.Constexpr, first: Any, count: Any, routes: Any, z: Any, tokens: Any, factors: Any):
    """Rows of z: the first `count` ones, or those of the pairs from `first` on; a warp takes every c.split-th."""
    layout = GroupedFirst(c.hidden, c.slots, c.split)
    for slot in range(cute.arch.warp_idx(), count, c.split):
        row = Int32(slot)
        if cutlass.const_expr(c.gathered):
            row = routes[1][first + slot] // c.top_k
        load_row(c.hidden, z.iterator + row * c.hidden, tokens + slot * layout.token, factors + slot * 4)


@cute.jit
def _fetch_w13(c: cutlass.Constexpr, codes: Any, scales: Any, routes: Any, stages: Any, barriers: Any, first: Any, last: Any):
    """A fetching warp: four lanes copy a weight row each; of two warps one more lane copies the scales of eight rows."""
    layout = GroupedFirst(c.hidden, c.slots, c.split)
    tiles = cutlass.const_expr(c.width // 8)
    lane = cute.arch.lane_idx()
    own = cute.arch.warp_idx() - c.split
    row, half = own * 4 + lane % 4, own // 2  # this lane's row of the stage, and whether gate or up
    loads_scales = own % 2 == 0
    expected = 4 * layout.row
    if loads_scales:
        expected += 8 * layout.scale_row
    step = Int32(0)
    for base in range(first, last, 32):
        entry = cutlass.min(base + lane, last - 1) // tiles
        expert = Int32(routes[2][entry])  # of 32 items at once, so that the next one never waits for its own
        passes = Int32(1)
        if cutlass.const_expr(c.gathered):
            start, end = span(routes, expert)
            passes = (end - start + (c.slots - 1)) // c.slots
        for index in range(cutlass.min(32, last - base)):
            gate = cute.arch.shuffle_sync(expert, index) * (2 * c.width) + (base + index) % tiles * 8
            gate = cute.arch.make_warp_uniform(gate) + half * c.width
            source = byte(codes, gate + row % 8, layout.row)
            scale = byte(scales, gate, layout.scale_row)
            for _ in range(cute.arch.shuffle_sync(passes, index)):
                place = step % c.stages
                stage, full = stages + place * layout.stage, barriers + place
                cute.arch.mbarrier_wait(full + c.stages, (step // c.stages & 1) ^ 1)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, expected)
                cute.arch.sync_warp()
                bulk(stage + row * layout.pitch, source, layout.row, full, lane < 4)
                part = stage + (layout.scales + half * (8 * layout.scale_row))
                bulk(part, scale, 8 * layout.scale_row, full, (lane == 0) & loads_scales)
                step += 1


def _product_w13(c: Any, stage: Any, tokens: Any, count: Any) -> list[Any]:
    """This warp's columns of a tile times the tokens, four fp32 a lane."""
    layout = GroupedFirst(c.hidden, c.slots, c.split)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    row, quad = lane // 4, lane % 4
    groups = c.hidden // GROUP // c.split
    codes = stage + (row * layout.pitch + warp * (groups * 16) + quad * 4)
    scales = stage + (layout.scales + row * layout.scale_row + warp * groups)
    token = tokens + (cutlass.min(row, count - 1) * layout.token + warp * (groups * 64) + quad * 16)
    rows = Rows((codes, codes + 8 * layout.pitch), (scales, scales + 8 * layout.scale_row))
    return _product([rows], token, groups, together=2)[0]


@cute.jit
def _finish_w13(
    c: cutlass.Constexpr, sums: Any, factors: Any, routes: Any, hidden: Any, tile: Any, start: Any, count: Any, thread: Any
):
    """One of 64 threads: add the warps' parts of one gate and one up value, and store SiTU of them in column pairs."""
    member, output = thread // 8, thread % 8
    if member < count:
        pair = routes[1][start + member]
        column = Int32(member)
        if cutlass.const_expr(not c.gathered):
            column = pair // c.top_k
        source = sums + ((output * 4 + column // 2) * 16 + column % 2 * 4)
        total = [Float32(0.0), Float32(0.0)]
        for part in cutlass.range_constexpr(c.split):
            for half in cutlass.range_constexpr(2):
                total[half] = total[half] + read_word(source + (part * 512 + half * 8)).bitcast(Float32)
        undo = read_word(factors + column * 4).bitcast(Float32)
        value = situ(total[0] * undo, total[1] * undo, c.beta, c.linear_beta)
        place = tile * 8 + (output % 4) * 2 + output // 4
        store_half(hidden.iterator + (pair * c.width + place), value * Float32(2.0**c.hidden_shift))


@cute.jit
def _consume_w13(
    c: cutlass.Constexpr,
    routes: Any,
    z: Any,
    hidden: Any,
    live: Any,
    stages: Any,
    barriers: Any,
    tokens: Any,
    sums: Any,
    factors: Any,
    first: Any,
    last: Any,
):
    """The multiplying warps."""
    layout = GroupedFirst(c.hidden, c.slots, c.split)
    tiles = cutlass.const_expr(c.width // 8)
    threads = cutlass.const_expr(32 * c.split)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    if cutlass.const_expr(not c.gathered):
        _load_tokens(c, Int32(0), live, routes, z, tokens, factors)
        cute.arch.barrier(barrier_id=1, number_of_threads=threads)
    step, loaded, known = Int32(0), Int32(-1), Int32(-1)
    start, end = Int32(0), Int32(1)
    for item in range(first, last):
        entry = item // tiles
        if entry != known:
            start, end = span(routes, routes[2][entry])
            known = entry
        for begin in range(start, end, c.slots):  # more than one pass only where an expert has many tokens
            count = cutlass.min(end - begin, c.slots)
            if cutlass.const_expr(c.gathered):  # noqa: SIM102 - one is of the trace, one of the kernel
                if begin != loaded:
                    cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # the last tile has been finished
                    _load_tokens(c, begin, count, routes, z, tokens, factors)
                    cute.arch.barrier(barrier_id=1, number_of_threads=threads)
                    loaded = begin
            place = step % c.stages
            cute.arch.mbarrier_wait(barriers + place, step // c.stages & 1)
            columns = count if cutlass.const_expr(c.gathered) else live
            acc = _product_w13(c, stages + place * layout.stage, tokens, columns)
            half = sums + step % 2 * (c.split * 512)
            store_shared(half + (warp * 512 + lane * 16), [value.bitcast(Uint32) for value in acc])
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)  # parts are there, and the stage has been read
            if warp * 32 + lane == 0:
                cute.arch.mbarrier_arrive(barriers + c.stages + place)
            turn = step % (c.split // 2) * 2
            if warp // 2 * 2 == turn:
                _finish_w13(c, half, factors, routes, hidden, item % tiles, begin, count, (warp - turn) * 32 + lane)
            step += 1


@cute.jit
def _roles_w13(c: cutlass.Constexpr, codes: Any, scales: Any, z: Any, routes: Any, hidden: Any, live: Any, memory: Any):
    """Cut the items into even, neighbouring shares, and part the warps."""
    stages, barriers, tokens, sums, factors = memory
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    items = routes[3][0] * (c.width // 8)
    first, last = block * items // blocks, (block + 1) * items // blocks
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) >= c.split:
        _fetch_w13(c, codes, scales, routes, stages, barriers, first, last)
    elif first < last:
        _consume_w13(c, routes, z, hidden, live, stages, barriers, tokens, sums, factors, first, last)


def _memory_w13(c: Any) -> tuple:
    """Stages, barriers (full, then empty), token rows, partial sums, factors of the token rows."""
    layout = GroupedFirst(c.hidden, c.slots, c.split)
    allocator = SmemAllocator()
    stages = allocator.allocate(c.stages * layout.stage, byte_alignment=128)
    tokens = allocator.allocate(c.slots * layout.token, byte_alignment=128)
    sums = allocator.allocate(2 * c.split * 512, byte_alignment=128)
    factors = allocator.allocate(c.slots * 4, byte_alignment=16)
    barriers = allocator.allocate_array(Int64, 2 * c.stages, byte_alignment=8)
    init_barriers(barriers, 2 * c.stages, c.stages, FETCHERS)
    return stages, barriers, tokens, sums, factors


@cute.kernel
def _w13_grouped(
    codes: Static,
    scales: Static,
    z: Dynamic,
    offsets: Dynamic,
    pairs: Dynamic,
    active: Dynamic,
    num_active: Dynamic,
    hidden: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    memory = _memory_w13(c)
    token = dependency_wait()
    routes = (offsets.after(token), pairs.after(token), active.after(token), num_active.after(token))
    live = z.shape[0]  # padded rows are loaded too; no pair reads them
    _roles_w13(c, codes.early(), scales.early(), z.after(token), routes, hidden.after(token), live, memory)


# -- w2 ----------------------------------------


@cute.jit
def _fetch_w2(
    c: cutlass.Constexpr, codes: Any, scales: Any, hidden: Any, table: Any, entry: Any, begin: Any, stage: Any, barrier: Any
):
    """Start copying this block's rows of an entry's expert, and the hidden rows of its pairs from `begin` on."""
    experts, _, ends, pairs, _ = table
    layout = GroupedSecond(c.width, c.height, c.slots, c.padded)
    lane = cute.arch.lane_idx()
    block, _, _ = cute.arch.block_idx()
    count = cutlass.min(ends[entry] - begin, c.slots)
    row = experts[entry] * c.hidden + block * c.height
    offset = row * layout.scale_row % 16  # the scales of a few rows may start between 16-byte units
    size = (offset + c.height * layout.scale_row + 15) // 16 * 16
    if lane == 0:
        expected = c.height * layout.row + size + count * (2 * c.width)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
    cute.arch.sync_warp()
    if cutlass.const_expr(c.padded):
        bulk(stage + lane * layout.pitch, byte(codes, row + lane, layout.row), layout.row, barrier, lane < c.height)
    else:
        bulk(stage, byte(codes, row, layout.row), c.height * layout.row, barrier, lane == 0)
    bulk(stage + layout.scales, byte(scales, row, layout.scale_row) - offset, size, barrier, lane == 1)
    if lane < count:
        source = hidden.iterator + pairs[begin + lane] * c.width
        bulk(stage + (layout.tokens + lane * layout.token), source, 2 * c.width, barrier)


def _product_w2(c: Any, entry_row: Any, stage: Any, count: Any) -> list[list[Any]]:
    """The block's rows of one expert times up to 8 tokens: four fp32 a lane for every 16 rows."""
    layout = GroupedSecond(c.width, c.height, c.slots, c.padded)
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    token = stage + (layout.tokens + cutlass.min(row, count - 1) * layout.token + quad * 16)
    scales = stage + (layout.scales + entry_row * layout.scale_row % 16)
    tiles = []
    for tile in range(-(-c.height // TILE)):
        rows = [cutlass.min(tile * TILE + half * 8 + row, c.height - 1) for half in (0, 1)]
        codes = tuple(stage + (r * layout.pitch + quad * 4) for r in rows)
        tiles.append(Rows(codes, tuple(scales + r * layout.scale_row for r in rows)))
    return _product(tiles, token, c.width // GROUP, together=2 if len(tiles) == 1 else 1)


@cute.jit
def _add(c: cutlass.Constexpr, acc: Any, table: Any, begin: Any, count: Any, sums: Any):
    """sums[token, row] += weight * product, for the pairs from `begin` on. sums: this warp's own."""
    pairs, factors = table[3], table[4]
    lane = cute.arch.lane_idx()
    for column in cutlass.range_constexpr(2):
        member = lane % 4 * 2 + column
        if member < count:
            weight = factors[begin + member] * Float32(2.0 ** (SHIFT - c.hidden_shift))
            base = pairs[begin + member] // c.top_k * c.height
            for tile in cutlass.range_constexpr(len(acc)):
                for half in cutlass.range_constexpr(2):
                    row = tile * TILE + half * 8 + lane // 4
                    if row < c.height:
                        sums[base + row] = sums[base + row] + acc[tile][2 * half + column] * weight


@cute.jit
def _stream_w2(
    c: cutlass.Constexpr, codes: Any, scales: Any, hidden: Any, table: Any, entries: Any, stages: Any, barriers: Any, sums: Any
):
    """One warp: every c.warps-th entry, c.depth of them on their way at a time."""
    experts, starts, ends, _, _ = table
    layout = GroupedSecond(c.width, c.height, c.slots, c.padded)
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    ahead, begin = Int32(warp), Int32(0)  # what is fetched next
    if ahead < entries:
        begin = starts[ahead]
    for turn in cutlass.range_constexpr(c.depth):
        if ahead < entries:
            _fetch_w2(c, codes, scales, hidden, table, ahead, begin, stages + turn * layout.stage, barriers + turn)
            begin += c.slots
            if begin >= ends[ahead]:
                ahead += c.warps
                if ahead < entries:
                    begin = starts[ahead]
    step = Int32(0)
    for entry in range(warp, entries, c.warps):
        end = ends[entry]
        for now in range(starts[entry], end, c.slots):
            place = step % c.depth
            stage = stages + place * layout.stage
            cute.arch.mbarrier_wait(barriers + place, step // c.depth & 1)
            count = cutlass.min(end - now, c.slots)
            acc = _product_w2(c, experts[entry] * c.hidden + block * c.height, stage, count)
            cute.arch.sync_warp()  # every lane has read the stage
            if ahead < entries:
                _fetch_w2(c, codes, scales, hidden, table, ahead, begin, stage, barriers + place)
                begin += c.slots
                if begin >= ends[ahead]:
                    ahead += c.warps
                    if ahead < entries:
                        begin = starts[ahead]
            _add(c, acc, table, now, count, sums)
            step += 1


def _memory_w2(c: Any) -> tuple:
    """Stages of this warp, its barriers, the table, all sums (set to zero)."""
    layout = GroupedSecond(c.width, c.height, c.slots, c.padded)
    allocator = SmemAllocator()
    warp = cute.arch.warp_idx()
    stages = allocator.allocate(c.warps * c.depth * layout.stage, byte_alignment=128) + warp * (c.depth * layout.stage)

    def numbers(dtype: Any, count: int) -> Any:
        return allocator.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    entries = [numbers(Int32, c.entries) for _ in range(3)]
    table = (*entries, numbers(Int32, c.rows * c.top_k), numbers(Float32, c.rows * c.top_k))
    sums = numbers(Float32, c.warps * c.rows * c.height)
    barriers = allocator.allocate_array(Int64, c.warps * c.depth, byte_alignment=8)
    clear(sums, c.warps * c.rows * c.height, 32 * c.warps, -1)
    init_barriers(barriers, c.warps * c.depth, 0, 1)
    return stages, barriers + warp * c.depth, table, sums


def _w2(c: Any, codes: Any, scales: Any, hidden: Any, routes: tuple, weights: Any, out: Any, memory: tuple) -> None:
    stages, barriers, table, sums = memory
    entries = routes[3][0]
    list_groups(c, routes, weights, entries, table)
    cute.arch.sync_threads()
    size = c.rows * c.height
    own = cute.make_tensor(sums.iterator + cute.arch.warp_idx() * size, cute.make_layout(size))
    _stream_w2(c, codes, scales, hidden, table, entries, stages, barriers, own)
    cute.arch.sync_threads()
    write_sums(c, sums, out, -1)


@cute.kernel
def _w2_grouped(
    codes: Static,
    scales: Static,
    hidden: Dynamic,
    offsets: Dynamic,
    pairs: Dynamic,
    active: Dynamic,
    num_active: Dynamic,
    weights: Dynamic,
    out: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    memory = _memory_w2(c)
    token = dependency_wait()
    routes = (offsets.after(token), pairs.after(token), active.after(token), num_active.after(token))
    _w2(c, codes.early(), scales.early(), hidden.after(token), routes, weights.after(token), out.after(token), memory)


# -- entries ----------------------------------------


def mxfp4_w13_grouped(config, codes, scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See the module head."""
    grid, block = [config.grid, 1, 1], [32 * (config.split + FETCHERS), 1, 1]
    kernel = _w13_grouped(codes, scales, z, offsets, pairs, active, num_active, hidden, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w2_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, weights, out, stream):
    """See the module head."""
    grid, block = [config.hidden // config.height, 1, 1], [32 * config.warps, 1, 1]
    kernel = _w2_grouped(codes, scales, hidden, offsets, pairs, active, num_active, weights, out, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)
