"""MXFP4 experts read from the layout that stock keeps (see `humming`): 16 bytes of a lane are four words, each this lane's part
of the 16-row operand of mma.sync m16n8k16. Decoded they are multiplied as they are; nothing is shuffled.

512 bytes hold 64 rows of 16 columns, and the rows g, g + 8, ... g + 56 of them are 64 bytes in line. A block takes a strip: P
such row groups, 64 P bytes of every 512. One instruction has 8, so it takes those of 8 / P pieces, which are neighbouring scale
groups, and column n of the token operand is piece n / P. Of the product only the places count where the row's piece is the
column's; with a token in each of the P columns of a piece, that is P tokens at a time. P is the choice between few bytes in a
row of memory with even shares for all blocks, and many. Both chunks of a scale group are multiplied before its scales, 2^(s -
127) for the codes 1..254, 0 for 0, infinity for 255, are applied to the sums in fp32.

    w13  a block takes items, an entry's strip of gate rows and the up rows that belong to them; its warps share the columns, and
         some in turn add the parts and apply SiTU while the rest goes on: parts of SETS items are kept, so that a warp whose
         weights come late holds nobody up.
    w2   a block owns a strip of the output for all tokens. Every warp multiplies its own entries and adds into its own fp32 sums
         in shared memory; at the end the warps' sums are added in order. No partial products in memory, no atomics.

An entry is a (token, slot) pair, or an expert with its pairs (`grouped`). Which expert is read is known only after the
dependency wait, and all depends on bytes in flight. Every lane copies what it will read itself, `flight` steps ahead, through a
ring of its own in shared memory: no barrier, and the ring runs on across items. How values are decoded: `common`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import load_shared, load_word, store_shared, stream_async
from ..device.vectors import unpack_bf16
from ..order import Dynamic, Output, Settled, Static, dependency_wait, release_dependents
from .common import (
    SHIFT,
    ask_for_w2,
    clear,
    decode,
    largest,
    launch,
    list_groups,
    list_pairs,
    mma,
    of_pair,
    pack_half,
    powers,
    read_word,
    situ,
    store_half,
)
from .layout import GROUP, SETS, PackedFirst, PackedSecond, padded_columns, padded_rows

# -- a lane ----------------------------------------


def _first(c: Any) -> PackedFirst:
    return PackedFirst(c.hidden, c.width, c.strip, c.split, c.flight, c.grouped)


def _second(c: Any) -> PackedSecond:
    return PackedSecond(c.width, c.strip, c.warps, c.flight, c.grouped)


def _place(c: Any) -> tuple[Any, Any, Any, Any]:
    """A lane's piece, its row group in the strip (and, as a column, its token), its quad, and whether it writes results: it then
    holds sums of row group `member` for the tokens 2 quad and 2 quad + 1, if there are so many at a time."""
    lane = cute.arch.lane_idx()
    row, quad = lane // 4, lane % 4
    piece = row // c.strip
    return piece, row % c.strip, quad, (piece == 0) & (quad < (max(1, c.strip // 2) if c.grouped else 1))


def _columns(c: Any) -> int:
    """Tokens for which a lane has sums."""
    return 2 if c.grouped else 1


def _copy8(target: Any, source: Any, wanted: Any) -> None:
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 8;", read_only_args=[target, source], predicate=wanted)


def _product(c: Any, acc: Any, first: int, codes: Any, scales: Any, columns: list[Any]) -> None:
    """acc[first + 8 column + m] += rows 8 m + g of one scale group times its tokens. codes: shared-memory address of this lane's
    16 bytes of the group's first chunk, 512 before those of its second; scales: of its 8 codes; columns: of the token operand.
    """
    low, high = load_shared(codes), load_shared(codes + 512)
    both = inline_ptx("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[scales])
    odd = cute.arch.lane_idx() // 4 % 2 == 1
    for word in range(4):
        part = [Float32(0.0)] * 4
        for i, weights in enumerate((low, high)):
            d = decode(weights[word])
            part = mma([d[0], d[2], d[1], d[3]], columns[2 * i : 2 * i + 2], part)
        for half in range(2):
            m = 2 * word + half
            up = m % 4 * 8
            code = both[m // 4] << (23 - up) if up < 24 else both[m // 4] >> 1
            factor = (code & Uint32(0x7F800000)).bitcast(Float32)
            for column in range(_columns(c)):
                value = part[2 * half + column]
                if c.strip == 1:  # the row's own column is the other one where the row is odd
                    value = Float32(select_(odd, part[2 * half + 1], value))
                at = first + 8 * column + m
                acc[at] = acc[at] + value * factor


def _gather(c: Any, acc: Any, count: int) -> None:
    """Add the pieces' sums. A piece further in the rows is a piece further in the columns."""
    for bit in range(c.strip.bit_length() - 1, 3):
        mask = 1 << bit + 2 | (1 << bit - 1 if bit else 0)
        for i in range(count):
            acc[i] = acc[i] + cute.arch.shuffle_sync_bfly(acc[i], offset=mask)


