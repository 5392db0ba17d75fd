"""MXFP4 experts on the tensor cores (mma.sync m16n8k16): weights are the 16-row operand, up to 8 tokens of one expert the other.

Weights never touch shared memory. A lane loads 16 bytes of a row, 32 columns and so exactly one scale group, and decodes them in
registers; the four lanes of a quad hold 128 neighbouring columns. The matrix unit does not care which column is called k = 0 as long as both
operands agree, so a decoded register holds the columns (i, i + 4) of a group of eight, which two masks give, instead of neighbours. The
activation follows: `w13` pairs the columns of z with four byte permutations, and writes its own output in that order already.

Decoding is exact: the nibble s|eem placed at bits 15 and 8..6 of a bf16 is the value times 2^-126, subnormals included, and one
bf16x2 multiplication by 2^(s - 1) gives value * 2^(s - 127).

Which expert a tile reads is known only after the dependency wait, so no weight can be fetched before it. All that a warp will read of its tile
is therefore requested at once, before the first use.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.ptx import mma_bf16, sigmoid, store_bf16
from ..device.vectors import load_words, load_words_streaming
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents

ROWS = 16  # rows of a tensor-core tile
LANES = 8  # tokens of a tensor-core tile


# -- decoding --------------------------------------------------------------------------------------------------------------------


def _codes(pointer: Any, words: int) -> list[Any]:
    """4 * `words` bytes of a weight row in registers."""
    if words == 4:
        return list(load_words_streaming(pointer))
    if words == 2:
        return list(
            inline_ptx(
                "ld.global.nc.L1::no_allocate.v2.u32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Uint32] * 2,
                read_only_args=[pointer],
            )
        )
    return [inline_ptx("ld.global.nc.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])]


def _scale(pointer: Any) -> Any:
    """One E8M0 byte."""
    return inline_ptx("ld.global.nc.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])


def _factor(scale: Any) -> Any:
    """2^(s - 1) twice in bf16. Above s = 128 the product leaves bf16's range: NaN, as for the code 255, never a wrong number."""
    exact = (scale + Uint32(126)) * Uint32(0x00800080)
    return inline_ptx(
        "{ .reg .pred p; setp.gt.u32 p, {$r1}, 128; selp.u32 {$w0}, 0x7fc07fc0, {$r0}, p; }",
        write_only_types=[Uint32],
        read_only_args=[exact, scale],
    )


def _multiply(a: Any, b: Any) -> Any:
    """Product of two bf16 pairs."""
    return inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def _shift(word: Any, left: int) -> Any:
    return word << left if left > 0 else word >> -left if left < 0 else word


def _decode(word: Any, factor: Any) -> list[Any]:
    """Eight nibbles to four bf16 pairs: columns (0, 4), (1, 5), (2, 6), (3, 7)."""
    pairs = []
    for nibble in range(4):
        magnitude = _shift(word, 6 - 4 * nibble) & Uint32(0x01C001C0)
        sign = _shift(word, 12 - 4 * nibble) & Uint32(0x80008000)
        pairs.append(_multiply(magnitude | sign, factor))
    return pairs


def _in_pairs(words: Any) -> list[Any]:
    """Eight bf16 in memory order to the column pairs of `_decode`."""
    a, b, c, d = words

    def bytes_of(low: Any, high: Any, selector: int) -> Any:
        return inline_ptx(
            f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Uint32], read_only_args=[low, high]
        )

    return [bytes_of(a, c, 0x5410), bytes_of(a, c, 0x7632), bytes_of(b, d, 0x5410), bytes_of(b, d, 0x7632)]


# -- one warp's product ----------------------------------------------------------------------------------------------------------


