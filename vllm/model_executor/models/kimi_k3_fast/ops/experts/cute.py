"""MXFP4 experts on the tensor cores (mma.sync m16n8k16): weights are the 16-row operand, tokens of one expert the other.

Which expert is read is known only after the dependency wait, so no weight can be fetched before it, and all depends on bytes
in flight. Bulk copies into a ring of shared-memory stages keep them there, across tiles and experts:
    w13  a block walks over neighbouring (expert, tile) items. One warp fetches, as far ahead as the ring allows. Teams of warps
         take the items in turn; the warps of a team share a tile's columns, and each in turn adds the parts and applies SiTU
         while the others go on. When its own copies are under way, the fetching warp asks L2 for the first weights of w2, whose
         experts are the same: memory does not pause between the kernels.
    w2   a block owns a few rows of the output for all tokens. Every warp fetches and multiplies its own experts and adds into
         its own fp32 sums in shared memory; at the end the warps' sums are added in order. No partial products in memory, no
         atomics.

A round is 128 columns, four scale groups. A lane reads one group of its row, 16 bytes, in the order of memory. So the four lanes
of a row hold different groups in one instruction, whose sum over columns would mix their scales: the token operand is therefore
zero where lane and column differ, and column n of the product is group n mod 4 alone, of one token for n < 4 and of another for
the rest. One round is eight instructions for 16 rows and two tokens, the scales are applied to its sums in fp32 (2^(s - 127) for
the codes 1..254, 0 for 0, infinity for 255), and every read of shared memory is 16 bytes wide.

One kernel may do both: `mxfp4_experts_pairs` has a block on every SM, which meet after w13. Each block's first weights of w2 are
by then in its shared memory, behind those of w13 in the order of copies.

Decoding is exact and is most of the instructions: the nibble s|eem placed at bits 15 and 11..9 of an fp16 is the value times
2^-14, subnormals included. Two steps serve four nibbles (select sign from the word, magnitude from its shift by three; then two
masks). A register so holds the columns (i, i + 4) of eight; activations are stored in that order.

Activations are fp16, which holds a bf16 exactly inside its range. Each warp's part of a row of z is brought into it by a power of
two, so that the largest value lies in [2^14, 2^15); the bounded hidden values by one constant (`hidden_shift`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import load_shared, prefetch_bytes, sigmoid, store_shared
from ..device.reduce import warp_max
from ..device.vectors import load_words, unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from .layout import GROUP, ROUND, TILE, First, Second

SHIFT = 14  # decoded weights are 2^-SHIFT times their value
ALL_WARPS = 15  # the named barrier of all multiplying warps; teams have 1 and up
POLLS = 1 << 23  # some seconds
PIECES, SCALE_PIECES = 64, 8  # parts in which an expert's w2 and its scales are asked into L2


# -- decoding and multiplying ----------------------------------------


def _select(mask: int, a: Any, b: Any) -> Any:
    """Bits of a where the mask is set, else of b."""
    return inline_ptx(f"lop3.b32 {{$w0}}, {mask:#x}, {{$r0}}, {{$r1}}, 0xCA;", write_only_types=[Uint32], read_only_args=[a, b])


def _decode(word: Any) -> list[Any]:
    """Eight nibbles to four fp16 pairs, times 2^-14: columns (0, 4), (1, 5), (2, 6), (3, 7)."""
    mask = Uint32(0x8E008E00)
    odd = _select(0x80808080, word, word >> 3)
    even = _select(0x80808080, word << 4, word << 1)
    return [(even << 8) & mask, (odd << 8) & mask, even & mask, odd & mask]


def _mma(a: list[Any], b: list[Any], acc: list[Any]) -> list[Any]:
    """a[16x16] b[16x8] + acc by one warp, fp16 in, fp32 out."""
    return list(
        inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )


def _read_word(address: Any) -> Any:
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def _read_scale(address: Any) -> Any:
    """2^(s - 127)."""
    code = inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])
    return (code << 23).bitcast(Float32)


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
                factor = _read_scale(address + (turn * 4 + i))
                if ragged:
                    factor = Float32(select_(turn * 4 + lane % 2 * 2 + i < groups, factor, Float32(0.0)))
                factors.append(factor)
    _read_codes(ahead, rows, cutlass.min(turn + 1, rounds - 1))
    parts = [[[Float32(0.0)] * 4 for _ in range(chains)] for _ in range(tiles)]
    for word in range(4):
        chain = word % chains
        for tile in range(tiles):
            lower, upper = (_decode(words[tile * 8 + half * 4 + word]) for half in (0, 1))
            for i in (0, 2):
                a = [lower[i], upper[i], lower[i + 1], upper[i + 1]]
                parts[tile][chain] = _mma(a, list(columns[word][i : i + 2]), parts[tile][chain])
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


# -- copies and barriers ----------------------------------------


def _bulk(target: Any, source: Any, size: Any, barrier: Any, predicate: Any = None) -> None:
    """Start copying `size` bytes (16-byte aligned, as both ends) into shared memory; they count on the barrier."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
        predicate=predicate,
    )


