"""MXFP4 experts on the tensor cores (mma.sync m16n8k16): weights are the 16-row operand, up to 8 tokens of one expert the other.

A lane owns 4 * `words` bytes of a weight row at a time (16 for the served w13: 32 columns, one scale group) and decodes them in registers; the
four lanes of a quad hold neighbouring columns, together a chunk. The matrix unit does not care which column is called k = 0 as long as both
operands agree, so a decoded register holds the columns (i, i + 4) of a group of eight, which two masks give, instead of neighbours. The
activation follows: `w13` pairs the columns of z with four byte permutations, and writes its own output in that order already.

Decoding is exact: the nibble s|eem placed at bits 15 and 8..6 of a bf16 is the value times 2^-126, subnormals included, and one
bf16x2 multiplication by 2^(s - 1) gives value * 2^(s - 127).

Which expert a tile reads is known only after the dependency wait, so no weight can be fetched before it, and everything depends on many bytes
in flight. Loads to registers do not give that: the assembler moves them down to their use. So every warp copies asynchronously into a
stage of shared memory of its own, all of a tile at once and the next tile's while it computes; a lane reads back its own codes, so
a warp needs no barrier but its own.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.ptx import mma_bf16, sigmoid, store_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents

ROWS = 16  # rows of a tensor-core tile
PAD = 64  # bytes between activation rows in shared memory, so that the quads of two rows meet different banks


# -- decoding --------------------------------------------------------------------------------------------------------------------


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


# -- one warp's stage ------------------------------------------------------------------------------------------------------------


def _copy(target: Any, source: Any, size: int, predicate: Any = None) -> None:
    """Start copying `size` bytes (4, 8 or 16) from global to shared memory; 16 bytes pass the first-level cache by."""
    cache = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    inline_ptx(f"cp.async.{cache} [{{$r0}}], [{{$r1}}], {size};", read_only_args=[target, source], predicate=predicate)


def _read(pointer: Any, words: int) -> list[Any]:
    """`words` registers from shared memory."""
    if words == 1:
        return [inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])]
    places = ", ".join(f"{{$w{i}}}" for i in range(words))
    return list(
        inline_ptx(
            f"ld.shared.v{words}.b32 {{{places}}}, [{{$r0}}];", write_only_types=[Uint32] * words, read_only_args=[pointer]
        )
    )


def _read_scale(pointer: Any) -> Any:
    return inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[pointer])


class Stage:
    """What one warp fetches for `tiles` tiles of 16 rows and `slots` tokens over `chunks` chunks: where its parts lie, in bytes."""

    def __init__(self, tiles: int, chunks: int, words: int, slots: int) -> None:
        self.tiles, self.chunks, self.words, self.slots = tiles, chunks, words, slots
        self.scale_row = chunks * words  # scale bytes of a row
        self.token_row = chunks * 64 * words + PAD
        self.scales = tiles * chunks * 2 * 128 * words
        self.tokens = self.scales + tiles * ROWS * self.scale_row
        self.tokens = -(-self.tokens // 16) * 16
        self.size = -(-(self.tokens + slots * self.token_row) // 128) * 128

    def fetch_codes(self, stage: Any, tile: int, lower: Any, upper: Any) -> None:
        """lower, upper: pointers to this lane's first byte in rows g and g + 8."""
        lane = cute.arch.lane_idx()
        size = 4 * self.words
        for chunk in range(self.chunks):
            for half, source in enumerate((lower, upper)):
                place = ((tile * self.chunks + chunk) * 2 + half) * 32 * size
                _copy(stage + place + lane * size, source + chunk * 4 * size, size)

    def fetch_token(self, stage: Any, slot: int, row: Any, predicate: Any = None) -> None:
        """row: pointer to the first column of bf16 that this warp reads. A chunk's 16-byte units are stored word-major, see `product`."""
        lane = cute.arch.lane_idx()
        units = self.chunks * 4 * self.words
        for first in range(0, units, 32):
            unit = first + lane
            chunk, within = unit // (4 * self.words), unit % (4 * self.words)
            place = chunk * (4 * self.words) + (within % self.words) * 4 + within // self.words
            wanted = predicate if first + 32 <= units else _both(unit < units, predicate)
            _copy(stage + self.tokens + slot * self.token_row + place * 16, row + unit * 8, 16, wanted)

    def product(self, stage: Any, count: Any, in_pairs: bool) -> list[list[Any]]:
        """acc[tile] = weights[16, K] activation[K, 8]; the columns of the result from `count` on are of no meaning."""
        lane = cute.arch.lane_idx()
        row, quad = lane // 4, lane % 4
        size = 4 * self.words
        token = stage + self.tokens + cutlass.min(row, count - 1) * self.token_row + quad * 16
        scale = stage + self.scales + row * self.scale_row + quad * self.words // 4
        acc = [[Float32(0.0)] * 4 for _ in range(self.tiles)]
        for chunk in range(self.chunks):
            activation = [_read(token + (chunk * self.words + word) * 64, 4) for word in range(self.words)]
            if not in_pairs:
                activation = [_in_pairs(words) for words in activation]
            for tile in range(self.tiles):
                codes, factors = [], []
                for half in (0, 1):
                    place = ((tile * self.chunks + chunk) * 2 + half) * 32 * size
                    codes.append(_read(stage + place + lane * size, self.words))
                    factors.append(_factor(_read_scale(scale + (tile * ROWS + half * 8) * self.scale_row + chunk * self.words)))
                for word, b in enumerate(activation):
                    lower, upper = (_decode(codes[half][word], factors[half]) for half in (0, 1))
                    mma_bf16(acc[tile], (lower[0], upper[0], lower[1], upper[1]), b[0], b[1])
                    mma_bf16(acc[tile], (lower[2], upper[2], lower[3], upper[3]), b[2], b[3])
        return acc


