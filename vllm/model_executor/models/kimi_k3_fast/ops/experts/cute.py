"""MXFP4 experts for pairs that are not grouped, on the tensor cores (mma.sync m16n8k16): weights are the 16-row operand, the
pair's token the other. Every (token, slot) pair is an entry of its own, and a pair's number is its entry's.

Which expert is read is known only after the dependency wait, so no weight can be fetched before it, and all depends on bytes
in flight. Bulk copies into a ring of shared-memory stages keep them there, across tiles and experts:
    w13  a block walks over neighbouring (entry, tile) items. One warp fetches, as far ahead as the ring allows. Teams of warps
         take the items in turn; the warps of a team share a tile's columns, and each in turn adds the parts and applies SiTU
         while the others go on. When its own copies are under way, the fetching warp asks L2 for the first weights of w2, whose
         experts are the same: memory does not pause between the kernels.
    w2   a block owns a few rows of the output for all tokens. Every warp fetches and multiplies its own entries and adds into
         its own fp32 sums in shared memory; at the end the warps' sums are added in order. No partial products in memory, no
         atomics.

A round is 128 columns, four scale groups. A lane reads one group of its row, 16 bytes, in the order of memory. So the four lanes
of a row hold different groups in one instruction, whose sum over columns would mix their scales: the token operand is therefore
zero where lane and column differ, and column n of the product is group n mod 4 alone; columns 4 to 7 repeat 0 to 3. One round is
eight instructions for 16 rows, the scales are applied to its sums in fp32 (2^(s - 127) for the codes 1..254, 0 for 0, infinity
for 255), and every read of shared memory is 16 bytes wide. How values are decoded, and how activations become fp16: `common`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import load_shared, store_shared
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from .common import (
    SHIFT,
    ask_for_w2,
    bulk,
    byte,
    clear,
    decode,
    init_barriers,
    launch,
    list_pairs,
    load_row,
    mma,
    of_pair,
    read_scale,
    read_word,
    situ,
    store_half,
    write_sums,
)
from .layout import GROUP, ROUND, TILE, First, Second

# -- multiplying ----------------------------------------


def _store_f32(address: Any, value: Any, predicate: Any) -> None:
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=predicate)


def _operand(token_a: Any, token_b: Any, zeros: Any) -> tuple[Any, Any]:
    """(address, bytes from round to round) of this lane's part in the token operand: its group of a token row, or zeros."""
    lane = cute.arch.lane_idx()
    column, quad = lane // 4, lane % 4
    own = column % 4 == quad
    token = Int32(select_(column < 4, token_a, token_b)) + quad * (2 * GROUP)
    return Int32(select_(own, token, zeros)), Int32(select_(own, Int32(2 * ROUND), Int32(0)))