@cute.jit
def _init_barriers(barriers: Any, count: cutlass.Constexpr):
    """`count` barriers of one arrival, and a barrier for the block."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        cute.arch.mbarrier_init(barriers + thread, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def _zeros(memory: Any) -> Any:
    """Shared-memory address of 64 zero bytes, 32 modulo 128, where no lane's part of a token lies. memory: 128 bytes."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < 8:
        store_shared(memory + thread * 16, (Uint32(0), Uint32(0), Uint32(0), Uint32(0)))


def _byte(tensor: Any, row: Any, length: int) -> Any:
    """Pointer to a row of a byte tensor; 64 bits, since all experts of a layer may exceed 2 GiB."""
    return tensor.iterator + Int64(row) * length


def _store_half(pointer: Any, value: Any) -> None:
    """One value in fp16, saturated at its largest finite value; NaN stays NaN."""
    bounded = inline_ptx(
        "{ .reg .f32 a; min.NaN.f32 a, {$r0}, 0f477FE000; max.NaN.f32 {$w0}, a, 0fC77FE000; }",  # 65504
        write_only_types=[Float32],
        read_only_args=[value],
    )
    inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[pointer, bounded.to(Float16).bitcast(Uint16)])


# -- who goes where ----------------------------------------
# An entry is an expert with its pairs [start, end) of the sorted list; where pairs are not grouped, every pair is an entry.


def _entries(c: Any, routes: tuple) -> Any:
    return routes[3][0] if c.grouped else routes[1][0] * c.top_k


def _expert(c: Any, routes: tuple, entry: Any) -> Any:
    return routes[2][entry] if c.grouped else routes[0][entry // c.top_k, entry % c.top_k]


def _span(c: Any, routes: tuple, entry: Any, expert: Any) -> tuple[Any, Any]:
    return (routes[0][expert], routes[0][expert + 1]) if c.grouped else (entry, entry + 1)


def _pair(c: Any, routes: tuple, place: Any) -> Any:
    return routes[1][place] if c.grouped else place


# -- SiTU ----------------------------------------


def _tanh(x: Any) -> Any:
    """tanh to about 1e-6 of its value: 1 - 2 / (1 + e^2x) loses small values to cancellation, where x - x^3/3 is exact enough."""
    small = x * (Float32(1.0) - x * x * Float32(1.0 / 3.0))
    large = Float32(1.0) - Float32(2.0) / (Float32(1.0) + cute.math.exp(x + x))
    return inline_ptx(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, {$r0}; setp.lt.f32 p, a, 0f3CF5C28F; selp.f32 {$w0}, {$r1}, {$r2}, p; }",  # 0.03
        write_only_types=[Float32],
        read_only_args=[x, small, large],
    )


def _situ(gate: Any, up: Any, beta: float, linear_beta: float | None) -> Any:
    """b tanh(g / b) sigmoid(g) * (lb tanh(u / lb), or u where unbounded)."""
    bounded = up if linear_beta is None else Float32(linear_beta) * _tanh(up * Float32(1.0 / linear_beta))
    return Float32(beta) * _tanh(gate * Float32(1.0 / beta)) * sigmoid(gate) * bounded


# -- w13 ----------------------------------------


def _layout_w13(c: Any) -> First:
    return First(c.hidden, c.slots, c.split, c.teams)


