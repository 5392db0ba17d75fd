"""The MLA decode kernels: query projection with cache insert, absorb, split-context attention, merge, value projection with gate.

Matrices meet the tensor core as `mma.m16n8k16`. The order of k inside a product is free as long as both operands agree, so a
lane takes eight neighbouring values of a row for two steps; and the order of n is free as long as the output is read back alike,
so where an operand lies with n contiguous (W_UK, the cached latents as values) a lane takes eight neighbouring n of a row for
eight steps and pairs two rows by byte permutation. Nothing is transposed in memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.ptx import copy_async, load_shared, mma_bf16, store_shared
from ..device.reduce import warp_max, warp_sum
from ..device.vectors import load_words, load_words_streaming, pack_bf16, store_words, unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents

LOG2E = 1.4426950408889634
NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
QUERY = NOPE + ROPE  # rows of q_b of one head
ROW = LATENT + ROPE  # values of a cached row
KEYS = 64  # keys of one attention tile
NEGATIVE_INFINITY = -float("inf")


# -- small pieces ----------------------------------------


def _at(tensor, offset, divisible_by=8):
    return tensor.iterator + cute.assume(offset, divby=divisible_by)


def _reciprocal(x):
    """1 / x of a positive normal number, to the last bit or next to it. A division would call a subroutine for its rare cases."""
    guess = cute.arch.rcp_approx(x)
    return guess * (Float32(2.0) - x * guess)


def _sigmoid(x):
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2E), fastmath=True))


def _pair(even, odd):
    """Words of two rows to words of one column each: (row, row + 1) of the even column, then of the odd column."""
    low = inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", write_only_types=[Uint32], read_only_args=[even, odd])
    high = inline_ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", write_only_types=[Uint32], read_only_args=[even, odd])
    return low, high


def _mma_f16(acc, a, b0, b1):
    acc[:] = inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, b0, b1, *acc],
    )


def _pack_e4m3(values):
    """Four fp32 to E4M3, saturating, in one word."""
    return inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; "
        "mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def _unpack_e4m3(word):
    """The four E4M3 of a word as two words of two f16, exactly."""
    return inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


def _widen(words):
    return (*_unpack_e4m3(words[0]), *_unpack_e4m3(words[1]))


def _pack_f16(even, odd):
    return inline_ptx("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[even, odd])


def _eight(words):
    return [value for word in words for value in unpack_bf16(word)]


def _bf16_words(values):
    return tuple(pack_bf16(values[i], values[i + 1]) for i in range(0, len(values), 2))


def _norm(pieces, weights, columns, eps):
    """RMSNorm of a warp's row: `pieces` and `weights` are this lane's words of it. Returns words of bf16."""
    values = [_eight(words) for words in pieces]
    square = Float32(0.0)
    for piece in values:
        for v in piece:
            square = square + v * v
    scale = cute.math.rsqrt(cute.arch.warp_reduction_sum(square) * Float32(1.0 / columns) + Float32(eps))
    scaled = [
        [v * scale * w for v, w in zip(piece, _eight(weight), strict=True)] for piece, weight in zip(values, weights, strict=True)
    ]
    return [_bf16_words(piece) for piece in scaled]


def _store_row_piece(tensor, offset, words, factor, fp8):
    """Eight neighbouring values at `offset` elements: as they are, or times `factor` as E4M3."""
    if fp8:
        values = [v * factor for v in _eight(words)]
        inline_ptx(
            "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[_at(tensor, offset), _pack_e4m3(values[:4]), _pack_e4m3(values[4:])],
        )
    else:
        store_words(_at(tensor, offset), words)


def _chunks(c, tokens):
    """Blocks that share a weight tile, each for every n-th group of `tokens` tokens: they take the tile from L2, and their
    latencies overlap."""
    return min((c.tokens + tokens - 1) // tokens, 4)


# -- query: norms, q_b, cache insert ----------------------------------------


@cute.kernel
def _project(
    x: Dynamic,
    q_norm: Static,
    kv_norm: Static,
    q_b: Static,
    scales: Static,
    slot_mapping: Dynamic,
    cache: Dynamic,
    q: Output,
    c: cutlass.Constexpr,
):
    """q = q_b(RMSNorm(q_a)), 16 rows a block; the last blocks write the cache rows. Eight warps split K, a token a warp for the
    norm."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, chunk, _ = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    quad, slot = lane // 4, lane % 4
    tiles = c.heads * QUERY // 16
    share = c.q_rank // 8  # columns of a warp
    pitch = c.q_rank + 32  # an odd multiple of 64 bytes: rows of neighbouring tokens fall on other banks
    memory = cutlass.memory.SmemAllocator()
    together = 8 if c.tokens <= 8 else 16  # tokens of a pass
    x_smem = cute.make_tensor(
        memory.allocate_array(BFloat16, together * pitch, byte_alignment=16), cute.make_layout(together * pitch)
    )
    sums = cute.make_tensor(
        memory.allocate_array(Float32, 8 * together * 17, byte_alignment=16), cute.make_layout(8 * together * 17)
    )

    norm_smem = cute.make_tensor(memory.allocate_array(BFloat16, c.q_rank, byte_alignment=16), cute.make_layout(c.q_rank))

    if block < tiles:
        if thread < c.q_rank // 8:
            copy_async(_at(norm_smem, thread * 8), _at(q_norm.early(), thread * 8), Int32(16))
        cute.arch.cp_async_commit_group()
        rows = [block * 16 + quad, block * 16 + quad + 8]
        weights = [
            [load_words_streaming(_at(q_b.early(), Int64(row) * c.q_rank + warp * share + j * 32 + slot * 8)) for row in rows]
            for j in range(share // 32)
        ]
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        token_ready = dependency_wait()
        source, target = x.after(token_ready), q.after(token_ready)
        for first in cutlass.range(chunk * together, c.tokens, together * _chunks(c, together), unroll=1):
            at = [i * 256 + lane * 8 for i in range(c.q_rank // 256)]
            for n in cutlass.range_constexpr(together // 8):
                token = cutlass.min(first + n * 8 + warp, c.tokens - 1)
                for i in at:
                    copy_async(_at(x_smem, (n * 8 + warp) * pitch + i), _at(source, token * c.columns + i), Int32(16))
                cute.arch.cp_async_commit_group()
            for n in cutlass.range_constexpr(together // 8):
                cute.arch.cp_async_wait_group(together // 8 - 1 - n)
                places = [_at(x_smem, (n * 8 + warp) * pitch + i) for i in at]  # what this lane copied
                square = Float32(0.0)
                for place in places:
                    for v in _eight(load_shared(place)):
                        square = square + v * v
                scale = cute.math.rsqrt(cute.arch.warp_reduction_sum(square) * Float32(1.0 / c.q_rank) + Float32(c.norm_eps))
                for i, place in zip(at, places, strict=True):  # once more from shared memory: 48 values are too many to keep
                    values = zip(_eight(load_shared(place)), _eight(load_shared(_at(norm_smem, i))), strict=True)
                    store_shared(place, _bf16_words([v * scale * w for v, w in values]))
            cute.arch.sync_threads()
            acc = [[Float32(0.0)] * 4 for _ in range(together // 8)]
            for j in cutlass.range_constexpr(share // 32):
                top, bottom = weights[j]
                for n in cutlass.range_constexpr(together // 8):
                    operand = load_shared(_at(x_smem, (n * 8 + quad) * pitch + warp * share + j * 32 + slot * 8))
                    for s in (0, 2):
                        mma_bf16(acc[n], (top[s], bottom[s], top[s + 1], bottom[s + 1]), operand[s], operand[s + 1])
            for n in cutlass.range_constexpr(together // 8):
                for i in cutlass.range_constexpr(4):
                    place = (warp * together + n * 8 + slot * 2 + i % 2) * 17 + quad + 8 * (i // 2)
                    sums[place] = acc[n][i]
            cute.arch.sync_threads()
            if thread < 16 * together and first + thread // 16 < c.tokens:
                total = Float32(0.0)
                for w in cutlass.range_constexpr(8):
                    total = total + sums[(w * together + thread // 16) * 17 + thread % 16]
                target[first + thread // 16, block * 16 + thread % 16] = BFloat16(total)
            cute.arch.sync_threads()
    else:
        _insert(x, kv_norm, scales, slot_mapping, cache, (block - tiles) * 8 + warp, chunk == 0, lane, c)


def _insert(x, kv_norm, scales, slot_mapping, cache, row, wanted, lane, c):
    """A warp writes the cache row of a token: [RMSNorm(kv_a) | k_pe], where `wanted`. Waits for the kernel before."""
    weights = [load_words(_at(kv_norm.early(), i * 256 + lane * 8)) for i in range(LATENT // 256)]
    factor = _reciprocal(scales.early()[1])
    ready = dependency_wait()
    _store_cache_row(x.after(ready), weights, factor, slot_mapping.after(ready), cache.after(ready), row, wanted, lane, c)


@cute.jit
def _store_cache_row(x, weights, factor, slot_mapping, cache, row, wanted, lane, c: cutlass.Constexpr):
    if wanted and row < c.tokens:
        place = slot_mapping[row]
        if place >= 0:
            start = place // c.block_size * cache.stride[0] + place % c.block_size * ROW
            pieces = [load_words(_at(x, row * c.columns + c.q_rank + i * 256 + lane * 8)) for i in range(LATENT // 256)]
            normed = _norm(pieces, weights, LATENT, c.norm_eps)
            for i in cutlass.range_constexpr(LATENT // 256):
                _store_row_piece(cache, start + i * 256 + lane * 8, normed[i], factor, c.fp8)
            if lane < ROPE // 8:
                words = load_words(_at(x, row * c.columns + c.q_rank + LATENT + lane * 8))
                _store_row_piece(cache, start + LATENT + lane * 8, words, factor, c.fp8)


@cute.kernel
def _norms(
    x: Dynamic,
    q_norm: Static,
    kv_norm: Static,
    scales: Static,
    slot_mapping: Dynamic,
    cache: Dynamic,
    normed: Output,
    c: cutlass.Constexpr,
):
    """normed = RMSNorm(q_a), and the cache row: a block a token, one warp for each. Every block of `_project` norms all tokens, a
    hundred times over; with many of them this kernel does it once, and a plain product follows."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    if warp == 0:
        weights = [load_words(_at(q_norm.early(), i * 256 + lane * 8)) for i in range(c.q_rank // 256)]
        ready = dependency_wait()
        source, target = x.after(ready), normed.after(ready)
        pieces = [load_words(_at(source, row * c.columns + i * 256 + lane * 8)) for i in range(c.q_rank // 256)]
        scaled = _norm(pieces, weights, c.q_rank, c.norm_eps)
        for i in cutlass.range_constexpr(c.q_rank // 256):
            store_words(_at(target, row * c.q_rank + i * 256 + lane * 8), scaled[i])
    else:
        _insert(x, kv_norm, scales, slot_mapping, cache, row, True, lane, c)


# -- query: absorb W_UK ----------------------------------------


@cute.kernel
def _absorb(q: Dynamic, w_uk: Static, scales: Static, query: Output, c: cutlass.Constexpr):
    """query[t, head] = [q_nope W_UK | q_pe], 64 latent columns a block. Four warps split the 128 rows of W_UK."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, chunk, _ = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    quad, slot = lane // 4, lane % 4
    head, tile = block // (LATENT // 64), block % (LATENT // 64)
    memory = cutlass.memory.SmemAllocator()
    sums = cute.make_tensor(memory.allocate_array(Float32, 4 * 16 * 68, byte_alignment=16), cute.make_layout(4 * 16 * 68))

    weights = []
    for step in cutlass.range_constexpr(2):
        rows = [warp * 32 + step * 16 + slot * 2 + r for r in (0, 1, 8, 9)]
        weights.append(
            [
                load_words_streaming(_at(w_uk.early(), (head * w_uk.layout.stride[0]) + row * LATENT + tile * 64 + quad * 8))
                for row in rows
            ]
        )
    factor = _reciprocal(scales.early()[0])
    token_ready = dependency_wait()
    source, target = q.after(token_ready), query.after(token_ready)
    words = cute.make_tensor(cute.recast_ptr(source.iterator, dtype=Uint32), cute.make_layout(c.tokens * c.heads * QUERY // 2))

    for first in cutlass.range(chunk * 16, c.tokens, 16 * _chunks(c, 16), unroll=1):
        tokens = [cutlass.min(first + quad, c.tokens - 1), cutlass.min(first + quad + 8, c.tokens - 1)]
        acc = [[Float32(0.0)] * 4 for _ in range(8)]
        for step in cutlass.range_constexpr(2):
            column = (head * QUERY + warp * 32 + step * 16) // 2 + slot
            a = [words[tokens[i % 2] * (c.heads * QUERY // 2) + column + 4 * (i // 2)] for i in range(4)]
            r0, r1, r8, r9 = weights[step]
            for w in cutlass.range_constexpr(4):
                (b0_even, b0_odd), (b1_even, b1_odd) = _pair(r0[w], r1[w]), _pair(r8[w], r9[w])
                mma_bf16(acc[2 * w], a, b0_even, b1_even)
                mma_bf16(acc[2 * w + 1], a, b0_odd, b1_odd)
        for j in cutlass.range_constexpr(8):
            for i in cutlass.range_constexpr(4):
                sums[warp * 1088 + (quad + 8 * (i // 2)) * 68 + (slot * 2 + i % 2) * 8 + j] = acc[j][i]
        cute.arch.sync_threads()
        token = first + thread // 8
        if token < c.tokens:
            totals = []
            for e in cutlass.range_constexpr(8):
                total = Float32(0.0)
                for w in cutlass.range_constexpr(4):
                    total = total + sums[w * 1088 + (thread // 8) * 68 + thread % 8 * 8 + e]
                totals.append(total)
            _store_row_piece(
                target, (token * c.heads + head) * ROW + tile * 64 + thread % 8 * 8, _bf16_words(totals), factor, c.fp8
            )
            if tile == 0:
                rope = load_words(_at(source, (token * c.heads + head) * QUERY + NOPE + thread % 8 * 8))
                _store_row_piece(target, (token * c.heads + head) * ROW + LATENT + thread % 8 * 8, rope, factor, c.fp8)
        cute.arch.sync_threads()


# -- attention over the paged latents ----------------------------------------


class _Tile:
    """One stage of cached rows in shared memory, 16-byte pieces permuted within a row so that neither the score nor the value
    product meets a bank conflict. FP8 rows are kept as they are and widened on their way into registers."""

    def __init__(self, base, fp8):
        self.base, self.fp8 = base, fp8  # base: byte pointer of the stage
        self.row_bytes = ROW if fp8 else 2 * ROW

    def _place(self, row, piece):
        if self.fp8:  # the four pieces of k_pe do not fill a group of eight and stay where they are
            piece = cutlass.select_(piece < LATENT // 16, piece ^ (row // 2 % 4 * 2), piece)
        else:
            piece = piece ^ ((row % 2 * 4) ^ (row // 2 % 4 * 2))
        return self.base + (row * self.row_bytes + piece * 16)

    def fill(self, source, row, piece, wanted):
        copy_async(self._place(row, piece), source, wanted)

    def eight(self, row, column):
        """Columns [column, column + 8) of a row as four words of two bf16, or of two f16 from an FP8 cache."""
        if not self.fp8:
            return load_shared(self._place(row, column // 8))
        place = self._place(row, column // 16) + column % 16
        return _widen(
            inline_ptx("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[place])
        )


def _issue(cache, table, stages, request, tile, first_tile, last_tile, length, c):
    """Start copying a tile into its stage; always one group, so that groups count tiles. Keys past the context become zeros and
    read nothing, as do the tiles past this share that keep the count: a product with a weight of 0 must not meet what a page
    holds beyond the context."""
    thread, _, _ = cute.arch.thread_idx()
    start = cutlass.max(cutlass.min(tile, last_tile - 1), 0) * KEYS
    base = Int64(table[request, start // c.block_size]) * cache.stride[0] + start % c.block_size * ROW
    stage = _Tile(stages + (tile - first_tile) % c.stages * (KEYS * (ROW if c.fp8 else 2 * ROW)), c.fp8)
    per_row = 4 if c.fp8 else 8  # threads of a row; each moves nine pieces of 16 bytes
    for i in range(KEYS * per_row // 256):
        key = thread // per_row + i * (256 // per_row)
        wanted = Int32((tile < last_tile) & (start + key < length)) * 16
        for j in range(9):
            piece = thread % per_row + j * per_row
            stage.fill(_at(cache, base + key * ROW + piece * (16 if c.fp8 else 8)), key, piece, wanted)
    cute.arch.cp_async_commit_group()


@cute.kernel
def _attend(
    query: Dynamic,
    cache: Dynamic,
    table: Dynamic,
    lengths: Dynamic,
    scales: Static,
    latent: Output,
    lse: Output,
    c: cutlass.Constexpr,
):
    """Attention of 16 (token, head) rows of one request over one share of its context; both score and value operand is the
    cached row."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    split, row_tile, request = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    quad, slot = lane // 4, lane % 4
    key_group, half = warp // 2, warp % 2  # scores: 16 of the tile's keys, half of the row's dimensions
    stage_bytes = KEYS * (ROW if c.fp8 else 2 * ROW)
    rows_total = c.queries * c.heads
    memory = cutlass.memory.SmemAllocator()
    stages = memory.allocate_array(cutlass.Uint8, c.stages * stage_bytes, byte_alignment=128)
    scores = cute.make_tensor(memory.allocate_array(Float32, 2 * 16 * 68, byte_alignment=16), cute.make_layout(2 * 16 * 68))
    weights = cute.make_tensor(memory.allocate_array(Uint32, 16 * 36, byte_alignment=16), cute.make_layout(16 * 36))
    rescale = cute.make_tensor(memory.allocate_array(Float32, 16, byte_alignment=16), cute.make_layout(16))

    scale = Float32(c.scale * LOG2E)
    value_scale = Float32(1.0)
    if cutlass.const_expr(c.fp8):
        scale = scale * scales.early()[0] * scales.early()[1]
        value_scale = scales.early()[1]
    token_ready = dependency_wait()
    query, cache, table = query.after(token_ready), cache.after(token_ready), table.after(token_ready)
    latent, lse = latent.after(token_ready), lse.after(token_ready)
    length = lengths.after(token_ready)[request]
    tile_count = (length + KEYS - 1) // KEYS
    share = (tile_count + c.splits - 1) // c.splits
    first_tile = split * share
    last_tile = cutlass.min(first_tile + share, tile_count)

    # Rows of this tile: (token, head) pairs of the request. Rows past the end repeat the last one and are not stored.
    rows = [cutlass.min(row_tile * 16 + quad + 8 * i, rows_total - 1) for i in (0, 1)]
    query_rows = [Int64(request * rows_total + row) * ROW for row in rows]
    softmax_row = row_tile * 16 + warp * 2 + lane // 16
    visible = length - (
        c.queries - 1 - cutlass.min(softmax_row, rows_total - 1) // c.heads
    )  # a token does not see those after it

    acc = cute.make_rmem_tensor((8, 4), Float32)
    acc.fill(0.0)
    maximum, total = Float32(NEGATIVE_INFINITY), Float32(0.0)

    q_words = cute.make_rmem_tensor((9, 2, 4), Uint32)
    for j in cutlass.range_constexpr(9):
        for i in cutlass.range_constexpr(2):
            words = _query_words(query, query_rows[i] + half * 288 + j * 32 + slot * 8, c.fp8)
            for w in cutlass.range_constexpr(4):
                q_words[j, i, w] = words[w]
    for ahead in cutlass.range_constexpr(c.stages - 1):
        _issue(cache, table, stages, request, first_tile + ahead, first_tile, last_tile, length, c)
    for tile in cutlass.range(first_tile, last_tile, unroll=1):
        cute.arch.cp_async_wait_group(c.stages - 2)
        cute.arch.sync_threads()  # the tile is here, and the one before it is no longer read
        _issue(cache, table, stages, request, tile + c.stages - 1, first_tile, last_tile, length, c)
        stage = _Tile(stages + (tile - first_tile) % c.stages * stage_bytes, c.fp8)

        # Scores of 16 keys over half of the dimensions.
        for n in cutlass.range_constexpr(2):
            part = [Float32(0.0)] * 4
            for j in cutlass.range_constexpr(9):
                operand = stage.eight(key_group * 16 + n * 8 + quad, half * 288 + j * 32 + slot * 8)
                for s in (0, 2):
                    a = (q_words[j, 0, s], q_words[j, 1, s], q_words[j, 0, s + 1], q_words[j, 1, s + 1])
                    (_mma_f16 if c.fp8 else mma_bf16)(part, a, operand[s], operand[s + 1])
            for i in cutlass.range_constexpr(4):
                scores[half * 1088 + (quad + 8 * (i // 2)) * 68 + key_group * 16 + n * 8 + slot * 2 + i % 2] = part[i]
        cute.arch.sync_threads()

        # Softmax: half a warp a row, four keys a lane.
        at = (warp * 2 + lane // 16) * 68 + lane % 16 * 4
        logits = []
        highest = maximum
        for e in cutlass.range_constexpr(4):
            seen = tile * KEYS + lane % 16 * 4 + e < visible
            logit = cutlass.select_(seen, (scores[at + e] + scores[1088 + at + e]) * scale, Float32(NEGATIVE_INFINITY))
            logits.append(logit)
            highest = cute.arch.fmax(highest, logit)
        highest = cute.arch.warp_reduction_max(highest, threads_in_group=16)
        base = cutlass.select_(highest == Float32(NEGATIVE_INFINITY), Float32(0.0), highest)
        parts = [cute.math.exp2(logit - base, fastmath=True) for logit in logits]
        correction = cute.math.exp2(maximum - base, fastmath=True)
        total = total * correction + cute.arch.warp_reduction_sum(
            parts[0] + parts[1] + (parts[2] + parts[3]), threads_in_group=16
        )
        maximum = highest
        pack = _pack_f16 if c.fp8 else pack_bf16
        for e in (0, 2):
            weights[(warp * 2 + lane // 16) * 36 + lane % 16 * 2 + e // 2] = pack(parts[e], parts[e + 1])
        rescale[warp * 2 + lane // 16] = correction
        cute.arch.sync_threads()

        # Values: 64 of the 512 latent columns a warp.
        factors = [rescale[quad], rescale[quad + 8]]
        sums = [[acc[j, i] * factors[i // 2] for i in range(4)] for j in range(8)]
        for step in cutlass.range_constexpr(KEYS // 16):
            a = [weights[(quad + 8 * (i % 2)) * 36 + step * 8 + slot + 4 * (i // 2)] for i in range(4)]
            r0, r1, r8, r9 = (stage.eight(step * 16 + slot * 2 + r, warp * 64 + quad * 8) for r in (0, 1, 8, 9))
            for w in cutlass.range_constexpr(4):
                (b0_even, b0_odd), (b1_even, b1_odd) = _pair(r0[w], r1[w]), _pair(r8[w], r9[w])
                (_mma_f16 if c.fp8 else mma_bf16)(sums[2 * w], a, b0_even, b1_even)
                (_mma_f16 if c.fp8 else mma_bf16)(sums[2 * w + 1], a, b0_odd, b1_odd)
        for j in cutlass.range_constexpr(8):
            for i in cutlass.range_constexpr(4):
                acc[j, i] = sums[j][i]
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()

    # Normalise. A share without keys has total 0: zeros and -inf.
    if lane % 16 == 0:
        rescale[warp * 2 + lane // 16] = cutlass.select_(total > 0.0, value_scale * _reciprocal(total), Float32(0.0))
        if softmax_row < rows_total:
            natural = Float32(1.0 / LOG2E) * (maximum + cute.math.log2(total))
            lse[split, request * rows_total + softmax_row] = cutlass.select_(total > 0.0, natural, Float32(NEGATIVE_INFINITY))
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(2):
        row = row_tile * 16 + quad + 8 * i
        factor = rescale[quad + 8 * i]
        if row < rows_total and (c.splits == 1 or last_tile > first_tile):
            for n in cutlass.range_constexpr(2):
                values = [acc[j, 2 * i + n] * factor for j in range(8)]
                offset = (
                    (Int64(split) * (c.requests * rows_total) + request * rows_total + row) * LATENT
                    + warp * 64
                    + (slot * 2 + n) * 8
                )
                if cutlass.const_expr(c.splits == 1):
                    store_words(_at(latent, offset), _bf16_words(values))
                else:
                    for piece in (0, 4):
                        store_words(_at(latent, offset + piece, 4), [v.bitcast(Uint32) for v in values[piece : piece + 4]])


def _query_words(query, offset, fp8):
    """Eight values of a query row, like `_Tile.eight`."""
    if not fp8:
        return load_words(_at(query, offset))
    pointer = _at(query, offset)
    return _widen(
        inline_ptx("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[pointer])
    )


@cute.kernel
def _merge(partial: Dynamic, partial_lse: Dynamic, latent: Output, lse: Output, c: cutlass.Constexpr):
    """The shares of the context weighed by their log-sum-exps. A block: 128 latent columns of one (token, head), four a lane; a
    warp takes every fourth share, eight on their way together, as there may be a hundred."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    row, part, _ = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    memory = cutlass.memory.SmemAllocator()
    sums = cute.make_tensor(memory.allocate_array(Float32, 4 * 128, byte_alignment=16), cute.make_layout(4 * 128))
    token_ready = dependency_wait()
    partial, partial_lse = partial.after(token_ready), partial_lse.after(token_ready)
    latent, lse = latent.after(token_ready), lse.after(token_ready)
    nothing = Float32(NEGATIVE_INFINITY)
    found = []  # of shares lane, lane + 32, ...
    for first in cutlass.range_constexpr(0, c.splits, 32):
        own = partial_lse[cutlass.min(first + lane, c.splits - 1), row]
        found.append(cutlass.select_(first + lane < c.splits, own, nothing))
    highest = nothing
    for own in found:
        highest = cute.arch.fmax(highest, own)
    highest = warp_max(highest)
    base = cutlass.select_(highest == nothing, Float32(0.0), highest)
    shares = [cute.math.exp2((own - base) * Float32(LOG2E), fastmath=True) for own in found]
    total = Float32(0.0)
    for share in shares:
        total = total + share
    total = warp_sum(total)
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    rows, column = c.tokens * c.heads, part * 128 + lane * 4
    for i in cutlass.range_constexpr(len(shares)):
        if warp_max(shares[i]) > 0.0:
            words, weights = [], []
            for j in cutlass.range_constexpr(8):
                split = cutlass.min(i * 32 + j * 4 + warp, c.splits - 1)
                words.append(load_words(_at(partial, (Int64(split) * rows + row) * LATENT + column, 4)))
                weights.append(cute.arch.shuffle_sync(shares[i], offset=j * 4 + warp))
            for j in cutlass.range_constexpr(8):
                for e in cutlass.range_constexpr(4):
                    value = weights[j] * words[j][e].bitcast(Float32)
                    acc[e] = acc[e] + cutlass.select_(weights[j] > 0.0, value, Float32(0.0))  # an empty share wrote nothing
    store_shared(_at(sums, warp * 128 + lane * 4, 4), [acc[e].bitcast(Uint32) for e in range(4)])
    cute.arch.sync_threads()
    value = sums[thread] + sums[128 + thread] + (sums[256 + thread] + sums[384 + thread])
    latent[row, part * 128 + thread] = BFloat16(cutlass.select_(total > 0.0, value * _reciprocal(total), Float32(0.0)))
    if part == 0 and thread == 0:
        natural = base + cute.math.log2(total) * Float32(1.0 / LOG2E)
        lse[row] = cutlass.select_(total > 0.0, natural, nothing)


# -- value projection and gate ----------------------------------------


@cute.kernel
def _value(x: Dynamic, latent: Dynamic, w_uv: Static, y: Output, c: cutlass.Constexpr):
    """y = bf(bf(latent W_UV^T) sigma(gate)), 16 of a head's rows a block; four warps split the 512 latent columns."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, chunk, _ = cute.arch.block_idx()
    lane, warp = thread % 32, thread // 32
    quad, slot = lane // 4, lane % 4
    head, tile = block // (VALUE // 16), block % (VALUE // 16)
    memory = cutlass.memory.SmemAllocator()
    sums = cute.make_tensor(memory.allocate_array(Float32, 4 * 136, byte_alignment=16), cute.make_layout(4 * 136))
    start = head * w_uv.layout.stride[0] + (tile * 16 + quad) * LATENT + warp * 128 + slot * 8
    weights = [[load_words_streaming(_at(w_uv.early(), start + r * LATENT + j * 32)) for r in (0, 8)] for j in range(4)]
    token_ready = dependency_wait()
    x, latent, y = x.after(token_ready), latent.after(token_ready), y.after(token_ready)
    for first in cutlass.range(chunk * 8, c.tokens, 8 * _chunks(c, 8), unroll=1):
        token = cutlass.min(first + quad, c.tokens - 1)
        acc = [Float32(0.0)] * 4
        operands = [load_words(_at(latent, (token * c.heads + head) * LATENT + warp * 128 + j * 32 + slot * 8)) for j in range(4)]
        for j in cutlass.range_constexpr(4):
            top, bottom = weights[j]
            for s in (0, 2):
                mma_bf16(acc, (top[s], bottom[s], top[s + 1], bottom[s + 1]), operands[j][s], operands[j][s + 1])
        for i in cutlass.range_constexpr(4):
            sums[warp * 136 + (slot * 2 + i % 2) * 17 + quad + 8 * (i // 2)] = acc[i]
        cute.arch.sync_threads()
        out = first + thread // 16
        if out < c.tokens:
            column = head * VALUE + tile * 16 + thread % 16
            total = Float32(0.0)
            for w in cutlass.range_constexpr(4):
                total = total + sums[w * 136 + thread // 16 * 17 + thread % 16]
            gate = Float32(x[out, c.q_rank + ROW + column])
            y[out, column] = BFloat16(Float32(BFloat16(total)) * _sigmoid(gate))
        cute.arch.sync_threads()


# -- entries ----------------------------------------


def mla_project(c, x, q_norm, kv_norm, q_b, scales, slot_mapping, cache, q, stream):
    grid = [c.heads * QUERY // 16 + (c.tokens + 7) // 8, _chunks(c, 8 if c.tokens <= 8 else 16), 1]
    _project(x, q_norm, kv_norm, q_b, scales, slot_mapping, cache, q, c).launch(
        grid=grid,
        block=[256, 1, 1],
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=100,
        min_blocks_per_mp=2,  # all blocks resident at once, and the next kernel's beside them
    )


def mla_norms(c, x, q_norm, kv_norm, scales, slot_mapping, cache, normed, stream):
    _norms(x, q_norm, kv_norm, scales, slot_mapping, cache, normed, c).launch(
        grid=[c.tokens, 1, 1], block=[64, 1, 1], stream=stream, use_pdl=True, preferred_smem_carveout=100
    )


def mla_absorb(c, q, w_uk, scales, query, stream):
    grid = [c.heads * LATENT // 64, _chunks(c, 16), 1]
    _absorb(q, w_uk, scales, query, c).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)


def mla_attend(c, query, cache, table, lengths, scales, latent, lse, stream):
    grid = [c.splits, (c.queries * c.heads + 15) // 16, c.requests]
    _attend(query, cache, table, lengths, scales, latent, lse, c).launch(
        grid=grid, block=[256, 1, 1], stream=stream, use_pdl=True
    )


def mla_merge(c, partial, partial_lse, latent, lse, stream):
    grid = [c.tokens * c.heads, LATENT // 128, 1]
    _merge(partial, partial_lse, latent, lse, c).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)


def mla_value(c, x, latent, w_uv, y, stream):
    grid = [c.heads * VALUE // 16, _chunks(c, 8), 1]
    _value(x, latent, w_uv, y, c).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)