def _both(a: Any, b: Any) -> Any:
    return a if b is None else a & b


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


def _fetch_w13(c: Any, layout: Stage, stage: Any, codes: Any, scales: Any, expert: Any, tile: Any) -> None:
    """Start copying this warp's columns of 8 gate rows and the 8 up rows that belong to them."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    first = warp * layout.chunks * 128  # this warp's first column
    gate = expert * (2 * c.width) + tile * 8
    lower, upper = (
        _byte(codes, base + lane // 4, c.hidden // 2) + (first // 2 + lane % 4 * 16) for base in (gate, gate + c.width)
    )
    layout.fetch_codes(stage, 0, lower, upper)
    total = ROWS * layout.chunks
    for start in range(0, total, 32):
        index = start + lane
        row = index // layout.chunks
        source = _byte(scales, gate + row % 8 + row // 8 * c.width, c.hidden // 32) + (first // 32 + index % layout.chunks * 4)
        _copy(stage + layout.scales + index * 4, source, 4, None if start + 32 <= total else index < total)


def _fetch_pair(c: Any, layout: Stage, stage: Any, codes: Any, scales: Any, inputs: Any, chosen: Any, item: Any) -> None:
    """The tile of one (token, slot) pair."""
    tiles = c.width // 8
    pair = item // tiles
    row = pair // c.top_k
    _fetch_w13(c, layout, stage, codes, scales, chosen[row, pair % c.top_k], item % tiles)
    layout.fetch_token(stage, 0, inputs.iterator + (row * c.hidden + cute.arch.warp_idx() * (layout.chunks * 128)))


def _finish_pair(c: Any, layout: Stage, stage: Any, outputs: Any, shared: Any, item: Any) -> None:
    tiles = c.width // 8
    cute.arch.sync_warp()
    acc = layout.product(stage, 1, in_pairs=False)
    _finish_w13(c, acc[0], outputs, shared, item % tiles, item // tiles, 1)


def _fetch_group(
    c: Any, layout: Stage, stage: Any, weights: Any, inputs: Any, members: Any, expert: Any, tile: Any, start: Any, end: Any
) -> None:
    """The tile of one expert with the inputs of its pairs from `start` on, `c.slots` at most."""
    _fetch_w13(c, layout, stage, *weights, expert, tile)
    for slot in range(c.slots):
        row = members[cutlass.min(start + slot, end - 1)] // c.top_k
        source = inputs.iterator + (row * c.hidden + cute.arch.warp_idx() * (layout.chunks * 128))
        layout.fetch_token(stage, slot, source, None if slot == 0 else start + slot < end)


def _finish_group(
    c: Any, layout: Stage, stage: Any, outputs: Any, shared: Any, members: Any, tile: Any, start: Any, end: Any
) -> None:
    cute.arch.sync_warp()
    count = cutlass.min(end - start, c.slots)
    acc = layout.product(stage, count, in_pairs=False)
    column = (cute.arch.warp_idx() * 32 + cute.arch.lane_idx()) // 8 % 8
    _finish_w13(c, acc[0], outputs, shared, tile, members[cutlass.min(start + column, end - 1)], count)


def _finish_w13(c: Any, acc: list[Any], hidden: Any, shared: Any, tile: Any, pair: Any, count: Any) -> None:
    """Sum the warps' parts in shared memory and write SiTU of the sums, in pair order; `pair` belongs to token column thread // 8 % 8."""
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    thread = warp * 32 + lane
    cute.arch.sync_threads()  # the previous tile's sums have been read
    for index in range(4):
        shared[index * (c.split * 32) + thread] = acc[index]
    cute.arch.sync_threads()
    column, output = thread // 8 % 8, thread % 8
    source = output * 4 + column // 2
    total = [Float32(0.0), Float32(0.0)]
    for part in range(c.split):
        for half in (0, 1):
            total[half] = total[half] + shared[(column % 2 + 2 * half) * (c.split * 32) + part * 32 + source]
    place = tile * 8 + (output % 4) * 2 + output // 4  # in pairs, see _decode
    value = _situ(total[0], total[1], c.beta, c.linear_beta)
    store_bf16(hidden.iterator + pair * c.width + place, value, (thread < 64) & (column < count))