def _load_part(c: Any, source: Any, target: Any, factor: Any) -> None:
    """One warp brings its part of a row of z into fp16, in column pairs; `factor` gets the power of two that undoes it and the
    weights' 2^-14.
    """
    lane = cute.arch.lane_idx()
    units = c.hidden // c.split // 8
    words = [load_words(source + cutlass.min(first + lane, units - 1) * 8) for first in range(0, units, 32)]
    largest = Float32(0.0)
    for four in words:
        for word in four:
            for value in unpack_bf16(word):
                largest = inline_ptx(
                    "{ .reg .f32 a; abs.f32 a, {$r0}; max.f32 {$w0}, a, {$r1}; }",
                    write_only_types=[Float32],
                    read_only_args=[value, largest],
                )
    largest = warp_max(largest)
    exponent = cutlass.max(largest.bitcast(Uint32) >> 23, Uint32(2 * SHIFT))  # biased; 255 where a value is not finite
    scale = ((Uint32(254 + SHIFT) - exponent) << 23).bitcast(Float32)  # 2^SHIFT / 2^(exponent - 127)
    undo = exponent << 23  # 2^(exponent - 127 - SHIFT) for the row, 2^SHIFT for the weights
    for turn, four in enumerate(words):
        unit = turn * 32 + lane
        values = []
        for word in four:
            values += [value * scale for value in unpack_bf16(word)]
        packed = []
        for i in range(4):  # the columns (i, i + 4), see _decode
            packed.append(
                inline_ptx(
                    "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};",
                    write_only_types=[Uint32],
                    read_only_args=[values[i + 4], values[i]],
                )
            )
        store_shared(target + unit * 16, packed, None if turn * 32 + 32 <= units else unit < units)
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[factor, undo], predicate=lane == 0)