# -- w13 ----------------------------------------


def _token_words(c: Any, z: Any, row: Any) -> list[Any]:
    """Where this lane's words of the token operand are, four a step. row: of z, for this lane's column."""
    layout = _first(c)
    piece, _, quad, _ = _place(c)
    group = cute.arch.warp_idx() * (layout.steps * layout.pieces) + piece
    source = z.iterator + (row * c.hidden + group * GROUP + quad * 2)
    return [source + (step * layout.pieces * GROUP + part * 8) for step in range(layout.steps) for part in range(4)]


def _to_half(c: Any, words: list[Any], undo: Any) -> list[Any]:
    """The words in fp16; undo[i] gets the power of two that undoes this lane's i-th token's, and the weights' 2^-14."""
    _, _, quad, _ = _place(c)
    most = largest(words)
    bits = [0, 1, *range(c.strip.bit_length() + 1, 5)] if c.grouped else range(5)  # of the lanes with the same token
    for bit in bits:
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << bit))
    scale, word = powers(most)
    back = word.bitcast(Float32)
    for column in range(_columns(c)):
        undo[column] = cute.arch.shuffle_sync(back, (quad * 2 + column) % c.strip * 4) if c.grouped else back
    return [pack_half(*(value * scale for value in unpack_bf16(word))) for word in words]


def _load_tokens(c: Any, z: Any, row: Any, target: Any, undo: Any) -> None:
    """Of pairs: the words to this lane's own place in shared memory, in fp16."""
    words = _to_half(c, [load_word(source) for source in _token_words(c, z, row)], undo)
    for step in range(_first(c).steps):
        store_shared(target + step * 512, words[step * 4 : step * 4 + 4])


