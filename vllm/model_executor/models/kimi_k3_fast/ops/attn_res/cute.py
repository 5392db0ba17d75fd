"""Device half of `attn_res`: one cluster per token, every source's bytes in flight at once, two exchanges of a few numbers.

A token is 7168 columns of up to nine sources: 129 KB that one SM could not load fast enough. A cluster's blocks take a share of
the columns each. In a block, a few warps take each source: they copy their part into shared memory and, when it is there, add up
the two sums that its weight needs. Closed blocks are settled, so they come, and are weighed, before the dependency wait. So does
the prefix where a delta is pending; the delta alone is read behind the wait, and added first. All of a part is in flight at once:
loaded into registers, of which there are few, seven pieces came in five trips to L2, one behind the other, and a layer has two
such launches. Then every thread mixes eight columns of all sources. What must be known of the whole row is little: two sums for
each source, and one of the mixture. Warps send them straight to every block of the cluster, and count on each block's barrier.

A thread that held its columns of all sources in registers needed 128 of them and 1300 instructions of straight code: too few
blocks fit on an SM for 64 tokens, and in a layer such code is never in the instruction caches.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import copy_async, load_shared, send_f32, store_global, store_shared
from ..device.reduce import warp_max, warp_sum
from ..device.vectors import lane_and_warp, load_words, pack_bf16, unpack_bf16
from ..order import Dynamic, Output, Settled, Static, dependency_wait, release_dependents


def unpack(words: Any) -> list[Any]:
    return [value for word in words for value in unpack_bf16(word)]


def pack(values: list[Any]) -> Any:
    return tuple(pack_bf16(even, odd) for even, odd in zip(values[0::2], values[1::2], strict=True))


def together(a: Any, b: Any) -> Any:
    """The sum of eight values and eight, rounded."""
    return pack([x + y for x, y in zip(unpack(a), unpack(b), strict=True)])


def floats(pointer: Any) -> list[Any]:
    """Four neighbouring floats of shared memory."""
    return [word.bitcast(Float32) for word in load_shared(pointer)]


def where(condition: Any, value: Any) -> Any:
    """The value, or 0 where the condition fails; None never fails."""
    return value if condition is None else Float32(select_(condition, value, Float32(0.0)))


class Exchange:
    """`count` sums over the cluster, of `parts` warps of every block each: sent by the warps, received by all threads."""

    def __init__(self, config: Any, count: int, parts: int, memory: Any) -> None:
        self.blocks, self.count, self.parts = config.blocks, count, parts
        self.pitch = -(-config.blocks * parts // 4) * 4  # whole 16 bytes
        self.values = memory.allocate_tensor(Float32, cute.make_layout(count * self.pitch), byte_alignment=16)
        self.barrier = memory.allocate_array(Int64, 1, byte_alignment=8)

    def wait(self) -> None:
        if self.blocks > 1:
            cute.arch.mbarrier_wait(self.barrier, 0)
        else:
            cute.arch.sync_threads()

    def total(self, which: Any) -> Any:
        places = range(0, self.pitch, 4)
        words = [value for at in places for value in floats(self.values.iterator + (which * self.pitch + at))]
        total = words[0]
        for word in words[1 : self.blocks * self.parts]:
            total = total + word
        return total


def send(exchange: Exchange, values: list[Any], first: Any, part: Any, rank: Any) -> None:
    """A warp's part of the sums `first`, `first` + 1, ... to all blocks: a lane for each value and block."""
    lane, _ = lane_and_warp()
    which, peer = lane % len(values), lane // len(values)
    value = values[0]
    for i in range(1, len(values)):
        value = Float32(select_(which == i, values[i], value))
    place = (first + which) * exchange.pitch + rank * exchange.parts + part
    if exchange.blocks > 1:
        send_f32(exchange.values.iterator + place, value, exchange.barrier, peer, peer < exchange.blocks)
    else:
        exchange.values[place] = value


def softmax(squares: Any, dot: Any, config: Any) -> Any:
    """This lane's share: lane j has source j's sums, and every warp works out all of them."""
    lane, _ = lane_and_warp()
    logit = dot * cute.math.rsqrt(squares * Float32(1.0 / config.columns) + Float32(config.eps))
    power = Float32(select_(lane <= config.prev, cute.math.exp(logit - warp_max(logit)), Float32(0.0)))
    return power * (Float32(1.0) / warp_sum(power))


