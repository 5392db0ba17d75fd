"""What the kernels for pairs (`cute`) and for groups (`grouped`) share: MXFP4 in registers, rows of z in fp16, copies, SiTU.

Decoding is exact and is most of the instructions: the nibble s|eem placed at bits 15 and 11..9 of an fp16 is the value times
2^-14, subnormals included. Two steps serve four nibbles (select sign from the word, magnitude from its shift by three; then two
masks). A register so holds the columns (i, i + 4) of eight; activations are stored in that order.

Activations are fp16, which holds a bf16 exactly inside its range. A row of z, or a part of it, is brought into it by a power of
two, so that the largest value lies in [2^14, 2^15); the bounded hidden values by one constant (`hidden_shift`).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.ptx import prefetch_bytes, sigmoid, store_shared
from ..device.reduce import warp_max
from ..device.vectors import load_words, unpack_bf16
from .layout import GROUP

SHIFT = 14  # decoded weights are 2^-SHIFT times their value
PIECES, SCALE_PIECES = 64, 8  # parts in which an expert's w2 and its scales are asked into L2


# -- decoding and multiplying ----------------------------------------


def _select(mask: int, a: Any, b: Any) -> Any:
    """Bits of a where the mask is set, else of b."""
    return inline_ptx(f"lop3.b32 {{$w0}}, {mask:#x}, {{$r0}}, {{$r1}}, 0xCA;", write_only_types=[Uint32], read_only_args=[a, b])


def decode(word: Any) -> list[Any]:
    """Eight nibbles to four fp16 pairs, times 2^-14: columns (0, 4), (1, 5), (2, 6), (3, 7)."""
    mask = Uint32(0x8E008E00)
    odd = _select(0x80808080, word, word >> 3)
    even = _select(0x80808080, word << 4, word << 1)
    return [(even << 8) & mask, (odd << 8) & mask, even & mask, odd & mask]


def mma(a: list[Any], b: list[Any], acc: list[Any]) -> list[Any]:
    """a[16x16] b[16x8] + acc by one warp, fp16 in, fp32 out."""
    return list(
        inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )


def read_word(address: Any) -> Any:
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def read_scale(address: Any) -> Any:
    """2^(s - 127)."""
    code = inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])
    return (code << 23).bitcast(Float32)


# -- rows of z, SiTU, sums ----------------------------------------


def largest(words: list[Any]) -> Any:
    """The largest magnitude in words of two bf16; NaN counts as nothing."""
    found = Float32(0.0)
    for word in words:
        for value in unpack_bf16(word):
            found = inline_ptx(
                "{ .reg .f32 a; abs.f32 a, {$r0}; max.f32 {$w0}, a, {$r1}; }",
                write_only_types=[Float32],
                read_only_args=[value, found],
            )
    return found


def powers(most: Any) -> tuple[Any, Any]:
    """The power of two that brings values of magnitude `most` and less into fp16, and the bits of the one that undoes it and
    the weights' 2^-14.
    """
    exponent = cutlass.max(most.bitcast(Uint32) >> 23, Uint32(2 * SHIFT))  # biased; 255 where a value is infinite
    scale = ((Uint32(254 + SHIFT) - exponent) << 23).bitcast(Float32)  # 2^SHIFT / 2^(exponent - 127)
    return scale, exponent << 23  # 2^(exponent - 127 - SHIFT) for the values, 2^SHIFT for the weights


def pack_half(low: Any, high: Any) -> Any:
    """Two fp32 values to a word of two fp16."""
    return inline_ptx("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low])


def load_row(columns: int, source: Any, target: Any, factor: Any) -> None:
    """One warp brings `columns` of a row of z into fp16, in column pairs; `factor` gets the power of two that undoes it and the
    weights' 2^-14.
    """
    lane = cute.arch.lane_idx()
    units = columns // 8
    words = [load_words(source + cutlass.min(first + lane, units - 1) * 8) for first in range(0, units, 32)]
    scale, undo = powers(warp_max(largest([word for four in words for word in four])))
    for turn, four in enumerate(words):
        unit = turn * 32 + lane
        values = []
        for word in four:
            values += [value * scale for value in unpack_bf16(word)]
        packed = [pack_half(values[i], values[i + 4]) for i in range(4)]  # the columns (i, i + 4), see `decode`
        store_shared(target + unit * 16, packed, None if turn * 32 + 32 <= units else unit < units)
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[factor, undo], predicate=lane == 0)


def store_half(pointer: Any, value: Any) -> None:
    """One value in fp16, saturated at its largest finite value; NaN stays NaN."""
    bounded = inline_ptx(
        "{ .reg .f32 a; min.NaN.f32 a, {$r0}, 0f477FE000; max.NaN.f32 {$w0}, a, 0fC77FE000; }",  # 65504
        write_only_types=[Float32],
        read_only_args=[value],
    )
    inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[pointer, bounded.to(Float16).bitcast(Uint16)])


def _tanh(x: Any) -> Any:
    """tanh to about 1e-6 of its value: 1 - 2 / (1 + e^2x) loses small values to cancellation, where x - x^3/3 is exact enough."""
    small = x * (Float32(1.0) - x * x * Float32(1.0 / 3.0))
    large = Float32(1.0) - Float32(2.0) / (Float32(1.0) + cute.math.exp(x + x))
    return inline_ptx(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, {$r0}; setp.lt.f32 p, a, 0f3CF5C28F; selp.f32 {$w0}, {$r1}, {$r2}, p; }",  # 0.03
        write_only_types=[Float32],
        read_only_args=[x, small, large],
    )


def situ(gate: Any, up: Any, beta: float, linear_beta: float | None) -> Any:
    """b tanh(g / b) sigmoid(g) * (lb tanh(u / lb), or u where unbounded)."""
    bounded = up if linear_beta is None else Float32(linear_beta) * _tanh(up * Float32(1.0 / linear_beta))
    return Float32(beta) * _tanh(gate * Float32(1.0 / beta)) * sigmoid(gate) * bounded


@cute.jit
def clear(sums: Any, count: cutlass.Constexpr, threads: cutlass.Constexpr, unroll: cutlass.Constexpr):
    """Set `count` sums to zero, by all threads of the block. unroll: turns of the loop at a time; -1: the compiler says."""
    thread, _, _ = cute.arch.thread_idx()
    for place in cutlass.range(thread, count, threads, unroll=unroll):
        sums[place] = Float32(0.0)


@cute.jit
def write_sums(c: cutlass.Constexpr, sums: Any, out: Any, unroll: cutlass.Constexpr):
    """Add the warps' sums in order and store them in bf16. Padded rows have nothing in them and come out as zero. unroll: as for
    `clear`.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    for place in cutlass.range(thread, out.shape[0] * c.height, 32 * c.warps, unroll=unroll):
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(c.warps):
            total = total + sums[warp * (c.rows * c.height) + place]
        out[place // c.height, block * c.height + place % c.height] = total.to(BFloat16)


# -- launches, copies and barriers ----------------------------------------


def launch(kernel: Any, grid: int, warps: int, stream: Any) -> None:
    """One block of so many warps an SM, with all of its shared memory, as soon as the launch before it lets go."""
    block, shape = [32 * warps, 1, 1], [grid, 1, 1]
    kernel.launch(grid=shape, block=block, min_blocks_per_mp=1, preferred_smem_carveout=100, stream=stream, use_pdl=True)


def bulk(target: Any, source: Any, size: Any, barrier: Any, predicate: Any = None) -> None:
    """Start copying `size` bytes (16-byte aligned, as both ends) into shared memory; they count on the barrier."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
        predicate=predicate,
    )


@cute.jit
def init_barriers(barriers: Any, count: cutlass.Constexpr, special: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """`count` barriers of one arrival, but the first `special` ones of `arrivals`; then the block meets."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        wanted = Int32(arrivals)
        if thread >= special:
            wanted = Int32(1)
        cute.arch.mbarrier_init(barriers + thread, wanted)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def byte(tensor: Any, row: Any, length: int) -> Any:
    """Pointer to a row of a byte tensor; 64 bits, since all experts of a layer may exceed 2 GiB."""
    return tensor.iterator + Int64(row) * length


def of_pair(c: Any, tensor: Any, pair: Any) -> Any:
    """What a [T, k] tensor, ids or routing weights, has for a pair."""
    return tensor[pair // c.top_k, pair % c.top_k]


def span(routes: tuple, expert: Any) -> tuple[Any, Any]:
    """An expert's pairs [start, end) of the sorted list. routes: offsets, pairs, active."""
    return routes[0][expert], routes[0][expert + 1]


@cute.jit
def list_pairs(c: cutlass.Constexpr, ids: Any, weights: Any, table: Any):
    """Expert and routing weight of every pair, read once, by all threads.

    Those of padded rows too, which are never fetched: so no read waits for `num_tokens`.
    """
    experts, factors = table
    thread, _, _ = cute.arch.thread_idx()
    for pair in cutlass.range(thread, weights.shape[0] * c.top_k, 32 * c.warps, unroll=1):
        experts[pair] = of_pair(c, ids, pair)
        factors[pair] = of_pair(c, weights, pair)


@cute.jit
def list_groups(c: cutlass.Constexpr, routes: Any, weights: Any, entries: Any, table: Any):
    """Expert, start and end of every entry; pair and routing weight of every place in the list: read once, by all threads."""
    experts, starts, ends, pairs, factors = table
    thread, _, _ = cute.arch.thread_idx()
    for entry in range(thread, entries, 32 * c.warps):
        expert = routes[2][entry]
        experts[entry] = expert
        starts[entry], ends[entry] = span(routes, expert)
    for place in range(thread, weights.shape[0] * c.top_k, 32 * c.warps):
        pair = routes[1][place]
        inside = (pair < weights.shape[0] * c.top_k) & (pair >= 0)  # beyond the last group the list holds anything
        pairs[place] = pair
        factors[place] = Float32(0.0)
        if inside:
            factors[place] = of_pair(c, weights, pair)


@cute.jit
def ask_for_w2(c: cutlass.Constexpr, codes: Any, scales: Any, values: cutlass.Constexpr, ids: Any, entries: Any):
    """One warp of every block: this block's share of the first `c.ahead` experts of w2 into L2. codes, scales: addresses of the
    first expert's. values: of an expert as it lies in memory, with padding behind it, which is not asked for.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    each = cutlass.const_expr(PIECES + SCALE_PIECES)
    size = cutlass.const_expr(c.hidden * c.width // 2 // PIECES)
    scale_size = cutlass.const_expr(c.hidden * c.width // GROUP // SCALE_PIECES)
    pieces = cutlass.min(entries, c.ahead) * each
    for piece in range(block + cute.arch.lane_idx() * blocks, pieces, 32 * blocks):
        expert = Int64(of_pair(c, ids, piece // each))
        index = piece % each
        code = codes + (expert * (values // 2) + index * size)
        scale = scales + (expert * (values // GROUP) + (index - PIECES) * scale_size)
        prefetch_bytes(code, size, index < PIECES)
        prefetch_bytes(scale, scale_size, index >= PIECES)