def _byte(tensor: Any, row: Any, length: int) -> Any:
    """Pointer to a row of a byte tensor; 64 bits, since all experts of a layer may exceed 2 GiB."""
    return tensor.iterator + Int64(row) * length


@cute.kernel
def _w13_pairs(
    codes: Static, scales: Static, z: Dynamic, ids: Dynamic, num_tokens: Dynamic, hidden: Output, c: cutlass.Constexpr
):
    layout = Stage(1, c.hidden // 128 // c.split, 4, 1)
    size = layout.size
    warp = cute.arch.warp_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    allocator = cutlass.utils.SmemAllocator()
    stages = allocator.allocate(2 * c.split * layout.size, byte_alignment=128) + warp * (2 * layout.size)
    shared = allocator.allocate_tensor(Float32, cute.make_layout(c.split * 128), byte_alignment=128)
    token = dependency_wait()
    release_dependents()
    chosen, inputs, outputs = ids.after(token), z.after(token), hidden.after(token)
    tiles = c.width // 8
    items = num_tokens.after(token)[0] * (c.top_k * tiles)
    if block < items:
        _fetch_pair(c, layout, stages, codes.early(), scales.early(), inputs, chosen, block)
    cute.arch.cp_async_commit_group()
    parity = Int32(0)
    for item in range(block, items, blocks):
        if item + blocks < items:
            following = stages + (parity ^ 1) * size
            _fetch_pair(c, layout, following, codes.early(), scales.early(), inputs, chosen, item + blocks)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        _finish_pair(c, layout, stages + parity * size, outputs, shared, item)
        parity = parity ^ 1


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
    layout = Stage(1, c.hidden // 128 // c.split, 4, c.slots)
    size = layout.size
    warp = cute.arch.warp_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    allocator = cutlass.utils.SmemAllocator()
    stages = allocator.allocate(2 * c.split * layout.size, byte_alignment=128) + warp * (2 * layout.size)
    shared = allocator.allocate_tensor(Float32, cute.make_layout(c.split * 128), byte_alignment=128)
    token = dependency_wait()
    release_dependents()
    starts, members, experts = offsets.after(token), pairs.after(token), active.after(token)
    inputs, outputs = z.after(token), hidden.after(token)
    weights = (codes.early(), scales.early())
    tiles = c.width // 8
    items = num_active.after(token)[0] * tiles
    if block < items:
        expert = experts[block // tiles]
        _fetch_group(c, layout, stages, weights, inputs, members, expert, block % tiles, starts[expert], starts[expert + 1])
    cute.arch.cp_async_commit_group()
    parity = Int32(0)
    for item in range(block, items, blocks):
        expert = experts[item // tiles]
        start, end = starts[expert], starts[expert + 1]
        stage = stages + parity * size
        if item + blocks < items:
            following = experts[(item + blocks) // tiles]
            first, last = starts[following], starts[following + 1]
            other = stages + (parity ^ 1) * size
            _fetch_group(c, layout, other, weights, inputs, members, following, (item + blocks) % tiles, first, last)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        _finish_group(c, layout, stage, outputs, shared, members, item % tiles, start, end)
        for more in range(start + c.slots, end, c.slots):  # an expert with many tokens: its weights come again, from the L2 cache
            cute.arch.sync_warp()
            _fetch_group(c, layout, stage, weights, inputs, members, expert, item % tiles, more, end)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            _finish_group(c, layout, stage, outputs, shared, members, item % tiles, more, end)
        parity = parity ^ 1


# -- w2 --------------------------------------------------------------------------------------------------------------------------


def _fetch_w2(c: Any, layout: Stage, stage: Any, codes: Any, scales: Any, expert: Any, row: Any) -> None:
    """Start copying `layout.tiles` tiles of 16 neighbouring rows of one expert's w2, from `row` on."""
    lane = cute.arch.lane_idx()
    base = expert * c.hidden + row
    for tile in range(layout.tiles):
        lower, upper = (
            _byte(codes, base + (tile * ROWS + half * 8 + lane // 4), c.width // 2) + lane % 4 * (4 * layout.words)
            for half in (0, 1)
        )
        layout.fetch_codes(stage, tile, lower, upper)
    units = layout.tiles * ROWS * layout.scale_row // 16  # the rows' scales are one contiguous block
    source = _byte(scales, base, layout.scale_row)
    for start in range(0, units, 32):
        index = start + lane
        _copy(stage + layout.scales + index * 16, source + index * 16, 16, None if start + 32 <= units else index < units)


def _fetch_slot(c: Any, layout: Stage, stage: Any, codes: Any, scales: Any, expert: Any, row: Any, source: Any) -> None:
    """The tiles of one expert from `row` on, with one hidden row."""
    _fetch_w2(c, layout, stage, codes, scales, expert, row)
    layout.fetch_token(stage, 0, source)


def _product_slot(layout: Stage, stage: Any) -> list[list[Any]]:
    return layout.product(stage, 1, in_pairs=True)


def _fetch_rows(
    c: Any, layout: Stage, stage: Any, weights: Any, inputs: Any, members: Any, expert: Any, row: Any, start: Any, end: Any
) -> None:
    """The tiles of one expert from `row` on, with the hidden rows of its pairs from `start` on, `c.slots` at most."""
    _fetch_w2(c, layout, stage, *weights, expert, row)
    for slot in range(c.slots):
        pair = members[cutlass.min(start + slot, end - 1)]
        layout.fetch_token(stage, slot, inputs.iterator + pair * c.width, None if slot == 0 else start + slot < end)


def _finish_rows(c: Any, layout: Stage, stage: Any, target: Any, members: Any, row: Any, start: Any, end: Any) -> None:
    """Multiply, and write the product of every pair."""
    cute.arch.sync_warp()
    lane = cute.arch.lane_idx()
    count = cutlass.min(end - start, c.slots)
    acc = layout.product(stage, count, in_pairs=True)
    for column in range(2):
        position = lane % 4 * 2 + column
        pair = members[cutlass.min(start + position, end - 1)]
        place = target.iterator + (pair * c.hidden + row + lane // 4)
        for index in range(c.tiles):
            for half in range(2):
                store_bf16(place + (index * ROWS + half * 8), acc[index][2 * half + column], position < count)


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
    layout = Stage(c.tiles, c.width // (32 * c.words), c.words, 1)
    size = layout.size
    tile, row, _ = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    height, depth = c.tiles * ROWS, c.top_k // c.warps
    allocator = cutlass.utils.SmemAllocator()
    stages = allocator.allocate(c.top_k * layout.size, byte_alignment=128) + warp * (depth * layout.size)
    shared = allocator.allocate_tensor(Float32, cute.make_layout(c.top_k * height), byte_alignment=128)
    token = dependency_wait()
    release_dependents()
    live = row < num_tokens.after(token)[0]
    if live:
        chosen, scaling, inputs = ids.after(token), weights.after(token), hidden.after(token)
        for turn in cutlass.range_constexpr(depth):
            slot = warp * depth + turn
            source = inputs.iterator + (row * c.top_k + slot) * c.width
            _fetch_slot(c, layout, stages + turn * size, codes.early(), scales.early(), chosen[row, slot], tile * height, source)
            cute.arch.cp_async_commit_group()
        for turn in cutlass.range_constexpr(depth):
            slot = warp * depth + turn
            weight = scaling[row, slot]
            cute.arch.cp_async_wait_group(depth - 1 - turn)
            cute.arch.sync_warp()
            acc = _product_slot(layout, stages + turn * size)
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
    """A warp owns c.tiles * 16 rows of one expert; every pair's product goes out in bf16, to be summed by `_sum`."""
    layout = Stage(c.tiles, c.width // (32 * c.words), c.words, c.slots)
    size = layout.size
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    stages = cutlass.utils.SmemAllocator().allocate(2 * c.warps * layout.size, byte_alignment=128) + warp * (2 * layout.size)
    token = dependency_wait()
    release_dependents()
    starts, members, experts = offsets.after(token), pairs.after(token), active.after(token)
    inputs, target = hidden.after(token), partial.after(token)
    weights = (codes.early(), scales.early())
    height = c.tiles * ROWS
    spans = c.hidden // height
    items = num_active.after(token)[0] * spans
    mine, step = block * c.warps + warp, blocks * c.warps
    if mine < items:
        expert = experts[mine // spans]
        _fetch_rows(
            c, layout, stages, weights, inputs, members, expert, mine % spans * height, starts[expert], starts[expert + 1]
        )
    cute.arch.cp_async_commit_group()
    parity = Int32(0)
    for item in range(mine, items, step):
        expert = experts[item // spans]
        start, end = starts[expert], starts[expert + 1]
        stage = stages + parity * size
        if item + step < items:
            following = experts[(item + step) // spans]
            first, last = starts[following], starts[following + 1]
            other = stages + (parity ^ 1) * size
            _fetch_rows(c, layout, other, weights, inputs, members, following, (item + step) % spans * height, first, last)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        _finish_rows(c, layout, stage, target, members, item % spans * height, start, end)
        for more in range(start + c.slots, end, c.slots):
            cute.arch.sync_warp()
            _fetch_rows(c, layout, stage, weights, inputs, members, expert, item % spans * height, more, end)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            _finish_rows(c, layout, stage, target, members, item % spans * height, more, end)
        cute.arch.sync_warp()  # all lanes have read the stage that the next fetch overwrites
        parity = parity ^ 1


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
    grid, block = [config.grid, 1, 1], [32 * config.split, 1, 1]
    _w13_pairs(codes, scales, z, ids, num_tokens, hidden, config).launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w13_grouped(config, codes, scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See `_w13_grouped`."""
    grid, block = [config.grid, 1, 1], [32 * config.split, 1, 1]
    kernel = _w13_grouped(codes, scales, z, offsets, pairs, active, num_active, hidden, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)


def mxfp4_w2_pairs(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See `_w2_pairs`."""
    grid, block = [config.hidden // (ROWS * config.tiles), out.shape[0], 1], [32 * config.warps, 1, 1]
    _w2_pairs(codes, scales, hidden, ids, weights, num_tokens, out, config).launch(
        grid=grid, block=block, stream=stream, use_pdl=True
    )


def mxfp4_w2_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, partial, stream):
    """See `_w2_grouped`."""
    grid, block = [config.grid, 1, 1], [32 * config.warps, 1, 1]
    kernel = _w2_grouped(codes, scales, hidden, offsets, pairs, active, num_active, partial, config)
    kernel.launch(grid=grid, block=block, stream=stream, use_pdl=True)


def experts_sum(config, partial, weights, num_tokens, out, stream):
    """See `_sum`."""
    grid, block = [config.hidden // config.threads, out.shape[0], 1], [config.threads, 1, 1]
    _sum(partial, weights, num_tokens, out, config).launch(grid=grid, block=block, stream=stream, use_pdl=True)