def _read_codes(found: Any, rows: tuple, turn: Any) -> None:
    """Four words of a lane's two rows in every tile."""
    for index, (low, high, _, _) in enumerate(rows):
        for half, address in enumerate((low, high)):
            for i, word in enumerate(load_shared(address + turn * (ROUND // 2))):
                found[index * 8 + half * 4 + i] = word


def _round(acc: Any, ahead: Any, rows: tuple, operand: tuple, groups: int, zeros: Any, chains: int, turn: Any) -> None:
    """One round of `_multiply`, whose weights `ahead` holds; it then holds the next round's."""
    lane, tiles, rounds = cute.arch.lane_idx(), len(rows), -(-groups // 4)
    ragged = groups % 4 != 0
    words = [ahead[i] for i in range(tiles * 8)]
    source = operand[0] + turn * operand[1]
    if ragged:
        source = Int32(select_(turn * 4 + lane % 4 < groups, source, zeros))
    columns = [load_shared(source + 16 * i) for i in range(4)]
    factors = []
    for _, _, low, high in rows:
        for address in (low, high):
            for i in range(2):
                factor = read_scale(address + (turn * 4 + i))
                if ragged:
                    factor = Float32(select_(turn * 4 + lane % 2 * 2 + i < groups, factor, Float32(0.0)))
                factors.append(factor)
    _read_codes(ahead, rows, cutlass.min(turn + 1, rounds - 1))
    parts = [[[Float32(0.0)] * 4 for _ in range(chains)] for _ in range(tiles)]
    for word in range(4):
        chain = word % chains
        for tile in range(tiles):
            lower, upper = (decode(words[tile * 8 + half * 4 + word]) for half in (0, 1))
            for i in (0, 2):
                a = [lower[i], upper[i], lower[i + 1], upper[i + 1]]
                parts[tile][chain] = mma(a, list(columns[word][i : i + 2]), parts[tile][chain])
    for tile in range(tiles):
        total = parts[tile][0]
        for other in parts[tile][1:]:
            total = [a + b for a, b in zip(total, other, strict=True)]
        for half in range(2):
            for i in range(2):
                acc[tile * 2 + half] = acc[tile * 2 + half] + total[half * 2 + i] * factors[tile * 4 + half * 2 + i]


@cute.jit
def _multiply(
    acc: Any, rows: Any, operand: Any, groups: cutlass.Constexpr, zeros: Any, tiles: cutlass.Constexpr, chains: cutlass.Constexpr
):
    """acc[2 tile + half] = this lane's rows g and g + 8 of every tile times a token, summed over its two groups of every round.

    rows: for every tile the shared-memory addresses of the lane's group of codes in its two rows, and of its two columns' scales.
    groups: scale groups of a row; where the last round is not full its missing groups count nothing.
    """
    acc.fill(0.0)
    ahead = cute.make_rmem_tensor(tiles * 8, Uint32)
    _read_codes(ahead, rows, Int32(0))
    for turn in cutlass.range(-(-groups // 4), unroll=1):
        _round(acc, ahead, rows, operand, groups, zeros, chains, turn)
    for i in cutlass.range_constexpr(tiles * 2):
        acc[i] = acc[i] + cute.arch.shuffle_sync_bfly(acc[i], offset=1)  # the token's other two groups


@cute.jit
def _zeros(memory: Any) -> Any:
    """Shared-memory address of 64 zero bytes, 32 modulo 128, where no lane's part of a token lies. memory: 128 bytes."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < 8:
        store_shared(memory + thread * 16, (Uint32(0), Uint32(0), Uint32(0), Uint32(0)))


# -- w13 ----------------------------------------


def _layout_w13(c: Any) -> First:
    return First(c.hidden, c.split, c.teams)


@cute.jit
def _load_part(c: cutlass.Constexpr, token: Any, z: Any, tokens: Any, factors: Any, part: Any):
    """This warp's columns of a row of z. Only this warp reads them, so no barrier."""
    cute.arch.sync_warp()
    columns = cutlass.const_expr(c.hidden // c.split)
    load_row(columns, z.iterator + (token * c.hidden + part * columns), tokens + part * (2 * columns), factors + part * 4)
    cute.arch.sync_warp()


@cute.jit
def _fetch_w13(c: cutlass.Constexpr, codes: Any, scales: Any, ids: Any, stages: Any, barriers: Any, first: Any, last: Any):
    """The fetching warp: for every tile two lanes copy gate and up rows, two more their scales."""
    layout = _layout_w13(c)
    tiles = cutlass.const_expr(c.width // 8)
    lane = cute.arch.lane_idx()
    half = lane % 2
    code_place = half * layout.up
    scale_place = layout.scales + half * (layout.up_scales - layout.scales)
    step = Int32(0)
    for base in range(first, last, 32):
        entry = cutlass.min(base + lane, last - 1) // tiles
        expert = Int32(of_pair(c, ids, entry))  # of 32 items at once, so that the next one never waits for its own
        for index in cutlass.range(cutlass.min(32, last - base), unroll=1):
            row = cute.arch.shuffle_sync(expert, index) * (2 * c.width) + (base + index) % tiles * 8 + half * c.width
            place = step % c.stages
            stage, full = stages + place * layout.stage, barriers + place
            cute.arch.mbarrier_wait(full + c.stages, (step // c.stages & 1) ^ 1)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, 16 * (layout.row + layout.scale_row))
            cute.arch.sync_warp()
            bulk(stage + code_place, byte(codes, row, layout.row), 8 * layout.row, full, lane < 2)
            scale = byte(scales, row, layout.scale_row)
            bulk(stage + scale_place, scale, 8 * layout.scale_row, full, (lane >= 2) & (lane < 4))
            step += 1


@cute.jit
def _finish_w13(c: cutlass.Constexpr, sums: Any, hidden: Any, tile: Any, entry: Any):
    """One warp: add the team's parts and store SiTU of gate and up in column pairs. sums [split, 16] fp32."""
    row = cute.arch.lane_idx() % 16
    total = Float32(0.0)
    for part in cutlass.range_constexpr(c.split):
        total = total + read_word(sums + (part * 64 + row * 4)).bitcast(Float32)
    up = cute.arch.shuffle_sync_bfly(total, offset=1)
    if (row % 2 == 0) & (cute.arch.lane_idx() < 16):
        value = situ(total, up, c.beta, c.linear_beta)
        place = tile * 8 + row % 8 + row // 8  # output row // 8 * 4 + row % 8 // 2, in the order of column pairs
        store_half(hidden.iterator + (entry * c.width + place), value * Float32(2.0**c.hidden_shift))


@cute.jit
def _consume_w13(
    c: cutlass.Constexpr, z: Any, hidden: Any, stages: Any, barriers: Any, memory: Any, zeros: Any, first: Any, last: Any
):
    """A multiplying warp: its part of the columns of every tile that is its team's turn.

    An entry is written as a span of pairs, and its tokens two at a time, though a pair is one of each: written with no more than
    a pair needs, ptxas keeps the round to 55 registers instead of 96 and reads the scales behind the products. This is the form
    that was measured.
    """
    layout = _layout_w13(c)
    tiles = cutlass.const_expr(c.width // 8)
    rounds = cutlass.const_expr(c.hidden // ROUND // c.split)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    team, part = warp // c.split, warp % c.split
    tokens, sums, factors = memory
    tokens = tokens + team * layout.token
    sums = sums + team * layout.sums
    factors = factors + team * (c.split * 4)
    # Rows g and g + 8 of a tile: gate rows where g is even, up rows where it is odd.
    row, quad = lane // 4, lane % 4
    code_place = row % 2 * layout.up + row // 2 * layout.row + part * (rounds * (ROUND // 2)) + quad * 16
    scale_place = layout.scales + row % 2 * (layout.up_scales - layout.scales) + row // 2 * layout.scale_row
    scale_place = scale_place + part * (rounds * 4) + quad % 2 * 2
    acc = cute.make_rmem_tensor(2, Float32)
    step, loaded, known, products = Int32(0), Int32(-1), Int32(-1), Int32(0)
    start, end = Int32(0), Int32(1)
    for item in range(first, last):
        entry = item // tiles
        if entry != known:
            start, end = entry, entry + 1
            known = entry
        for begin in range(start, end):
            if step % c.teams == team:
                if begin != loaded:
                    _load_part(c, begin // c.top_k, z, tokens, factors, part)
                    loaded = begin
                place = step % c.stages
                cute.arch.mbarrier_wait(barriers + place, step // c.stages & 1)
                stage = (stages + place * layout.stage).toint()
                code, scale = stage + code_place, stage + scale_place
                rows = ((code, code + 4 * layout.row, scale, scale + 4 * layout.scale_row),)
                count = cutlass.min(end - begin, 1)
                for member in range(0, count, 2):
                    other = cutlass.min(member + 1, count - 1)
                    own = tokens.toint() + part * (rounds * (2 * ROUND))
                    operand = _operand(own + member * layout.token, own + other * layout.token, zeros)
                    _multiply(acc, rows, operand, rounds * 4, zeros, 1, 2)
                    of = Int32(select_(quad < 2, member, other))
                    undo = read_word(factors + (of * c.split + part) * 4).bitcast(Float32)
                    half = sums + products % 2 * (c.split * 64)
                    target = half.toint() + (part * 64 + row * 4)
                    _store_f32(target, acc[0] * undo, quad == 0)
                    _store_f32(target + 32, acc[1] * undo, quad == 0)
                    cute.arch.barrier(barrier_id=1 + team, number_of_threads=32 * c.split)
                    if part == products % c.split:
                        _finish_w13(c, half, hidden, item % tiles, begin)
                    products += 1
                if (part == 0) & (lane == 0):  # behind the team's barrier: all its warps have read the stage
                    cute.arch.mbarrier_arrive(barriers + c.stages + place)
            step += 1


@cute.jit
def _roles_w13(c: cutlass.Constexpr, weights: Any, z: Any, ids: Any, num_tokens: Any, hidden: Any, memory: Any):
    """Cut the items into even, neighbouring shares, and part the warps."""
    codes, scales, next_codes, next_scales = weights
    stages, barriers, zeros, *rest = memory
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    entries = num_tokens[0] * c.top_k
    items = entries * (c.width // 8)
    first, last = block * items // blocks, (block + 1) * items // blocks
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == c.split * c.teams:
        _fetch_w13(c, codes, scales, ids, stages, barriers, first, last)
        if cutlass.const_expr(c.ahead > 0):
            ask_for_w2(c, next_codes.iterator, next_scales.iterator, c.hidden * c.width, ids, entries)
    else:
        _consume_w13(c, z, hidden, stages, barriers, tuple(rest), zeros.toint() + 32, first, last)


def _memory_w13(c: Any) -> tuple:
    """Stages, barriers (full, then empty), zeros, token rows, partial sums, factors of the token rows' parts."""
    layout = _layout_w13(c)
    allocator = SmemAllocator()
    stages = allocator.allocate(c.stages * layout.stage, byte_alignment=128)
    tokens = allocator.allocate(c.teams * layout.token, byte_alignment=128)
    sums = allocator.allocate(c.teams * layout.sums, byte_alignment=128)
    zeros = allocator.allocate(128, byte_alignment=128)
    factors = allocator.allocate(c.teams * c.split * 4, byte_alignment=16)
    barriers = allocator.allocate_array(Int64, 2 * c.stages, byte_alignment=8)
    _zeros(zeros)
    init_barriers(barriers, 2 * c.stages, 0, 1)
    return stages, barriers, zeros, tokens, sums, factors


@cute.kernel
def _w13_pairs(
    codes: Static,
    scales: Static,
    next_codes: Static,
    next_scales: Static,
    z: Dynamic,
    ids: Dynamic,
    num_tokens: Dynamic,
    hidden: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    memory = _memory_w13(c)
    token = dependency_wait()
    weights = (codes.early(), scales.early(), next_codes.early(), next_scales.early())
    _roles_w13(c, weights, z.after(token), ids.after(token), num_tokens.after(token), hidden.after(token), memory)


# -- w2 ----------------------------------------


@cute.jit
def _fetch_w2(c: cutlass.Constexpr, codes: Any, scales: Any, hidden: Any, expert: Any, entry: Any, stage: Any, barrier: Any):
    """Start copying this block's rows of an entry's expert, and its hidden row."""
    layout = Second(c.width, c.height)
    lane = cute.arch.lane_idx()
    block, _, _ = cute.arch.block_idx()
    row = expert * c.hidden + block * c.height
    offset = row * layout.scale_row % 16  # the scales of a few rows may start between 16-byte units
    size = (offset + c.height * layout.scale_row + 15) // 16 * 16
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, c.height * layout.row + size + 2 * c.width)
    cute.arch.sync_warp()
    bulk(stage, byte(codes, row, layout.row), c.height * layout.row, barrier, lane == 0)
    bulk(stage + layout.scales, byte(scales, row, layout.scale_row) - offset, size, barrier, lane == 1)
    bulk(stage + layout.token, hidden.iterator + entry * c.width, 2 * c.width, barrier, lane == 2)


def _rows_w2(c: Any, scale_offset: Any, stage: Any) -> tuple:
    """Where this lane's two rows of each tile are in a stage; the last tile repeats the last row. stage: an address."""
    layout = Second(c.width, c.height)
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    scales = stage + (layout.scales + scale_offset + quad % 2 * 2)
    rows = []
    for tile in range(-(-c.height // TILE)):
        low, high = (cutlass.min(tile * TILE + half * 8 + row, c.height - 1) for half in (0, 1))
        codes = tuple(stage + (r * layout.row + quad * 16) for r in (low, high))
        rows.append((*codes, *(scales + r * layout.scale_row for r in (low, high))))
    return tuple(rows)


@cute.jit
def _add(c: cutlass.Constexpr, acc: Any, factor: Any, token: Any, sums: Any):
    """sums[token, row] += weight * product. sums: this warp's own."""
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    weight = factor * Float32(2.0 ** (SHIFT - c.hidden_shift))
    base = token * c.height
    if quad == 0:
        for tile in cutlass.range_constexpr(-(-c.height // TILE)):
            for half in cutlass.range_constexpr(2):
                at = tile * TILE + half * 8 + row
                if at < c.height:
                    sums[base + at] = sums[base + at] + acc[tile * 2 + half] * weight


@cute.jit
def _stream_w2(
    c: cutlass.Constexpr,
    codes: Any,
    scales: Any,
    hidden: Any,
    table: Any,
    entries: Any,
    stages: Any,
    barriers: Any,
    sums: Any,
    zeros: Any,
):
    """One warp: every c.warps-th entry, c.depth of them on their way at a time."""
    experts, factors = table
    layout = Second(c.width, c.height)
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    stages, barriers = stages + warp * (c.depth * layout.stage), barriers + warp * c.depth  # its own
    for turn in cutlass.range(c.depth, unroll=1):
        ahead = warp + turn * c.warps
        if ahead < entries:
            _fetch_w2(c, codes, scales, hidden, experts[ahead], ahead, stages + turn * layout.stage, barriers + turn)
    tiles = cutlass.const_expr(-(-c.height // TILE))
    acc = cute.make_rmem_tensor(2 * tiles, Float32)
    step = Int32(0)
    for entry in range(warp, entries, c.warps):
        place = step % c.depth
        stage = stages + place * layout.stage
        cute.arch.mbarrier_wait(barriers + place, step // c.depth & 1)
        offset = (experts[entry] * c.hidden + block * c.height) * layout.scale_row % 16
        rows = _rows_w2(c, offset, stage.toint())
        operand = _operand(stage.toint() + layout.token, stage.toint() + layout.token, zeros)
        _multiply(acc, rows, operand, c.width // GROUP, zeros, tiles, 2 if tiles == 1 else 1)
        _add(c, acc, factors[entry], entry // c.top_k, sums)
        cute.arch.sync_warp()  # every lane has read the stage
        ahead = entry + c.depth * c.warps
        if ahead < entries:
            _fetch_w2(c, codes, scales, hidden, experts[ahead], ahead, stage, barriers + place)
        step += 1


def _memory_w2(c: Any) -> tuple:
    """Stages and barriers of all warps, zeros, the table, all sums (set to zero)."""
    layout = Second(c.width, c.height)
    allocator = SmemAllocator()
    zeros = allocator.allocate(128, byte_alignment=128)
    stages = allocator.allocate(c.warps * c.depth * layout.stage, byte_alignment=128)

    def numbers(dtype: Any, count: int) -> Any:
        return allocator.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    table = (numbers(Int32, c.entries), numbers(Float32, c.entries))
    sums = numbers(Float32, c.warps * c.rows * c.height)
    barriers = allocator.allocate_array(Int64, c.warps * c.depth, byte_alignment=8)
    _zeros(zeros)
    clear(sums, c.warps * c.rows * c.height, 32 * c.warps, 1)
    init_barriers(barriers, c.warps * c.depth, 0, 1)
    return stages, barriers, zeros, table, sums


def _w2(c: Any, weights: tuple, hidden: Any, ids: Any, factors: Any, num_tokens: Any, out: Any, memory: tuple) -> None:
    stages, barriers, zeros, table, sums = memory
    entries = num_tokens[0] * c.top_k
    list_pairs(c, ids, factors, table)
    cute.arch.sync_threads()
    size = c.rows * c.height
    own = cute.make_tensor(sums.iterator + cute.arch.warp_idx() * size, cute.make_layout(size))
    _stream_w2(c, *weights, hidden, table, entries, stages, barriers, own, zeros.toint() + 32)
    cute.arch.sync_threads()
    write_sums(c, sums, out, 1)


@cute.kernel
def _w2_pairs(
    codes: Static,
    scales: Static,
    hidden: Dynamic,
    ids: Dynamic,
    weights: Dynamic,
    num_tokens: Dynamic,
    out: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    memory = _memory_w2(c)
    token = dependency_wait()
    static = (codes.early(), scales.early())
    factors = weights.after(token)
    _w2(c, static, hidden.after(token), ids.after(token), factors, num_tokens.after(token), out.after(token), memory)


# -- entries ----------------------------------------


def mxfp4_w13_pairs(config, codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, stream):
    """See the module head."""
    kernel = _w13_pairs(codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, config)
    launch(kernel, config.grid, config.split * config.teams + 1, stream)


def mxfp4_w2_pairs(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See the module head."""
    kernel = _w2_pairs(codes, scales, hidden, ids, weights, num_tokens, out, config)
    launch(kernel, config.hidden // config.height, config.warps, stream)