def _product(tiles: list[Any], columns: Any, chunks: int, words: int, in_pairs: bool) -> list[list[Any]]:
    """acc[tile] += weights[16, K] activation[K, 8] for the `chunks` * 32 * `words` columns that the pointers start at.

    tiles: for each tile the pointers (codes of row g, of row g + 8, scales of row g, of row g + 8) at this lane's first column;
    columns: pointer to this lane's token (lane // 4) at this lane's first column; in_pairs: its columns are already in pairs.
    """
    group = 32 * words  # columns of a chunk, over the quad
    codes = [
        [(_codes(lo + c * group // 2, words), _codes(hi + c * group // 2, words)) for c in range(chunks)]
        for lo, hi, _, _ in tiles
    ]
    scales = [[(_scale(lo + c * words), _scale(hi + c * words)) for c in range(chunks)] for _, _, lo, hi in tiles]

    def activation(chunk: int) -> list[Any]:
        return [load_words(columns + chunk * group + 8 * word) for word in range(words)]

    acc = [[Float32(0.0)] * 4 for _ in tiles]
    following = activation(0)
    for chunk in range(chunks):
        current = following
        if chunk + 1 < chunks:
            following = activation(chunk + 1)
        for word in range(words):
            b = list(current[word]) if in_pairs else _in_pairs(current[word])
            for tile in range(len(tiles)):
                lower, upper = (_decode(codes[tile][chunk][half][word], _factor(scales[tile][chunk][half])) for half in (0, 1))
                mma_bf16(acc[tile], (lower[0], upper[0], lower[1], upper[1]), b[0], b[1])
                mma_bf16(acc[tile], (lower[2], upper[2], lower[3], upper[3]), b[2], b[3])
    return acc


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


def _byte(tensor: Any, row: Any, length: int) -> Any:
    """Pointer to a row of a byte tensor; 64 bits, since all experts of a layer may exceed 2 GiB."""
    return tensor.iterator + Int64(row) * length


# -- w13 -------------------------------------------------------------------------------------------------------------------------


def _hidden_tile(
    c: Any, codes: Any, scales: Any, z: Any, hidden: Any, shared: Any, expert: Any, tile: Any, pair_of: Any, count: Any
) -> None:
    """SiTU(w1 z, w3 z) for 8 rows of one expert and up to 8 pairs: the block's warps split the columns and sum in shared memory.

    pair_of: lane's token column 0..7 -> its pair (token * top_k + slot), any valid pair beyond `count`.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    row, quad = lane // 4, lane % 4
    length, chunks = c.hidden // 2, c.hidden // (32 * c.words) // c.split
    first = warp * (chunks * 32 * c.words) + quad * (8 * c.words)  # this lane's first column
    gate = expert * (2 * c.width) + tile * 8 + row
    pointers = []
    for base in (gate, gate + c.width):
        pointers.append((_byte(codes, base, length) + first // 2, _byte(scales, base, c.hidden // 32) + first // 32))
    (code_lo, scale_lo), (code_hi, scale_hi) = pointers
    token = pair_of(row) // c.top_k
    acc = _product(
        [(code_lo, code_hi, scale_lo, scale_hi)], z.iterator + token * c.hidden + first, chunks, c.words, in_pairs=False
    )[0]

    thread = warp * 32 + lane
    cute.arch.sync_threads()  # the previous tile's sums have been read
    for index in range(4):
        shared[thread * 4 + index] = acc[index]
    cute.arch.sync_threads()
    column, output = thread // 8, thread % 8
    live = (thread < 64) & (column < count)
    source = ((output * 4 + column // 2) % 32) * 4 + column % 2
    total = [Float32(0.0), Float32(0.0)]
    for part in range(c.split):
        for half in (0, 1):
            total[half] = total[half] + shared[part * 128 + source + 2 * half]
    place = tile * 8 + (output % 4) * 2 + output // 4
    value = _situ(total[0], total[1], c.beta, c.linear_beta)
    store_bf16(hidden.iterator + pair_of(column % 8) * c.width + place, value, live)


@cute.kernel
def _w13_pairs(
    codes: Static, scales: Static, z: Dynamic, ids: Dynamic, num_tokens: Dynamic, hidden: Output, c: cutlass.Constexpr
):
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, c.split * 128, alignment=16), cute.make_layout(c.split * 128))
    token = dependency_wait()
    release_dependents()
    chosen = ids.after(token)
    tiles = c.width // 8
    for item in range(block, num_tokens.after(token)[0] * (c.top_k * tiles), blocks):
        pair = item // tiles
        expert = chosen[pair // c.top_k, pair % c.top_k]
        _hidden_tile(
            c, codes.early(), scales.early(), z.after(token), hidden.after(token), shared, expert, item % tiles, lambda _: pair, 1
        )


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
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, c.split * 128, alignment=16), cute.make_layout(c.split * 128))
    token = dependency_wait()
    release_dependents()
    starts, members, experts = offsets.after(token), pairs.after(token), active.after(token)
    tiles = c.width // 8
    for item in range(block, num_active.after(token)[0] * tiles, blocks):
        expert = experts[item // tiles]
        end = starts[expert + 1]
        for start in range(starts[expert], end, LANES):
            _hidden_tile(
                c,
                codes.early(),
                scales.early(),
                z.after(token),
                hidden.after(token),
                shared,
                expert,
                item % tiles,
                lambda column: members[cutlass.min(start + column, end - 1)],
                end - start,
            )


# -- w2 --------------------------------------------------------------------------------------------------------------------------


def _output_tiles(
    c: Any, codes: Any, scales: Any, hidden: Any, expert: Any, first_row: Any, step: int, pair_of: Any
) -> list[list[Any]]:
    """`c.tiles` tiles of 16 rows of w2 times up to 8 hidden rows, `step` rows apart."""
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    chunks, first = c.width // (32 * c.words), quad * (8 * c.words)
    tiles = []
    for tile in range(c.tiles):
        base = expert * c.hidden + first_row + tile * step + row
        ends = (base, base + 8)
        tiles.append(
            (
                *(_byte(codes, r, c.width // 2) + first // 2 for r in ends),
                *(_byte(scales, r, c.width // 32) + first // 32 for r in ends),
            )
        )
    return _product(tiles, hidden.iterator + pair_of(row) * c.width + first, chunks, c.words, in_pairs=True)


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
    """A block owns c.tiles * 16 rows of one token; its warps share the token's experts, and the sum runs in slot order."""
    tile, row, _ = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    height = c.tiles * ROWS
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, c.top_k * height, alignment=16), cute.make_layout(c.top_k * height))
    token = dependency_wait()
    release_dependents()
    live = row < num_tokens.after(token)[0]
    if live:
        for slot in range(warp, c.top_k, c.warps):
            pair = row * c.top_k + slot
            expert = ids.after(token)[row, slot]
            acc = _output_tiles(
                c, codes.early(), scales.early(), hidden.after(token), expert, tile * height, ROWS, lambda _: pair
            )
            weight = weights.after(token)[row, slot]
            if lane % 4 == 0:
                for index in cutlass.range_constexpr(c.tiles):
                    for half in cutlass.range_constexpr(2):
                        shared[slot * height + index * ROWS + half * 8 + lane // 4] = acc[index][2 * half] * weight
    cute.arch.sync_threads()
    thread = warp * 32 + lane
    place = thread % height
    total = Float32(0.0)
    if live:
        for slot in cutlass.range_constexpr(c.top_k):
            total = total + shared[slot * height + place]
    store_bf16(out.after(token).iterator + row * c.hidden + tile * height + place, total, thread < height)


@cute.kernel
def _w2_grouped(
    codes: Static,
    scales: Static,
    hidden: Dynamic,
    offsets: Dynamic,
    pairs: Dynamic,
    active: Dynamic,
    num_active: Dynamic,
    partial: Output,
    c: cutlass.Constexpr,
):
    """A block owns c.warps * c.tiles * 16 rows of one expert; every pair's product goes out in bf16, to be summed by `_sum`."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    token = dependency_wait()
    release_dependents()
    starts, members, experts = offsets.after(token), pairs.after(token), active.after(token)
    height = c.warps * c.tiles * ROWS
    spans = c.hidden // height
    for item in range(block, num_active.after(token)[0] * spans, blocks):
        expert = experts[item // spans]
        end = starts[expert + 1]
        first = (item % spans) * height + warp * ROWS
        for start in range(starts[expert], end, LANES):
            acc = _output_tiles(
                c,
                codes.early(),
                scales.early(),
                hidden.after(token),
                expert,
                first,
                c.warps * ROWS,
                lambda column: members[cutlass.min(start + column, end - 1)],
            )
            for column in cutlass.range_constexpr(2):
                position = start + (lane % 4) * 2 + column
                pair = members[cutlass.min(position, end - 1)]
                target = partial.after(token).iterator + pair * c.hidden + first + lane // 4
                for index in cutlass.range_constexpr(c.tiles):
                    for half in cutlass.range_constexpr(2):
                        value = acc[index][2 * half + column]
                        store_bf16(target + (index * c.warps * ROWS + half * 8), value, Boolean(position < end))


@cute.kernel
def _sum(partial: Dynamic, weights: Dynamic, num_tokens: Dynamic, out: Output, c: cutlass.Constexpr):
    """r = sum over slots of weight * partial, in slot order, fp32, rounded once; zero for a padded row."""
    block, row, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    place = block * c.threads + thread
    token = dependency_wait()
    release_dependents()
    total = Float32(0.0)
    if row < num_tokens.after(token)[0]:
        rows = [partial.after(token)[row, slot, place].to(Float32) for slot in range(c.top_k)]
        scales = [weights.after(token)[row, slot] for slot in range(c.top_k)]
        for slot in cutlass.range_constexpr(c.top_k):
            total = total + rows[slot] * scales[slot]
    out.after(token)[row, place] = total.to(cutlass.BFloat16)


# -- entries ---------------------------------------------------------------------------------------------------------------------


def mxfp4_w13_pairs(config, codes, scales, z, ids, num_tokens, hidden, stream):
    """See `_w13_pairs`."""
    _w13_pairs(codes, scales, z, ids, num_tokens, hidden, config).launch(
        grid=[config.grid, 1, 1], block=[32 * config.split, 1, 1], stream=stream, use_pdl=True
    )


def mxfp4_w13_grouped(config, codes, scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See `_w13_grouped`."""
    _w13_grouped(codes, scales, z, offsets, pairs, active, num_active, hidden, config).launch(
        grid=[config.grid, 1, 1], block=[32 * config.split, 1, 1], stream=stream, use_pdl=True
    )


def mxfp4_w2_pairs(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See `_w2_pairs`."""
    _w2_pairs(codes, scales, hidden, ids, weights, num_tokens, out, config).launch(
        grid=[config.hidden // (ROWS * config.tiles), config.tokens, 1],
        block=[32 * config.warps, 1, 1],
        stream=stream,
        use_pdl=True,
    )


def mxfp4_w2_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, partial, stream):
    """See `_w2_grouped`."""
    _w2_grouped(codes, scales, hidden, offsets, pairs, active, num_active, partial, config).launch(
        grid=[config.grid, 1, 1], block=[32 * config.warps, 1, 1], stream=stream, use_pdl=True
    )


def experts_sum(config, partial, weights, num_tokens, out, stream):
    """See `_sum`."""
    _sum(partial, weights, num_tokens, out, config).launch(
        grid=[config.hidden // config.threads, config.tokens, 1], block=[config.threads, 1, 1], stream=stream, use_pdl=True
    )
