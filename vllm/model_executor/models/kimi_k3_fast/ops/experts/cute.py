"""MXFP4 experts on the tensor cores (mma.sync m16n8k16): weights are the 16-row operand, up to 8 tokens of one expert the other.

Which expert is read is known only after the dependency wait, so no weight can be fetched before it, and all depends on bytes
in flight. Bulk
copies into a ring of shared-memory stages keep them there, across tiles and experts:
    w13  a block walks over neighbouring (expert, tile) items. Four warps fetch, as far ahead as the ring allows; the others
    share a tile's
         columns, and two of them in turn add the parts and apply SiTU while the rest goes on.
    w2   a block owns a few rows of the output for all tokens. Every warp fetches and multiplies its own experts and adds into
    its own fp32
         sums in shared memory; at the end the warps' sums are added in order. No partial products in memory, no atomics.

Decoding is exact and is most of the instructions: the nibble s|eem placed at bits 15 and 11..9 of an fp16 is the value times
2^-14,
subnormals included. Two steps serve four nibbles (select sign from the word, magnitude from its shift by three; then two
masks). A register so
holds the columns (i, i + 4) of eight; activations are stored in that order. All 16 columns of an instruction are of one scale
group, so the
scale is applied to the four fp32 sums and costs nothing per value: 2^(s - 127) for the codes 1..254, 0 for 0, infinity for 255.

Activations are fp16, which holds a bf16 exactly inside its range. Rows of z are brought into it by a power of two each, so
that the largest
value lies in [2^14, 2^15); the bounded hidden values by one constant (`hidden_shift`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.ptx import load_shared, sigmoid, store_shared
from ..device.reduce import warp_max
from ..device.vectors import load_words, unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from .layout import GROUP, TILE, First, Second

FETCHERS = 4  # fetching warps of w13: a bulk copy takes its addresses from uniform registers, so a warp issues one at a time
SHIFT = 14  # decoded weights are 2^-SHIFT times their value


# -- decoding ----------------------------------------


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


def _read_word(pointer: Any) -> Any:
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])


def _read_scale(pointer: Any) -> Any:
    """2^(s - 127)."""
    code = inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])
    return (code << 23).bitcast(Float32)


@dataclass
class Rows:
    """A lane's part in 16 weight rows: pointers to its bytes of group 0, and to the scales, in its rows g and g + 8."""

    codes: tuple[Any, Any]
    scales: tuple[Any, Any]

    def read(self, group: int) -> tuple[list[Any], list[Any]]:
        """Words and factors of one scale group."""
        words = [_read_word(pointer + group * (GROUP // 2)) for pointer in self.codes]
        return words, [_read_scale(pointer + group) for pointer in self.scales]


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
        decoded = [[_decode(word) for word in words] for _, words, _, _ in now]
        parts = [[Float32(0.0)] * 4 for _ in now]
        for half in (0, 2):
            for i, (lower, upper) in enumerate(decoded):
                a = [lower[half], upper[half], lower[half + 1], upper[half + 1]]
                parts[i] = _mma(a, now[i][3][half : half + 2], parts[i])
        for (index, _, (low, high), _), part in zip(now, parts, strict=True):
            factors = (low, low, high, high)
            acc[index] = [total + value * f for total, value, f in zip(acc[index], part, factors, strict=True)]
    return acc


# -- copies and barriers ----------------------------------------


def _bulk(target: Any, source: Any, size: Any, barrier: Any, predicate: Any = None) -> None:
    """Start copying `size` bytes (16-byte aligned, as both ends) into shared memory; they count on the barrier."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
        predicate=predicate,
    )


@cute.jit
def _init_barriers(barriers: Any, count: cutlass.Constexpr, split: cutlass.Constexpr, first: cutlass.Constexpr):
    """`count` barriers of one arrival, but the first `split` ones of `first` arrivals."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        arrivals = Int32(first)
        if thread >= split:
            arrivals = Int32(1)
        cute.arch.mbarrier_init(barriers + thread, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


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


def _load_token(c: Any, source: Any, target: Any, factor: Any) -> None:
    """One warp brings a row of z into fp16, in column pairs; `factor` gets the power of two that undoes it and the weights'
    2^-14.
    """
    lane = cute.arch.lane_idx()
    units = c.hidden // 8
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
def _load_tokens(c: cutlass.Constexpr, first: Any, count: Any, routes: Any, z: Any, tokens: Any, factors: Any):
    """Rows of z: the first `count` ones, or those of the pairs from `first` on; a warp takes every c.split-th."""
    layout = First(c.hidden, c.slots, c.split)
    for slot in range(cute.arch.warp_idx(), count, c.split):
        row = Int32(slot)
        if cutlass.const_expr(c.gathered):
            row = _pair(c, routes, first + slot) // c.top_k
        _load_token(c, z.iterator + row * c.hidden, tokens + slot * layout.token, factors + slot * 4)


@cute.jit
def _fetch_w13(c: cutlass.Constexpr, codes: Any, scales: Any, routes: Any, stages: Any, barriers: Any, first: Any, last: Any):
    """A fetching warp: four lanes copy a weight row each; of two warps one more lane copies the scales of eight rows."""
    layout = First(c.hidden, c.slots, c.split)
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
        expert = Int32(_expert(c, routes, entry))  # of 32 items at once, so that the next one never waits for its own
        passes = Int32(1)
        if cutlass.const_expr(c.gathered):
            start, end = _span(c, routes, entry, expert)
            passes = (end - start + (c.slots - 1)) // c.slots
        for index in range(cutlass.min(32, last - base)):
            gate = cute.arch.shuffle_sync(expert, index) * (2 * c.width) + (base + index) % tiles * 8
            gate = cute.arch.make_warp_uniform(gate) + half * c.width
            source = _byte(codes, gate + row % 8, layout.row)
            scale = _byte(scales, gate, layout.scale_row)
            for _ in range(cute.arch.shuffle_sync(passes, index)):
                place = step % c.stages
                stage, full = stages + place * layout.stage, barriers + place
                cute.arch.mbarrier_wait(full + c.stages, (step // c.stages & 1) ^ 1)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, expected)
                cute.arch.sync_warp()
                _bulk(stage + row * layout.pitch, source, layout.row, full, lane < 4)
                part = stage + (layout.scales + half * (8 * layout.scale_row))
                _bulk(part, scale, 8 * layout.scale_row, full, (lane == 0) & loads_scales)
                step += 1


def _product_w13(c: Any, stage: Any, tokens: Any, count: Any) -> list[Any]:
    """This warp's columns of a tile times the tokens, four fp32 a lane."""
    layout = First(c.hidden, c.slots, c.split)
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
        pair = _pair(c, routes, start + member)
        column = Int32(member)
        if cutlass.const_expr(not c.gathered):
            column = pair // c.top_k
        source = sums + ((output * 4 + column // 2) * 16 + column % 2 * 4)
        total = [Float32(0.0), Float32(0.0)]
        for part in cutlass.range_constexpr(c.split):
            for half in cutlass.range_constexpr(2):
                total[half] = total[half] + _read_word(source + (part * 512 + half * 8)).bitcast(Float32)
        undo = _read_word(factors + column * 4).bitcast(Float32)
        value = _situ(total[0] * undo, total[1] * undo, c.beta, c.linear_beta)
        place = tile * 8 + (output % 4) * 2 + output // 4
        _store_half(hidden.iterator + (pair * c.width + place), value * Float32(2.0**c.hidden_shift))


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
    layout = First(c.hidden, c.slots, c.split)
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
            start, end = _span(c, routes, entry, _expert(c, routes, entry))
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
    items = _entries(c, routes) * (c.width // 8)
    first, last = block * items // blocks, (block + 1) * items // blocks
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) >= c.split:
        _fetch_w13(c, codes, scales, routes, stages, barriers, first, last)
    elif first < last:
        _consume_w13(c, routes, z, hidden, live, stages, barriers, tokens, sums, factors, first, last)


def _memory_w13(c: Any) -> tuple:
    """Stages, barriers (full, then empty), token rows, partial sums, factors of the token rows."""
    layout = First(c.hidden, c.slots, c.split)
    allocator = cutlass.utils.SmemAllocator()
    stages = allocator.allocate(c.stages * layout.stage, byte_alignment=128)
    tokens = allocator.allocate(c.slots * layout.token, byte_alignment=128)
    sums = allocator.allocate(2 * c.split * 512, byte_alignment=128)
    factors = allocator.allocate(c.slots * 4, byte_alignment=16)
    barriers = allocator.allocate_array(Int64, 2 * c.stages, byte_alignment=8)
    _init_barriers(barriers, 2 * c.stages, c.stages, FETCHERS)
    return stages, barriers, tokens, sums, factors


@cute.kernel
def _w13_pairs(
    codes: Static, scales: Static, z: Dynamic, ids: Dynamic, num_tokens: Dynamic, hidden: Output, c: cutlass.Constexpr
):
    release_dependents()
    memory = _memory_w13(c)
    token = dependency_wait()
    routes = (ids.after(token), num_tokens.after(token))
    live = routes[1][0]
    _roles_w13(c, codes.early(), scales.early(), z.after(token), routes, hidden.after(token), live, memory)


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
def _load_table(c: cutlass.Constexpr, routes: Any, weights: Any, entries: Any, table: Any):
    """Expert, start and end of every entry; pair and routing weight of every place in the list: read once, by all threads."""
    experts, starts, ends, pairs, factors = table
    thread, _, _ = cute.arch.thread_idx()
    for entry in range(thread, entries, 32 * c.warps):
        expert = _expert(c, routes, entry)
        experts[entry] = expert
        starts[entry], ends[entry] = _span(c, routes, entry, expert)
    for place in range(thread, weights.shape[0] * c.top_k, 32 * c.warps):
        pair = Int32(place)
        if cutlass.const_expr(c.grouped):
            pair = routes[1][place]
        inside = pair < weights.shape[0] * c.top_k  # beyond the last group the list holds anything
        inside = inside & (pair >= 0)
        pairs[place] = pair
        factors[place] = Float32(0.0)
        if inside:
            factors[place] = weights[pair // c.top_k, pair % c.top_k]


@cute.jit
def _fetch_w2(
    c: cutlass.Constexpr, codes: Any, scales: Any, hidden: Any, table: Any, entry: Any, begin: Any, stage: Any, barrier: Any
):
    """Start copying this block's rows of an entry's expert, and the hidden rows of its pairs from `begin` on."""
    experts, _, ends, pairs, _ = table
    layout = Second(c.width, c.height, c.slots, c.padded)
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
        _bulk(stage + lane * layout.pitch, _byte(codes, row + lane, layout.row), layout.row, barrier, lane < c.height)
    else:
        _bulk(stage, _byte(codes, row, layout.row), c.height * layout.row, barrier, lane == 0)
    _bulk(stage + layout.scales, _byte(scales, row, layout.scale_row) - offset, size, barrier, lane == 1)
    if lane < count:
        source = hidden.iterator + pairs[begin + lane] * c.width
        _bulk(stage + (layout.tokens + lane * layout.token), source, 2 * c.width, barrier)


def _product_w2(c: Any, entry_row: Any, stage: Any, count: Any) -> list[list[Any]]:
    """The block's rows of one expert times up to 8 tokens: four fp32 a lane for every 16 rows."""
    layout = Second(c.width, c.height, c.slots, c.padded)
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
    layout = Second(c.width, c.height, c.slots, c.padded)
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


@cute.jit
def _write_w2(c: cutlass.Constexpr, sums: Any, out: Any):
    """Add the warps' sums in order and store them in bf16. Padded rows have nothing in them and come out as zero."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    for place in range(thread, out.shape[0] * c.height, 32 * c.warps):
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(c.warps):
            total = total + sums[warp * (c.rows * c.height) + place]
        out[place // c.height, block * c.height + place % c.height] = total.to(BFloat16)


def _memory_w2(c: Any) -> tuple:
    """Stages of this warp, its barriers, the table, all sums (set to zero)."""
    layout = Second(c.width, c.height, c.slots, c.padded)
    allocator = cutlass.utils.SmemAllocator()
    warp = cute.arch.warp_idx()
    stages = allocator.allocate(c.warps * c.depth * layout.stage, byte_alignment=128) + warp * (c.depth * layout.stage)

    def numbers(dtype: Any, count: int) -> Any:
        return allocator.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    entries = [numbers(Int32, c.entries) for _ in range(3)]
    table = (*entries, numbers(Int32, c.rows * c.top_k), numbers(Float32, c.rows * c.top_k))
    sums = numbers(Float32, c.warps * c.rows * c.height)
    barriers = allocator.allocate_array(Int64, c.warps * c.depth, byte_alignment=8)
    _clear(sums, c.warps * c.rows * c.height, 32 * c.warps)
    _init_barriers(barriers, c.warps * c.depth, 0, 1)
    return stages, barriers + warp * c.depth, table, sums


@cute.jit
def _clear(sums: Any, count: cutlass.Constexpr, threads: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    for place in range(thread, count, threads):
        sums[place] = Float32(0.0)


def _w2(c: Any, codes: Any, scales: Any, hidden: Any, routes: tuple, weights: Any, out: Any, memory: tuple) -> None:
    stages, barriers, table, sums = memory
    entries = _entries(c, routes)
    _load_table(c, routes, weights, entries, table)
    cute.arch.sync_threads()
    size = c.rows * c.height
    own = cute.make_tensor(sums.iterator + cute.arch.warp_idx() * size, cute.make_layout(size))
    _stream_w2(c, codes, scales, hidden, table, entries, stages, barriers, own)
    cute.arch.sync_threads()
    _write_w2(c, sums, out)


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
    routes = (ids.after(token), num_tokens.after(token))
    _w2(c, codes.early(), scales.early(), hidden.after(token), routes, weights.after(token), out.after(token), memory)


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


def mxfp4_w13_pairs(config, codes, scales, z, ids, num_tokens, hidden, stream):
    """See the module head."""
    grid, block = [config.grid, 1, 1], [32 * (config.split + FETCHERS), 1, 1]
    _w13_pairs(codes, scales, z, ids, num_tokens, hidden, config).launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w13_grouped(config, codes, scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See the module head."""
    grid, block = [config.grid, 1, 1], [32 * (config.split + FETCHERS), 1, 1]
    kernel = _w13_grouped(codes, scales, z, offsets, pairs, active, num_active, hidden, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w2_pairs(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See the module head."""
    grid, block = [config.hidden // config.height, 1, 1], [32 * config.warps, 1, 1]
    kernel = _w2_pairs(codes, scales, hidden, ids, weights, num_tokens, out, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w2_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, weights, out, stream):
    """See the module head."""
    grid, block = [config.hidden // config.height, 1, 1], [32 * config.warps, 1, 1]
    kernel = _w2_grouped(codes, scales, hidden, offsets, pairs, active, num_active, weights, out, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)