def _ask_tokens(c: Any, z: Any, row: Any, target: Any) -> None:
    """Of groups: start copying the words to this lane's own place, in the group of copies that is committed next."""
    for i, source in enumerate(_token_words(c, z, row)):
        inline_ptx(
            "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;", read_only_args=[target + (i // 4 * 512 + i % 4 * 4), source.toint()]
        )


def _take_tokens(c: Any, target: Any, held: Any, undo: Any) -> None:
    """The words that have been copied into registers, in fp16."""
    words = [word for step in range(_first(c).steps) for word in load_shared(target + step * 512)]
    for i, word in enumerate(_to_half(c, words, undo)):
        held[i] = word


def _find_w13(c: Any, lane: tuple, share: tuple, table: tuple, index: Any) -> tuple[Any, Any]:
    """Addresses of this lane's codes and scales of its first step of an item; behind the last item: of the last."""
    layout = _first(c)
    first, stride, count = share
    index = cutlass.min(index, count - 1)
    item = first + index * stride
    expert = Int64(table[0][index if c.grouped else item // layout.tiles])
    tile = item % layout.tiles
    block, strip = tile // layout.pieces, tile % layout.pieces
    rows = padded_rows(2 * c.pitch)
    codes = lane[0] + expert * (rows * c.hidden // 2) + Int64(block * 512 + strip * (64 * c.strip))
    scales = lane[1] + expert * (rows * c.hidden // GROUP) + Int64(block * 64 + strip * (8 * c.strip))
    return codes, scales


def _next(c: Any, table: tuple, index: Any, begin: Any, count: Any, stride: int = 1) -> tuple[Any, Any]:
    """The item, or entry, and the first pair of the pass behind this one."""
    if not c.grouped:
        return index + stride, begin
    starts, ends = table[1:3]
    over = begin + c.strip >= ends[cutlass.min(index, count - 1)]
    index = index + Int32(select_(over, Int32(stride), Int32(0)))
    return index, Int32(select_(over, starts[cutlass.min(index, count - 1)], begin + c.strip))


def _row(c: Any, table: tuple, count: Any, index: Any, begin: Any) -> Any:
    """Of z, for this lane's column of a pass; columns past its last token repeat it, passes behind the last item are the last."""
    _, member, _, _ = _place(c)
    last = table[2][cutlass.min(index, count - 1)] - 1
    return table[3][cutlass.min(begin + member, last)] // c.top_k


def _fetch_w13(c: Any, at: tuple[Any, Any], step: int, slot: Any, wanted: Any) -> None:
    """Start copying this lane's part of one step; a group of copies even where nothing is wanted."""
    layout, lane, rows = _first(c), cute.arch.lane_idx(), padded_rows(2 * c.pitch)
    for half in range(2):  # gate, up
        for chunk in range(2):
            away = half * (c.pitch * 8) + (step * layout.pieces * 2 + chunk) * (rows * 8)
            stream_async(slot + (half * 2 + chunk) * 512 + lane * 16, at[0] + away, wanted)
        _copy8(slot + 2048 + half * 256 + lane * 8, at[1] + (half * c.pitch + step * layout.pieces * rows), wanted)
    cute.arch.cp_async_commit_group()


def _step_w13(c: Any, acc: Any, slot: Any, columns: list[Any]) -> None:
    lane = cute.arch.lane_idx()
    for half in range(2):
        codes, scales = slot + half * 1024 + lane * 16, slot + 2048 + half * 256 + lane * 8
        _product(c, acc, half * 8 * _columns(c), codes, scales, columns)


def _leave(c: Any, acc: Any, undo: Any, sums: Any) -> None:
    """This warp's sums of an item to its place: [token, row group, gate and up, 8] fp32."""
    _, member, quad, writes = _place(c)
    for column in range(_columns(c)):
        base = sums + ((quad * 2 + column) * c.strip + member) * 64
        for half in range(2):
            for four in (0, 4):
                start = (half * _columns(c) + column) * 8 + four
                values = [(acc[start + i] * undo[column]).bitcast(Uint32) for i in range(4)]
                store_shared(base + half * 32 + four * 4, values, writes)


@cute.jit
def _finish_w13(c: cutlass.Constexpr, sums: Any, barriers: Any, table: Any, hidden: Any, what: Any, product: Any):
    """Some warps, for each product others: add the warps' parts of 32 gate and up values, and store SiTU of them in the order in
    which w2 reads. Called a product late, when the others' parts have mostly come."""
    layout = _first(c)
    tile, begin, count = what
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    turn = (warp + c.split - product % c.split) % c.split
    if turn < layout.finishers:
        number = product % SETS
        cute.arch.mbarrier_wait(barriers + number, product // SETS % 2)
        place = turn * 32 + lane
        m, member, token = place % 8, place // 8 % c.strip, place // (8 * c.strip)
        if token < count:
            source = sums + number * (c.split * layout.sums) + (token * c.strip + member) * 64 + m * 4
            gate, up = Float32(0.0), Float32(0.0)
            for part in cutlass.range_constexpr(c.split):
                at = source + part * layout.sums
                gate, up = gate + read_word(at).bitcast(Float32), up + read_word(at + 32).bitcast(Float32)
            pair = begin + token
            if cutlass.const_expr(c.grouped):
                pair = table[3][pair]
            column = tile % layout.pieces * c.strip + member  # of eight
            place = tile // layout.pieces * 64 + m // 4 * 32 + column // 2 * 8 + m % 4 * 2 + column % 2
            value = situ(gate, up, c.beta, c.linear_beta)
            store_half(hidden.iterator + (pair * c.width + place), value * Float32(2.0**c.hidden_shift))
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + SETS + number)


@cute.jit
def _stream_w13(
    c: cutlass.Constexpr,
    weights: Any,
    following: Any,
    z: Any,
    routes: Any,
    entries: Any,
    hidden: Any,
    memory: Any,
    share: Any,
    table: Any,
):
    """All warps of a block: its items, one after the other. share: first item, items from one to the next, how many.

    When the copies of the last one are under way, one warp asks L2 for the first weights of w2, whose experts are the same:
    memory does not pause between the kernels.
    """
    layout = _first(c)
    first, stride, count = share
    (ring, tokens, sums), barriers = memory
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    piece, member, quad, _ = _place(c)
    rows = cutlass.const_expr(padded_rows(2 * c.pitch))
    group = warp * (layout.steps * layout.pieces) + piece
    own = (
        weights[0].iterator.toint() + Int64(group * (rows * 16) + member * 64 + quad * 16),
        weights[1].iterator.toint() + Int64(group * rows + member * 8),
    )
    ring = ring + warp * layout.ring
    token = tokens + warp * (layout.steps * 512) + lane * 16
    ahead, ahead_begin = Int32(0), Int32(0)
    if cutlass.const_expr(c.grouped):
        ahead_begin = Int32(table[1][0])
    codes_at, scales_at = _find_w13(c, own, share, table, ahead)
    if cutlass.const_expr(c.grouped):
        _ask_tokens(c, z, _row(c, table, count, ahead, ahead_begin), token)
    for turn in cutlass.range_constexpr(c.flight):
        if cutlass.const_expr(turn > 0 and turn % layout.steps == 0):
            ahead, ahead_begin = _next(c, table, ahead, ahead_begin, count)
            codes_at, scales_at = _find_w13(c, own, share, table, ahead)
        _fetch_w13(c, (codes_at, scales_at), turn % layout.steps, ring + turn * layout.slot, ahead < count)
    acc = cute.make_rmem_tensor(16 * _columns(c), Float32)
    undo = cute.make_rmem_tensor(_columns(c), Float32)
    held = cute.make_rmem_tensor(layout.steps * 4 if c.grouped else 1, Uint32)
    if cutlass.const_expr(c.grouped):
        cute.arch.cp_async_wait_group(c.flight - 1)  # the first pass's tokens, with its first step
    slot, loaded, products, phase = Int32(0), Int32(-1), Int32(0), Int32(0)
    left = (Int32(0), Int32(0), Int32(0))  # of the product before: tile, first pair, tokens
    for index in range(count):
        item = first + index * stride
        start, end = Int32(item // layout.tiles), Int32(item // layout.tiles + 1)
        if cutlass.const_expr(c.grouped):
            start, end = Int32(table[1][index]), Int32(table[2][index])
        for begin in range(start, end, c.strip if c.grouped else 1):
            if cutlass.const_expr(c.grouped):
                if begin != loaded:
                    _take_tokens(c, token, held, undo)
                    loaded = begin
                following_index, following_begin = _next(c, table, index, begin, count)
                if following_begin != begin:
                    _ask_tokens(c, z, _row(c, table, count, following_index, following_begin), token)
            elif begin // c.top_k != loaded:
                loaded = begin // c.top_k
                _load_tokens(c, z, loaded, token, undo)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(layout.steps):
                if cutlass.const_expr((step + c.flight) % layout.steps == 0):
                    ahead, ahead_begin = _next(c, table, ahead, ahead_begin, count)
                    codes_at, scales_at = _find_w13(c, own, share, table, ahead)
                free = Int32(select_(slot == 0, Int32(c.flight), slot - 1))  # what the last step has read
                at = (codes_at, scales_at)
                _fetch_w13(c, at, (step + c.flight) % layout.steps, ring + free * layout.slot, ahead < count)
                cute.arch.cp_async_wait_group(c.flight)
                columns = [held[step * 4 + i] for i in range(4)] if c.grouped else list(load_shared(token + step * 512))
                _step_w13(c, acc, ring + slot * layout.slot, columns)
                slot = Int32(select_(slot == c.flight, Int32(0), slot + 1))
            if cutlass.const_expr(c.grouped):
                cute.arch.cp_async_wait_group(layout.steps - 1)  # the next pass's tokens, asked for with its first step
            _gather(c, acc, 16 * _columns(c))
            place = products % SETS
            if products >= SETS:
                cute.arch.mbarrier_wait(barriers + SETS + place, phase ^ 1)
            _leave(c, acc, undo, sums + (place * c.split + warp) * layout.sums)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(barriers + place)
            if products > 0:
                _finish_w13(c, sums, barriers, table, hidden, left, products - 1)
            live = cutlass.min(end - begin, c.strip) if cutlass.const_expr(c.grouped) else Int32(1)
            left = (Int32(item % layout.tiles), Int32(begin), Int32(live))
            products += 1
            phase = Int32(select_(place == SETS - 1, phase ^ 1, phase))
        if cutlass.const_expr(c.ahead > 0):  # noqa: SIM102 - one is of the trace, one of the kernel
            if (index == cutlass.max(count - 1 - c.flight // layout.steps, 0)) & (warp == c.split - 1):
                ask_for_w2(c, *following, padded_columns(c.pitch) * c.hidden, routes[0], entries)
    _finish_w13(c, sums, barriers, table, hidden, left, products - 1)


@cute.jit
def _list_choice(c: cutlass.Constexpr, routes: Any, count: Any, table: Any):
    """All pairs and all active experts, and behind those their number; what lies beyond the last may be anything. No read waits
    for another."""
    thread, _, _ = cute.arch.thread_idx()
    for place in cutlass.range(thread, routes[1].shape[0], 32 * c.split, unroll=1):
        table[3][place] = routes[1][place]
    entries = cutlass.const_expr(min(c.entries, routes[2].shape[0]))
    for entry in cutlass.range(thread, entries, 32 * c.split, unroll=1):
        table[4][entry] = routes[2][entry]
    if thread == 32 * c.split - 1:
        table[4][c.entries] = count[0]


@cute.jit
def _list_groups(c: cutlass.Constexpr, routes: Any, share: Any, table: Any):
    """Expert, start and end of its pairs, of every item of this block: read once, by all threads."""
    first, stride, count = share
    tiles = cutlass.const_expr(_first(c).tiles)
    thread, _, _ = cute.arch.thread_idx()
    for index in cutlass.range(thread, count, 32 * c.split, unroll=1):
        expert = table[4][(first + index * stride) // tiles]
        table[0][index] = expert
        table[1][index] = routes[0][expert]
        table[2][index] = routes[0][expert + 1]


@cute.jit
def _list_experts(c: cutlass.Constexpr, ids: Any, num_tokens: Any, table: Any):
    """Expert of every pair, padded rows' too, and behind them the number of tokens: by different warps, so that neither read
    waits for the other, and no address is made of the number before all have met."""
    thread, _, _ = cute.arch.thread_idx()
    for pair in cutlass.range(thread, ids.shape[0] * c.top_k, 32 * c.split, unroll=1):
        table[0][pair] = of_pair(c, ids, pair)
    if thread == 32 * c.split - 1:
        table[0][c.entries] = num_tokens[0]


def _share_w13(c: Any, entries: Any) -> tuple[Any, Any, Any]:
    """This block's items: every so many-th, or neighbours."""
    block, _, _ = cute.arch.block_idx()
    blocks = c.grid  # a constant divides in few instructions
    items = entries * _first(c).tiles
    if c.spread:
        return Int32(block), Int32(blocks), (items - block + blocks - 1) // blocks
    first = block * items // blocks
    return first, Int32(1), (block + 1) * items // blocks - first


@cute.jit
def _prepare_barriers(c: cutlass.Constexpr, barriers: Any):
    """Of each set of sums: full when all warps have left theirs, empty when they are added up. The block meets before use."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < 2 * SETS:
        arrivals = Int32(select_(thread < SETS, Int32(c.split), Int32(_first(c).finishers)))
        cute.arch.mbarrier_init(barriers + thread, arrivals)
    cute.arch.mbarrier_init_fence()


def _memory_w13(c: Any) -> tuple:
    """Addresses of the ring, token operands and partial sums, and the sums' barriers, full and empty; the table, of a block's
    items or of all pairs."""
    layout, allocator = _first(c), SmemAllocator()
    sizes = (c.split * layout.ring, c.split * layout.steps * 512, SETS * c.split * layout.sums)
    places = tuple(allocator.allocate(size, byte_alignment=128).toint() for size in sizes)
    barriers = allocator.allocate_array(Int64, 2 * SETS, byte_alignment=8)
    _prepare_barriers(c, barriers)
    listed = (layout.listed(c.entries, c.grid),) * (3 if c.grouped else 1)
    listed += (c.rows * c.top_k, c.entries + 1) if c.grouped else ()
    table = tuple(allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16) for count in listed)
    return (places, barriers), table


@cute.jit
def _w13(
    c: cutlass.Constexpr, weights: Any, following: Any, z: Any, routes: Any, count: Any, hidden: Any, memory: Any, table: Any
):
    """count [1]: of pairs the number of tokens, of groups that of experts."""
    if cutlass.const_expr(c.grouped):
        _list_choice(c, routes, count, table)
        cute.arch.sync_threads()
        entries = table[4][c.entries]
        share = _share_w13(c, entries)
        _list_groups(c, routes, share, table)
        cute.arch.sync_threads()
    else:
        _list_experts(c, routes[0], count, table)
        cute.arch.sync_threads()
        entries = table[0][c.entries] * c.top_k
        share = _share_w13(c, entries)
    if share[2] > 0:
        _stream_w13(c, weights, following, z, routes, entries, hidden, memory, share, table)
    if cutlass.const_expr(c.ahead > 0):  # noqa: SIM102 - one is of the trace, one of the kernel
        if (share[2] <= 0) & (cute.arch.warp_idx() == 0):
            ask_for_w2(c, *following, padded_columns(c.pitch) * c.hidden, routes[0], entries)


@cute.kernel
def _w13_packed(
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
    memory, table = _memory_w13(c)
    token = dependency_wait()
    release_dependents()  # not before: w2 then finds settled what the choice of experts has written
    weights = (codes.early(), scales.early())
    following = (next_codes.early().iterator.toint(), next_scales.early().iterator.toint())
    count = num_tokens.after(token)
    _w13(c, weights, following, z.after(token), (ids.after(token),), count, hidden.after(token), memory, table)


@cute.kernel
def _w13_packed_grouped(
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
    memory, table = _memory_w13(c)
    token = dependency_wait()
    release_dependents()  # not before: w2 then finds settled what the choice of experts has written
    weights = (codes.early(), scales.early())
    routes = (offsets.after(token), pairs.after(token), active.after(token))
    _w13(c, weights, weights, z.after(token), routes, num_active.after(token), hidden.after(token), memory, table)


# -- w2 ----------------------------------------


def _find_w2(c: Any, lane: tuple, table: tuple, entry: Any, begin: Any, entries: Any) -> tuple[Any, Any, Any]:
    """Addresses of this lane's codes, scales and hidden values of the first step of a pass; behind the last: of the last."""
    entry = cutlass.min(entry, entries - 1)
    size = padded_columns(c.pitch) * c.hidden
    expert, pair = Int64(table[0][entry]), entry
    if c.grouped:
        _, member, _, _ = _place(c)
        last = cutlass.max(table[2][entry] - 1, 0)
        pair = table[3][cutlass.min(begin + member, last)]
    return lane[0] + expert * (size // 2), lane[1] + expert * (size // GROUP), lane[2] + Int64(pair) * (2 * c.width)


def _fetch_weights(c: Any, at: tuple[Any, Any, Any], step: int, slot: Any, wanted: Any) -> None:
    """Start copying this lane's codes and scales of one step."""
    layout, lane = _second(c), cute.arch.lane_idx()
    for chunk in range(2):
        away = (step * layout.pieces * 2 + chunk) * (c.hidden * 8)
        stream_async(slot + chunk * 512 + lane * 16, at[0] + away, wanted)
    _copy8(slot + 1536 + lane * 8, at[1] + step * layout.pieces * c.hidden, wanted)


def _fetch_hidden(c: Any, at: tuple[Any, Any, Any], step: int, slot: Any, wanted: Any) -> None:
    """Start copying this lane's hidden values of one step."""
    source = at[2] + step * _second(c).pieces * 2 * GROUP
    stream_async(slot + 1024 + cute.arch.lane_idx() * 16, source, wanted)


def _fetch_first(c: Any, own: tuple, table: tuple, entries: Any, ring: Any, fetch: Any) -> tuple[Any, Any, tuple]:
    """`fetch` for the first `flight` steps of this warp, a group of copies each, even where nothing is wanted. Returns the entry,
    first pair and addresses of the last of them."""
    layout = _second(c)
    ahead, begin = Int32(cute.arch.warp_idx()), Int32(0)
    if c.grouped:
        begin = Int32(table[1][ahead])
    at = _find_w2(c, own, table, ahead, begin, entries)
    for turn in range(c.flight):
        if turn > 0 and turn % layout.steps == 0:
            ahead, begin = _next(c, table, ahead, begin, entries, c.warps)
            at = _find_w2(c, own, table, ahead, begin, entries)
        fetch(c, at, turn % layout.steps, ring + turn * layout.slot, ahead < entries)
        cute.arch.cp_async_commit_group()
    return ahead, begin, at


@cute.jit
def _add(c: cutlass.Constexpr, acc: Any, table: Any, begin: Any, end: Any, sums: Any):
    """sums[token, row group, 8] += weight * product, for the pairs from `begin` on. sums: address of this warp's own."""
    _, member, quad, writes = _place(c)
    for column in cutlass.range_constexpr(_columns(c)):
        at = begin + (quad * 2 + column if cutlass.const_expr(c.grouped) else 0)
        if writes & (at < end):
            pair = at
            factor = table[-1][at]
            if cutlass.const_expr(c.grouped):
                pair = table[3][at]
            weight = factor * Float32(2.0 ** (SHIFT - c.hidden_shift))
            place = sums + (pair // c.top_k * c.strip + member) * 32
            for four in cutlass.range_constexpr(2):
                old = load_shared(place + four * 16)
                first = column * 8 + four * 4
                new = [old[i].bitcast(Float32) + acc[first + i] * weight for i in range(4)]
                store_shared(place + four * 16, [value.bitcast(Uint32) for value in new])


def _own_w2(c: Any, codes: Any, scales: Any, hidden: Any) -> tuple[Any, Any, Any]:
    """Addresses of this lane's codes, scales and hidden values of expert and pair 0."""
    layout = _second(c)
    block, _, _ = cute.arch.block_idx()
    piece, member, quad, _ = _place(c)
    row, group = block % layout.pieces * c.strip + member, block // layout.pieces  # of eight; of the groups of 64 rows
    return (
        codes.iterator.toint() + Int64(piece * (c.hidden * 16) + group * 512 + row * 64 + quad * 16),
        scales.iterator.toint() + Int64(piece * c.hidden + group * 64 + row * 8),
        hidden + Int64(piece * (2 * GROUP) + quad * 16),
    )


@cute.jit
def _begin_w2(c: cutlass.Constexpr, codes: Any, scales: Any, table: Any, entries: Any, ring: Any):
    """One warp: its first weights, which only settled tensors name. At least one entry is its own."""
    _fetch_first(c, _own_w2(c, codes, scales, Int64(0)), table, entries, ring, _fetch_weights)


@cute.jit
def _stream_w2(c: cutlass.Constexpr, codes: Any, scales: Any, hidden: Any, table: Any, entries: Any, ring: Any, sums: Any):
    """One warp: every c.warps-th entry. At least one is its own. Its first steps' weights are under way, in groups of their own,
    and their hidden values follow in as many: the number of groups behind a step's last is `flight` from the first step on."""
    layout = _second(c)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    own = _own_w2(c, codes, scales, hidden.iterator.toint())
    ahead, ahead_begin, at = _fetch_first(c, own, table, entries, ring, _fetch_hidden)
    codes_at, scales_at, hidden_at = at
    acc = cute.make_rmem_tensor(8 * _columns(c), Float32)
    slot = Int32(0)
    for entry in range(warp, entries, c.warps):
        start, end = Int32(entry), Int32(entry + 1)
        if cutlass.const_expr(c.grouped):
            start, end = Int32(table[1][entry]), Int32(table[2][entry])
        for begin in range(start, end, c.strip if c.grouped else 1):
            acc.fill(0.0)
            for step in cutlass.range_constexpr(layout.steps):
                if cutlass.const_expr((step + c.flight) % layout.steps == 0):
                    ahead, ahead_begin = _next(c, table, ahead, ahead_begin, entries, c.warps)
                    codes_at, scales_at, hidden_at = _find_w2(c, own, table, ahead, ahead_begin, entries)
                free = Int32(select_(slot == 0, Int32(c.flight), slot - 1))  # what the last step has read
                at = (codes_at, scales_at, hidden_at)
                for fetch in (_fetch_weights, _fetch_hidden):
                    fetch(c, at, (step + c.flight) % layout.steps, ring + free * layout.slot, ahead < entries)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(c.flight)
                now = ring + slot * layout.slot + lane * 16
                _product(c, acc, 0, now, ring + slot * layout.slot + 1536 + lane * 8, list(load_shared(now + 1024)))
                slot = Int32(select_(slot == c.flight, Int32(0), slot + 1))
            _gather(c, acc, 8 * _columns(c))
            _add(c, acc, table, begin, end, sums)


@cute.jit
def _write_sums(c: cutlass.Constexpr, sums: Any, out: Any):
    """Add the warps' sums in order and store them in bf16. Padded rows have nothing in them and come out as zero."""
    layout = _second(c)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    base = block // layout.pieces * 64 + block % layout.pieces * c.strip
    for place in cutlass.range(thread, out.shape[0] * layout.height, 32 * c.warps, unroll=1):
        token, m, member = place // layout.height, place % layout.height // c.strip, place % c.strip
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(c.warps):
            total = total + sums[warp * (c.rows * layout.height) + (token * c.strip + member) * 8 + m]
        out[token, base + 8 * m + member] = total.to(BFloat16)


def _memory_w2(c: Any) -> tuple:
    """Address of this warp's ring, the table, all sums (set to zero)."""
    layout, allocator = _second(c), SmemAllocator()
    ring = allocator.allocate(c.warps * layout.ring, byte_alignment=128)

    def numbers(dtype: Any, count: int) -> Any:
        return allocator.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

    pairs = c.rows * c.top_k
    kinds = ((Int32, c.entries),) * 3 + ((Int32, pairs),) if c.grouped else ((Int32, pairs + 1),)
    table = tuple(numbers(*kind) for kind in (*kinds, (Float32, pairs)))
    sums = numbers(Float32, c.warps * c.rows * layout.height)
    clear(sums, c.warps * c.rows * layout.height, 32 * c.warps, 1)
    return ring.toint() + cute.arch.warp_idx() * layout.ring, table, sums


@cute.jit
def _w2(c: cutlass.Constexpr, weights: Any, hidden: Any, table: Any, entries: Any, out: Any, ring: Any, sums: Any):
    """Behind the wait."""
    own = sums.iterator.toint() + cute.arch.warp_idx() * (c.rows * _second(c).height * 4)
    if cute.arch.warp_idx() < entries:
        _stream_w2(c, *weights, hidden, table, entries, ring, own)
    cute.arch.sync_threads()
    _write_sums(c, sums, out)


@cute.kernel
def _w2_packed(
    codes: Static,
    scales: Static,
    hidden: Dynamic,
    ids: Settled,
    weights: Settled,
    num_tokens: Settled,
    out: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    ring, table, sums = _memory_w2(c)
    list_pairs(c, ids.early(), weights.early(), table)
    place = cutlass.const_expr(c.rows * c.top_k)
    if cute.arch.thread_idx()[0] == 32 * c.warps - 1:  # not one of those whose first read is of an expert
        table[0][place] = num_tokens.early()[0]
    cute.arch.sync_threads()
    entries = table[0][place] * c.top_k
    static = (codes.early(), scales.early())
    if cute.arch.warp_idx() < entries:
        _begin_w2(c, *static, table, entries, ring)
    token = dependency_wait()
    _w2(c, static, hidden.after(token), table, entries, out.after(token), ring, sums)


@cute.kernel
def _w2_packed_grouped(
    codes: Static,
    scales: Static,
    hidden: Dynamic,
    offsets: Settled,
    pairs: Settled,
    active: Settled,
    num_active: Settled,
    weights: Settled,
    out: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    ring, table, sums = _memory_w2(c)
    entries = num_active.early()[0]
    list_groups(c, (offsets.early(), pairs.early(), active.early()), weights.early(), entries, table)
    cute.arch.sync_threads()
    static = (codes.early(), scales.early())
    if cute.arch.warp_idx() < entries:
        _begin_w2(c, *static, table, entries, ring)
    token = dependency_wait()
    _w2(c, static, hidden.after(token), table, entries, out.after(token), ring, sums)


# -- entries ----------------------------------------


def mxfp4_w13_packed(config, codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, stream):
    """See the module head."""
    kernel = _w13_packed(codes, scales, next_codes, next_scales, z, ids, num_tokens, hidden, config)
    launch(kernel, config.grid, config.split, stream)


def mxfp4_w2_packed(config, codes, scales, hidden, ids, weights, num_tokens, out, stream):
    """See the module head."""
    kernel = _w2_packed(codes, scales, hidden, ids, weights, num_tokens, out, config)
    launch(kernel, _second(config).blocks(config.hidden), config.warps, stream)


def mxfp4_w13_packed_grouped(config, codes, scales, z, offsets, pairs, active, num_active, hidden, stream):
    """See the module head."""
    kernel = _w13_packed_grouped(codes, scales, z, offsets, pairs, active, num_active, hidden, config)
    launch(kernel, config.grid, config.split, stream)


def mxfp4_w2_packed_grouped(config, codes, scales, hidden, offsets, pairs, active, num_active, weights, out, stream):
    """See the module head."""
    kernel = _w2_packed_grouped(codes, scales, hidden, offsets, pairs, active, num_active, weights, out, config)
    launch(kernel, _second(config).blocks(config.hidden), config.warps, stream)