class Place:
    """A thread's place in its token: the columns that it mixes, and its warp's part of a source."""

    def __init__(self, config: Any) -> None:
        self.lane, self.warp = lane_and_warp()
        self.thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        self.row, self.rank = index // config.blocks, index % config.blocks
        self.source, self.part = self.warp // config.parts, self.warp % config.parts
        self.first = self.rank * config.share  # column of the block
        self.base, self.stride = self.row * config.columns + self.first, config.rows * config.columns
        # Every `parts`-th piece of 256 columns, eight of them a lane. None: always inside.
        self.pieces = [(self.part + i * config.parts) * 256 + self.lane * 8 for i in range(config.pieces)]
        whole = [(i + 1) * config.parts * 256 <= config.share for i in range(config.pieces)]
        self.inside = [None if all_of_it else at < config.share for all_of_it, at in zip(whole, self.pieces, strict=True)]
        # Threads past the share repeat its last columns and count for nothing. None: every thread mixes.
        self.column = cutlass.min(self.thread * 8, config.share - 8)
        self.mixes = None if config.threads * 8 == config.share else self.thread * 8 < config.share


@cute.jit
def _make(barriers: Any, thread: Any):
    if thread == 0:
        for barrier in barriers:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()


@cute.jit
def _expect(barriers: Any, sizes: cutlass.Constexpr, thread: Any):
    if thread == 0:
        for i in cutlass.range_constexpr(len(sizes)):
            cute.arch.mbarrier_arrive_and_expect_tx(barriers[i], sizes[i])