@cute.jit
def _load_parts(c: cutlass.Constexpr, begin: Any, count: Any, routes: Any, z: Any, tokens: Any, factors: Any, part: Any):
    """This warp's columns of the rows of z of `count` pairs. Only this warp reads them, so no barrier."""
    cute.arch.sync_warp()
    columns = cutlass.const_expr(c.hidden // c.split)
    for slot in cutlass.range(count, unroll=1):
        token = _pair(c, routes, begin + slot) // c.top_k
        target = tokens + (slot * (2 * c.hidden) + part * (2 * columns))
        _load_part(c, z.iterator + (token * c.hidden + part * columns), target, factors + (slot * c.split + part) * 4)
    cute.arch.sync_warp()


@cute.jit
def _ask_for_w2(c: cutlass.Constexpr, codes: Any, scales: Any, routes: Any, entries: Any):
    """One warp of every block: this block's share of the first `c.ahead` experts of w2 into L2."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    each = cutlass.const_expr(PIECES + SCALE_PIECES)
    size = cutlass.const_expr(c.hidden * c.width // 2 // PIECES)
    scale_size = cutlass.const_expr(c.hidden * c.width // GROUP // SCALE_PIECES)
    pieces = cutlass.min(entries, c.ahead) * each
    for piece in range(block + cute.arch.lane_idx() * blocks, pieces, 32 * blocks):
        expert = Int64(_expert(c, routes, piece // each))
        index = piece % each
        code = codes.iterator + (expert * (PIECES * size) + index * size)
        scale = scales.iterator + (expert * (SCALE_PIECES * scale_size) + (index - PIECES) * scale_size)
        prefetch_bytes(code, size, index < PIECES)
        prefetch_bytes(scale, scale_size, index >= PIECES)


@cute.jit
def _fetch_w13(c: cutlass.Constexpr, codes: Any, scales: Any, routes: Any, stages: Any, barriers: Any, first: Any, last: Any):
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
        expert = Int32(_expert(c, routes, entry))  # of 32 items at once, so that the next one never waits for its own
        passes = Int32(1)
        if cutlass.const_expr(c.grouped):
            start, end = _span(c, routes, entry, expert)
            passes = (end - start + (c.slots - 1)) // c.slots
        for index in range(cutlass.min(32, last - base)):
            row = cute.arch.shuffle_sync(expert, index) * (2 * c.width) + (base + index) % tiles * 8 + half * c.width
            code, scale = _byte(codes, row, layout.row), _byte(scales, row, layout.scale_row)
            for _ in range(cute.arch.shuffle_sync(passes, index)):
                place = step % c.stages
                stage, full = stages + place * layout.stage, barriers + place
                cute.arch.mbarrier_wait(full + c.stages, (step // c.stages & 1) ^ 1)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 16 * (layout.row + layout.scale_row))
                cute.arch.sync_warp()
                _bulk(stage + code_place, code, 8 * layout.row, full, lane < 2)
                _bulk(stage + scale_place, scale, 8 * layout.scale_row, full, (lane >= 2) & (lane < 4))
                step += 1


@cute.jit
def _finish_w13(c: cutlass.Constexpr, sums: Any, routes: Any, hidden: Any, tile: Any, begin: Any, count: Any):
    """One warp: add the team's parts for two tokens and store SiTU of gate and up in column pairs. sums [split, 2, 16] fp32."""
    lane = cute.arch.lane_idx()
    member, row = lane // 16, lane % 16
    total = Float32(0.0)
    for part in cutlass.range_constexpr(c.split):
        total = total + _read_word(sums + (part * 128 + lane * 4)).bitcast(Float32)
    up = cute.arch.shuffle_sync_bfly(total, offset=1)
    if (row % 2 == 0) & (member < count):
        value = _situ(total, up, c.beta, c.linear_beta)
        place = tile * 8 + row % 8 + row // 8  # output row // 8 * 4 + row % 8 // 2, in the order of column pairs
        target = hidden.iterator + (_pair(c, routes, begin + member) * c.width + place)
        _store_half(target, value * Float32(2.0**c.hidden_shift))


@cute.jit
def _consume_w13(
    c: cutlass.Constexpr,
    routes: Any,
    z: Any,
    hidden: Any,
    stages: Any,
    barriers: Any,
    memory: Any,
    zeros: Any,
    first: Any,
    last: Any,
):
    """A multiplying warp: its part of the columns of every tile that is its team's turn."""
    layout = _layout_w13(c)
    tiles = cutlass.const_expr(c.width // 8)
    rounds = cutlass.const_expr(c.hidden // ROUND // c.split)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    team, part = warp // c.split, warp % c.split
    tokens, sums, factors = memory
    tokens = tokens + team * (c.slots * layout.token)
    sums = sums + team * layout.sums
    factors = factors + team * (c.slots * c.split * 4)
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
            start, end = _span(c, routes, entry, _expert(c, routes, entry))
            known = entry
        for begin in range(start, end, c.slots):  # more than one pass only where an expert has many tokens
            if step % c.teams == team:
                count = cutlass.min(end - begin, c.slots)
                if begin != loaded:
                    _load_parts(c, begin, count, routes, z, tokens, factors, part)
                    loaded = begin
                place = step % c.stages
                cute.arch.mbarrier_wait(barriers + place, step // c.stages & 1)
                stage = (stages + place * layout.stage).toint()
                code, scale = stage + code_place, stage + scale_place
                rows = ((code, code + 4 * layout.row, scale, scale + 4 * layout.scale_row),)
                for member in range(0, count, 2):
                    other = cutlass.min(member + 1, count - 1)
                    own = tokens.toint() + part * (rounds * (2 * ROUND))
                    operand = _operand(own + member * layout.token, own + other * layout.token, zeros)
                    _multiply(acc, rows, operand, rounds * 4, zeros, 1, 2)
                    of = Int32(select_(quad < 2, member, other))
                    undo = _read_word(factors + (of * c.split + part) * 4).bitcast(Float32)
                    half = sums + products % 2 * (c.split * 128)
                    target = half.toint() + (part * 128 + quad // 2 * 64 + row * 4)
                    _store_f32(target, acc[0] * undo, quad % 2 == 0)
                    _store_f32(target + 32, acc[1] * undo, quad % 2 == 0)
                    cute.arch.barrier(barrier_id=1 + team, number_of_threads=32 * c.split)
                    if part == products % c.split:
                        _finish_w13(c, half, routes, hidden, item % tiles, begin + member, count - member)
                    products += 1
                if (part == 0) & (lane == 0):  # behind the team's barrier: all its warps have read the stage
                    cute.arch.mbarrier_arrive(barriers + c.stages + place)
            step += 1


@cute.jit
def _roles_w13(
    c: cutlass.Constexpr,
    codes: Any,
    scales: Any,
    next_codes: Any,
    next_scales: Any,
    z: Any,
    routes: Any,
    hidden: Any,
    memory: Any,
):
    """Cut the items into even, neighbouring shares, and part the warps."""
    stages, barriers, zeros, *rest = memory
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    entries = _entries(c, routes)
    items = entries * (c.width // 8)
    first, last = block * items // blocks, (block + 1) * items // blocks
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == c.split * c.teams:
        _fetch_w13(c, codes, scales, routes, stages, barriers, first, last)
        if cutlass.const_expr(c.ahead > 0):
            _ask_for_w2(c, next_codes, next_scales, routes, entries)
    else:
        _consume_w13(c, routes, z, hidden, stages, barriers, tuple(rest), zeros.toint() + 32, first, last)


def _memory_w13(c: Any, allocator: Any) -> tuple:
    """Stages, barriers (full, then empty), zeros, token rows, partial sums, factors of the token rows' parts."""
    layout = _layout_w13(c)
    stages = allocator.allocate(c.stages * layout.stage, byte_alignment=128)
    tokens = allocator.allocate(c.teams * c.slots * layout.token, byte_alignment=128)
    sums = allocator.allocate(c.teams * layout.sums, byte_alignment=128)
    zeros = allocator.allocate(128, byte_alignment=128)
    factors = allocator.allocate(c.teams * c.slots * c.split * 4, byte_alignment=16)
    barriers = allocator.allocate_array(Int64, 2 * c.stages, byte_alignment=8)
    _zeros(zeros)
    _init_barriers(barriers, 2 * c.stages)
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
    memory = _memory_w13(c, SmemAllocator())
    token = dependency_wait()
    routes = (ids.after(token), num_tokens.after(token))
    weights = (codes.early(), scales.early(), next_codes.early(), next_scales.early())
    _roles_w13(c, *weights, z.after(token), routes, hidden.after(token), memory)


@cute.kernel
def _w13_grouped(
    codes: Static,
    scales: Static,
    next_codes: Static,
    next_scales: Static,
    z: Dynamic,
    offsets: Dynamic,
    pairs: Dynamic,
    active: Dynamic,
    num_active: Dynamic,
    hidden: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    memory = _memory_w13(c, SmemAllocator())
    token = dependency_wait()
    routes = (offsets.after(token), pairs.after(token), active.after(token), num_active.after(token))
    weights = (codes.early(), scales.early(), next_codes.early(), next_scales.early())
    _roles_w13(c, *weights, z.after(token), routes, hidden.after(token), memory)


# -- w2 ----------------------------------------


@cute.jit
def _load_table(c: cutlass.Constexpr, routes: Any, weights: Any, entries: Any, table: Any):
    """Expert, start and end of every entry; pair and routing weight of every place in the list: read once, by all threads.

    Pairs that are not grouped include those of padded rows, which are never fetched: so no read waits for `num_tokens`.
    """
    experts, starts, ends, pairs, factors = table
    thread, _, _ = cute.arch.thread_idx()
    places = weights.shape[0] * c.top_k
    for place in cutlass.range(thread, places, 32 * c.warps, unroll=1):
        pair = Int32(place)
        if cutlass.const_expr(c.grouped):
            pair = routes[1][place]
        else:
            experts[place], starts[place], ends[place] = _expert(c, routes, place), place, place + 1
        inside = (pair < places) & (pair >= 0)  # beyond the last group the list holds anything
        pairs[place] = pair
        factors[place] = Float32(0.0)
        if inside:
            factors[place] = weights[pair // c.top_k, pair % c.top_k]
    if cutlass.const_expr(c.grouped):
        for entry in cutlass.range(thread, entries, 32 * c.warps, unroll=1):
            expert = _expert(c, routes, entry)
            experts[entry] = expert
            starts[entry], ends[entry] = _span(c, routes, entry, expert)


def _scale_span(c: Any, row: Any) -> tuple[Any, Any]:
    """Scales of `height` rows from `row` on may start between 16-byte units: bytes in front of them, and bytes to copy."""
    scale_row = c.width // GROUP
    offset = row * scale_row % 16
    return offset, (offset + c.height * scale_row + 15) // 16 * 16


@cute.jit
def _fetch_w2(
    c: cutlass.Constexpr,
    codes: Any,
    scales: Any,
    hidden: Any,
    table: Any,
    entry: Any,
    begin: Any,
    stage: Any,
    barrier: Any,
    has_weights: cutlass.Constexpr,
):
    """Start copying this block's rows of an entry's expert, unless they are on their way, and the hidden rows of its pairs from
    `begin` on.
    """
    experts, _, ends, pairs, _ = table
    layout = Second(c.width, c.height, c.slots)
    lane = cute.arch.lane_idx()
    block, _, _ = cute.arch.block_idx()
    count = cutlass.min(ends[entry] - begin, c.slots)
    if cutlass.const_expr(not has_weights):
        row = experts[entry] * c.hidden + block * c.height
        offset, size = _scale_span(c, row)
        if lane == 0:
            expected = c.height * layout.row + size + count * (2 * c.width)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
        cute.arch.sync_warp()
        _bulk(stage, _byte(codes, row, layout.row), c.height * layout.row, barrier, lane == 0)
        _bulk(stage + layout.scales, _byte(scales, row, layout.scale_row) - offset, size, barrier, lane == 1)
    if lane < count:
        source = hidden.iterator + pairs[begin + lane] * c.width
        _bulk(stage + (layout.tokens + lane * layout.token), source, 2 * c.width, barrier)


def _rows_w2(c: Any, scale_offset: Any, stage: Any) -> tuple:
    """Where this lane's two rows of each tile are in a stage; the last tile repeats the last row. stage: an address."""
    layout = Second(c.width, c.height, c.slots)
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
def _add(c: cutlass.Constexpr, acc: Any, table: Any, first: Any, second: Any, sums: Any):
    """sums[token, row] += weight * product, for two pairs, or one where both are the same place. sums: this warp's own."""
    pairs, factors = table[3], table[4]
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    place = Int32(select_(quad < 2, first, second))
    weight = factors[place] * Float32(2.0 ** (SHIFT - c.hidden_shift))
    base = pairs[place] // c.top_k * c.height
    if (quad == 0) | ((quad == 2) & (second > first)):
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
    has_weights: cutlass.Constexpr,
):
    """One warp: every c.warps-th entry, c.depth of them on their way at a time. has_weights: those of the first ones are."""
    experts, starts, ends, _, _ = table
    layout = Second(c.width, c.height, c.slots)
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.warp_idx()
    stages, barriers = stages + warp * (c.depth * layout.stage), barriers + warp * c.depth  # its own
    ahead, begin = Int32(warp), Int32(0)  # what is fetched next
    if ahead < entries:
        begin = starts[ahead]
    for turn in cutlass.range(c.depth, unroll=1):
        if ahead < entries:
            own = stages + turn * layout.stage
            _fetch_w2(c, codes, scales, hidden, table, ahead, begin, own, barriers + turn, has_weights)
            begin += c.slots
            if begin >= ends[ahead]:
                ahead += c.warps
                if ahead < entries:
                    begin = starts[ahead]
    tiles = cutlass.const_expr(-(-c.height // TILE))
    acc = cute.make_rmem_tensor(2 * tiles, Float32)
    step = Int32(0)
    for entry in range(warp, entries, c.warps):
        end = ends[entry]
        for now in range(starts[entry], end, c.slots):
            place = step % c.depth
            stage = stages + place * layout.stage
            cute.arch.mbarrier_wait(barriers + place, step // c.depth & 1)
            offset = (experts[entry] * c.hidden + block * c.height) * layout.scale_row % 16
            rows = _rows_w2(c, offset, stage.toint())
            tokens = stage.toint() + layout.tokens
            for member in range(0, cutlass.min(end - now, c.slots), 2):
                other = cutlass.min(member + 1, cutlass.min(end - now, c.slots) - 1)
                operand = _operand(tokens + member * layout.token, tokens + other * layout.token, zeros)
                _multiply(acc, rows, operand, c.width // GROUP, zeros, tiles, 2 if tiles == 1 else 1)
                _add(c, acc, table, now + member, now + other, sums)
            cute.arch.sync_warp()  # every lane has read the stage
            if ahead < entries:
                _fetch_w2(c, codes, scales, hidden, table, ahead, begin, stage, barriers + place, False)
                begin += c.slots
                if begin >= ends[ahead]:
                    ahead += c.warps
                    if ahead < entries:
                        begin = starts[ahead]
            step += 1


@cute.jit
def _write_w2(c: cutlass.Constexpr, sums: Any, out: Any):
    """Add the warps' sums in order and store them in bf16. Padded rows have nothing in them and come out as zero."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    for place in cutlass.range(thread, out.shape[0] * c.height, 32 * c.warps, unroll=1):
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(c.warps):
            total = total + sums[warp * (c.rows * c.height) + place]
        out[place // c.height, block * c.height + place % c.height] = total.to(BFloat16)


def _memory_w2(c: Any, allocator: Any) -> tuple:
    """Stages and barriers of all warps, the table, all sums (set to zero)."""
    layout = Second(c.width, c.height, c.slots)
    stages = allocator.allocate(c.warps * c.depth * layout.stage, byte_alignment=128)

    def numbers(dtype: Any, count: int) -> Any:
        return allocator.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    entries = [numbers(Int32, c.entries) for _ in range(3)]
    table = (*entries, numbers(Int32, c.rows * c.top_k), numbers(Float32, c.rows * c.top_k))
    sums = numbers(Float32, c.warps * c.rows * c.height)
    barriers = allocator.allocate_array(Int64, c.warps * c.depth, byte_alignment=8)
    _clear(sums, c.warps * c.rows * c.height, 32 * c.warps)
    _init_barriers(barriers, c.warps * c.depth)
    return stages, barriers, table, sums


@cute.jit
def _clear(sums: Any, count: cutlass.Constexpr, threads: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    for place in cutlass.range(thread, count, threads, unroll=1):
        sums[place] = Float32(0.0)


def _all_warps(c: Any) -> None:
    """The w2 warps meet."""
    cute.arch.barrier(barrier_id=ALL_WARPS, number_of_threads=32 * c.warps)


def _w2(c: Any, weights: tuple, hidden: Any, entries: Any, out: Any, memory: tuple, zeros: Any, has_weights: bool) -> None:
    """The table is there. All warps of w2."""
    stages, barriers, table, sums = memory
    size = c.rows * c.height
    own = cute.make_tensor(sums.iterator + cute.arch.warp_idx() * size, cute.make_layout(size))
    _stream_w2(c, *weights, hidden, table, entries, stages, barriers, own, zeros, has_weights)
    _all_warps(c)
    _write_w2(c, sums, out)


def _only_w2(c: Any, weights: tuple, hidden: Any, routes: tuple, factors: Any, out: Any, memory: tuple) -> None:
    zeros, *rest = memory
    entries = _entries(c, routes)
    _load_table(c, routes, factors, entries, rest[2])
    _all_warps(c)
    _w2(c, weights, hidden, entries, out, tuple(rest), zeros.toint() + 32, False)


def _memory_only_w2(c: Any) -> tuple:
    allocator = SmemAllocator()
    zeros = allocator.allocate(128, byte_alignment=128)
    _zeros(zeros)
    return zeros, *_memory_w2(c, allocator)


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
    memory = _memory_only_w2(c)
    token = dependency_wait()
    routes = (ids.after(token), num_tokens.after(token))
    static = (codes.early(), scales.early())
    _only_w2(c, static, hidden.after(token), routes, weights.after(token), out.after(token), memory)


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
    memory = _memory_only_w2(c)
    token = dependency_wait()
    routes = (offsets.after(token), pairs.after(token), active.after(token), num_active.after(token))
    static = (codes.early(), scales.early())
    _only_w2(c, static, hidden.after(token), routes, weights.after(token), out.after(token), memory)


# -- both in one kernel ----------------------------------------


@cute.jit
def _fetch_first_w2(c: cutlass.Constexpr, codes: Any, scales: Any, routes: Any, entries: Any, stages: Any, barriers: Any):
    """The fetching warp: the weights of every warp's first entries in w2. Their hidden rows follow when they exist."""
    layout = Second(c.width, c.height, c.slots)
    block, _, _ = cute.arch.block_idx()
    if block < c.hidden // c.height:
        last = cutlass.min(entries, c.warps * c.depth)
        for entry in cutlass.range(cute.arch.lane_idx(), last, 32, unroll=1):
            place = entry % c.warps * c.depth + entry // c.warps
            stage, barrier = stages + place * layout.stage, barriers + place
            row = _expert(c, routes, entry) * c.hidden + block * c.height
            offset, size = _scale_span(c, row)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, c.height * layout.row + size + 2 * c.width)
            _bulk(stage, _byte(codes, row, layout.row), c.height * layout.row, barrier)
            _bulk(stage + layout.scales, _byte(scales, row, layout.scale_row) - offset, size, barrier)


@cute.jit
def _meet(meeting: Any):
    """One thread of every block: wait until all blocks are here; what they wrote is then visible. All blocks must be resident.

    Block 0 adds what makes the sum of all additions 2^31: bit 31 changes when the last one comes, and the rest is as before.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    one = Int32(1)
    if block == 0:
        one = Int32(-(1 << 31)) - (blocks - 1)
    before = cute.arch.atomic_add(meeting.iterator, one, sem="acq_rel", scope="gpu")
    now, polls = Int32(before), Int32(0)
    while (now ^ before) >= 0:
        load = "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];"
        now = inline_ptx(load, write_only_types=[Int32], read_only_args=[meeting.iterator])
        polls += 1
        if polls > POLLS:  # a block is missing: an error of this launch, not a hang
            inline_ptx("trap;")


@cute.jit
def _both(
    c: cutlass.Constexpr,
    first: Any,
    second: Any,
    z: Any,
    routes: Any,
    factors: Any,
    meeting: Any,
    hidden: Any,
    out: Any,
    memory: Any,
):
    """Part the warps; w13, meeting, w2."""
    (stages, barriers, zeros, *tokens), w2 = memory
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    entries = _entries(c, routes)
    items = entries * (c.width // 8)
    start, end = block * items // blocks, (block + 1) * items // blocks
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == c.warps:
        _fetch_w13(c, *first, routes, stages, barriers, start, end)
        _fetch_first_w2(c, *second, routes, entries, w2[0], w2[1])
    else:
        _load_table(c, routes, factors, entries, w2[2])
        zero = zeros.toint() + 32
        _consume_w13(c, routes, z, hidden, stages, barriers, tuple(tokens), zero, start, end)
        inline_ptx("fence.proxy.async.global;")  # w2 reads hidden rows by bulk copies
        _all_warps(c)
        if thread == 0:
            _meet(meeting)
        _all_warps(c)
        inline_ptx("fence.proxy.async.global;")
        if block < c.hidden // c.height:
            _w2(c, second, hidden, entries, out, w2, zero, True)


@cute.kernel
def _experts_pairs(
    codes: Static,
    scales: Static,
    next_codes: Static,
    next_scales: Static,
    z: Dynamic,
    ids: Dynamic,
    weights: Dynamic,
    num_tokens: Dynamic,
    meeting: Dynamic,
    hidden: Output,
    out: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    allocator = SmemAllocator()
    memory = (_memory_w13(c, allocator), _memory_w2(c, allocator))
    token = dependency_wait()
    routes = (ids.after(token), num_tokens.after(token))
    first, second = (codes.early(), scales.early()), (next_codes.early(), next_scales.early())
    tensors = (weights.after(token), meeting.after(token), hidden.after(token), out.after(token))
    _both(c, first, second, z.after(token), routes, *tensors, memory)


# -- entries ----------------------------------------


def _launch(kernel: Any, grid: int, warps: int, stream: Any) -> None:
    kernel.launch(
        grid=[grid, 1, 1],
        block=[32 * warps, 1, 1],
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )


def mxfp4_w13_pairs(config, codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, stream):
    """See the module head."""
    kernel = _w13_pairs(codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, config)
    _launch(kernel, config.grid, config.split * config.teams + 1, stream)


def mxfp4_w13_grouped(config, codes, scales, next_codes, next_scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See the module head."""
    kernel = _w13_grouped(codes, scales, next_codes, next_scales, z, offsets, pairs, active, num_active, hidden, config)
    _launch(kernel, config.grid, config.split * config.teams + 1, stream)


def mxfp4_w2_pairs(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See the module head."""
    kernel = _w2_pairs(codes, scales, hidden, ids, weights, num_tokens, out, config)
    _launch(kernel, config.hidden // config.height, config.warps, stream)


def mxfp4_w2_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, weights, out, stream):
    """See the module head."""
    kernel = _w2_grouped(codes, scales, hidden, offsets, pairs, active, num_active, weights, out, config)
    _launch(kernel, config.hidden // config.height, config.warps, stream)


def mxfp4_experts_pairs(
    config, codes, scales, next_codes, next_scales, z, ids, weights, num_tokens, meeting, hidden, out, stream
):
    """See the module head."""
    arguments = (codes, scales, next_codes, next_scales, z, ids, weights, num_tokens, meeting, hidden, out, config)
    _launch(_experts_pairs(*arguments), config.grid, config.warps + 1, stream)