def begin(config: Any, place: Place, score: Static, norm: Static, score_smem: Any, exchanges: list[Exchange]) -> list[Any]:
    """What comes before the dependency wait. Returns the norm's weights of this thread's columns."""
    barriers = [exchange.barrier for exchange in exchanges]
    if config.blocks > 1:
        _make(barriers, place.thread)
        cute.arch.cluster_arrive()  # nobody sends to a block that has not started
    for at in range(0, config.share // 4, config.threads):
        chunk = at + place.thread
        wanted = None if at + config.threads <= config.share // 4 else chunk < config.share // 4
        copy_async(score_smem.iterator + chunk * 4, score.early().iterator + (place.first + chunk * 4), cutlass.Int32(16), wanted)
    weight = unpack(load_words(norm.early().iterator + (place.first + place.column)))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    if config.blocks > 1:  # each barrier serves once, so what it will wait for can be said now
        _expect(barriers, tuple(4 * e.count * config.blocks * e.parts for e in exchanges), place.thread)
        cute.arch.cluster_wait()
    release_dependents()
    return weight


def copy_part(place: Place, origin: Any, target: Any) -> None:
    """Start copying the warp's part of a row, from the block's first column on, into shared memory."""
    for at, inside in zip(place.pieces, place.inside, strict=True):
        copy_async(target + at, origin + at, cutlass.Int32(16), inside)


def land() -> None:
    """Until what this lane copies is there."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


def sums(values: list[Any], scores: list[Any]) -> tuple[Any, Any]:
    """Of eight columns: their squares, and their product with the score."""
    squares, dot = Float32(0.0), Float32(0.0)
    for value, weight_of in zip(values, scores, strict=True):
        squares = squares + value * value
        dot = dot + value * weight_of
    return squares, dot


def scores_at(score_smem: Any, column: Any) -> list[Any]:
    return [s for half in (0, 4) for s in floats(score_smem.iterator + (column + half))]


def sums_of_part(config: Any, place: Place, source_smem: Any, score_smem: Any) -> list[Any]:
    """What the weight of its source needs of the warp's part."""
    squares, dot = Float32(0.0), Float32(0.0)
    cute.arch.sync_warp()  # lanes past the share read the last columns, which others wrote, and count for nothing
    for i, inside in enumerate(place.inside):
        at = cutlass.min(place.pieces[i], config.share - 8)
        values = unpack(load_shared(source_smem.iterator + (place.source * config.share + at)))
        own_squares, own_dot = sums(values, scores_at(score_smem, at))
        squares = squares + where(inside, own_squares)
        dot = dot + where(inside, own_dot)
    return [warp_sum(squares), warp_sum(dot)]


@cute.jit
def weigh_closed(
    config: cutlass.Constexpr, place: Any, blocks: Settled, source_smem: Any, score_smem: Any, logits: cutlass.Constexpr
):
    """The warp's part of its closed block into shared memory, and what its weight needs of it to the cluster. Closed blocks are
    settled: another launch wrote them than the one in front."""
    if cutlass.const_expr(config.prev > 0) and place.source < config.prev:
        closed = blocks.early().iterator + (place.source * place.stride + place.base)
        copy_part(place, closed, source_smem.iterator + place.source * config.share)
        land()
        send(logits, sums_of_part(config, place, source_smem, score_smem), 2 * place.source, place.part, place.rank)


@cute.jit
def copy_running(config: cutlass.Constexpr, place: Any, running: Any, target: Any):
    """Start copying the part of the prefix, of those warps that are to add delta to it."""
    if place.source == config.prev:
        copy_part(place, running, target)


def mixture(config: Any, place: Place, share_of: Any, source_smem: Any, sources: int) -> list[Any]:
    """This thread's columns of so many sources, weighed."""
    mixed = [Float32(0.0)] * 8
    for j in range(sources):
        values = unpack(load_shared(source_smem.iterator + (j * config.share + place.column)))
        mixed = added(mixed, values, share_of, j)
    return mixed


def added(mixed: list[Any], values: list[Any], share_of: Any, source: int) -> list[Any]:
    p = cute.arch.shuffle_sync(share_of, offset=source)
    return [m + p * value for m, value in zip(mixed, values, strict=True)]


def square_sum(place: Place, mixed: list[Any]) -> Any:
    """The warp's sum of squares of the mixture."""
    own = Float32(0.0)
    for value in mixed:
        own = own + value * value
    return warp_sum(where(place.mixes, own))


def normalised(config: Any, square: Exchange, mixed: list[Any], weight: list[Any]) -> list[Any]:
    square.wait()
    factor = cute.math.rsqrt(square.total(0) * Float32(1.0 / config.columns) + Float32(config.eps))
    return [m * factor * w for m, w in zip(mixed, weight, strict=True)]


@cute.kernel
def _attn_res(
    score: Static,
    norm: Static,
    delta: Dynamic,
    blocks: Settled,
    prefix: Settled | Dynamic,
    out: Output,
    config: cutlass.Constexpr,
):
    place = Place(config)
    share, sources = config.share, config.prev + 1
    memory = SmemAllocator()
    source_smem = memory.allocate_tensor(BFloat16, cute.make_layout(config.prev * share + config.padded), byte_alignment=16)
    delta_smem = memory.allocate_tensor(BFloat16, cute.make_layout(config.padded if config.has_delta else 8), byte_alignment=16)
    score_smem = memory.allocate_tensor(Float32, cute.make_layout(share), byte_alignment=16)
    logits = Exchange(config, 2 * sources, config.parts, memory)
    square = Exchange(config, 1, config.mixing, memory)
    weight = begin(config, place, score, norm, score_smem, [logits, square])

    own, base = source_smem.iterator + config.prev * share, place.base
    weigh_closed(config, place, blocks, source_smem, score_smem, logits)
    if cutlass.const_expr(config.has_delta):
        copy_running(config, place, prefix.early().iterator + base, own)

    token = dependency_wait()
    running, closed = prefix.after(token).iterator, blocks.after(token).iterator
    pending = delta.after(token).iterator
    if place.source == config.prev:
        if cutlass.const_expr(config.has_delta):
            copy_part(place, pending + base, delta_smem.iterator)
        else:
            copy_part(place, running + base, own)
        land()
        for i in cutlass.range_constexpr(config.pieces):
            at, inside = place.pieces[i], place.inside[i]
            if cutlass.const_expr(config.has_delta or config.write >= 0):
                current = load_shared(own + at)  # past the share: this lane's own padding
                if cutlass.const_expr(config.has_delta):
                    current = together(current, load_shared(delta_smem.iterator + at))
                    store_shared(own + at, current, inside)
                    store_global(running + (base + at), current, inside)
                if cutlass.const_expr(config.write >= 0):
                    store_global(closed + (config.write * place.stride + base + at), current, inside)
        if cutlass.const_expr(config.prev > 0):
            send(logits, sums_of_part(config, place, source_smem, score_smem), 2 * place.source, place.part, place.rank)
    cute.arch.sync_threads()  # the sources are in shared memory
    if cutlass.const_expr(config.prev > 0):
        logits.wait()
        own = cutlass.min(place.lane, config.prev)
        share_of = softmax(logits.total(2 * own), logits.total(2 * own + 1), config)
        mixed = mixture(config, place, share_of, source_smem, sources)
    else:
        mixed = unpack(load_shared(source_smem.iterator + place.column))

    if cutlass.const_expr(config.normalise):
        total = square_sum(place, mixed)
        if place.warp < config.mixing:
            send(square, [total], 0, place.warp, place.rank)
        mixed = normalised(config, square, mixed, weight)
    store_global(out.after(token).iterator + (base + place.column), pack(mixed), place.mixes)


def launch(kernel: Any, config: Any, stream: object) -> None:
    kernel.launch(
        grid=[config.tokens * config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        cluster=[config.blocks, 1, 1] if config.blocks > 1 else None,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )


def bf16_attn_res(config: Any, *args: Any) -> None:
    *tensors, stream = args
    launch(_attn_res(*tensors, config), config, stream)
