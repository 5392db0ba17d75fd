"""Device half of `attn_res`: one cluster per token, every source's bytes in flight at once, two exchanges of a few numbers.

A token is 7168 columns of up to nine sources: 129 KB that one SM could not load fast enough. A cluster's blocks take a share of
the columns each. In a block, a few warps take each source: they copy their part into shared memory and, when it is there, add up
the two sums that its weight needs; the prefix's warps also add the pending delta. Then every thread mixes eight columns of all
sources. What must be known of the whole row is little: two sums for each source, and one of the mixture. Warps send them straight
to every block of the cluster, and count on each block's barrier.

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
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents


def unpack(words: Any) -> list[Any]:
    return [value for word in words for value in unpack_bf16(word)]


def pack(values: list[Any]) -> Any:
    return tuple(pack_bf16(even, odd) for even, odd in zip(values[0::2], values[1::2], strict=True))


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


def weights(logits: Exchange, config: Any) -> Any:
    """This lane's share of the softmax: lane j has source j's, and every warp works out all of them."""
    lane, _ = lane_and_warp()
    own = cutlass.min(lane, config.prev)
    squares, dot = logits.total(2 * own), logits.total(2 * own + 1)
    logit = dot * cute.math.rsqrt(squares * Float32(1.0 / config.columns) + Float32(config.eps))
    power = Float32(select_(lane <= config.prev, cute.math.exp(logit - warp_max(logit)), Float32(0.0)))
    return power * (Float32(1.0) / warp_sum(power))


@cute.kernel
def _attn_res(
    score: Static, norm: Static, delta: Dynamic, blocks: Dynamic, prefix: Dynamic, out: Output, config: cutlass.Constexpr
):
    lane, warp = lane_and_warp()
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    row, rank = index // config.blocks, index % config.blocks
    share, parts, sources = config.share, config.parts, config.prev + 1
    memory = SmemAllocator()
    source_smem = memory.allocate_tensor(BFloat16, cute.make_layout(sources * share), byte_alignment=16)
    score_smem = memory.allocate_tensor(Float32, cute.make_layout(share), byte_alignment=16)
    logits = Exchange(config, 2 * sources, parts, memory)
    square = Exchange(config, 1, config.mixing, memory)
    if cutlass.const_expr(config.blocks > 1):
        if thread == 0:
            for exchange in (logits, square):
                cute.arch.mbarrier_init(exchange.barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()  # nobody sends to a block that has not started
    for at in cutlass.range_constexpr(0, share // 4, config.threads):
        chunk = at + thread
        wanted = None if at + config.threads <= share // 4 else chunk < share // 4
        origin = score.early().iterator + (rank * share + chunk * 4)
        copy_async(score_smem.iterator + chunk * 4, origin, cutlass.Int32(16), wanted)
    column = cutlass.min(thread * 8, share - 8)
    mixes = (
        None if config.threads * 8 == share else thread * 8 < share
    )  # None: every thread; threads past the share repeat its last columns and count for nothing
    weight = unpack(load_words(norm.early().iterator + (rank * share + column)))
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    if cutlass.const_expr(config.blocks > 1):
        if thread == 0:  # each barrier serves once, so what it will wait for can be said now
            for exchange in (logits, square):
                cute.arch.mbarrier_arrive_and_expect_tx(exchange.barrier, 4 * exchange.count * config.blocks * exchange.parts)
        cute.arch.cluster_wait()
    release_dependents()

    # The warp's part of its source: every `parts`-th piece of 256 columns, eight of them a lane.
    token = dependency_wait()
    running, closed = prefix.after(token).iterator, blocks.after(token).iterator
    pending = delta.after(token).iterator
    source, part = warp // parts, warp % parts
    base, stride = row * config.columns + rank * share, config.rows * config.columns
    pieces = [(part + i * parts) * 256 + lane * 8 for i in range(config.pieces)]
    inside = [None if (i + 1) * parts * 256 <= share else at < share for i, at in enumerate(pieces)]  # None: always
    if source < config.prev:
        for i in cutlass.range_constexpr(config.pieces):
            target = source_smem.iterator + (source * share + pieces[i])
            copy_async(target, closed + (source * stride + base + pieces[i]), cutlass.Int32(16), inside[i])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
    elif source == config.prev:
        places = [cutlass.min(at, share - 8) for at in pieces]
        current = [load_words(running + (base + place)) for place in places]
        if cutlass.const_expr(config.has_delta):
            added = [load_words(pending + (base + place)) for place in places]
            sums = [zip(unpack(a), unpack(b), strict=True) for a, b in zip(current, added, strict=True)]
            current = [pack([a + b for a, b in pairs]) for pairs in sums]
        for i in cutlass.range_constexpr(config.pieces):
            store_shared(source_smem.iterator + (source * share + pieces[i]), current[i], inside[i])
            if cutlass.const_expr(config.has_delta):
                store_global(running + (base + pieces[i]), current[i], inside[i])
            if cutlass.const_expr(config.write >= 0):
                store_global(closed + (config.write * stride + base + pieces[i]), current[i], inside[i])

    if cutlass.const_expr(config.prev > 0) and source <= config.prev:
        squares, dot = Float32(0.0), Float32(0.0)
        cute.arch.sync_warp()  # lanes past the share read the last columns, which others wrote, and count for nothing
        for i in cutlass.range_constexpr(config.pieces):
            place = cutlass.min(pieces[i], share - 8)
            values = unpack(load_shared(source_smem.iterator + (source * share + place)))
            scores = [s for half in (0, 4) for s in floats(score_smem.iterator + (place + half))]
            own_squares, own_dot = Float32(0.0), Float32(0.0)
            for value, weight_of in zip(values, scores, strict=True):
                own_squares = own_squares + value * value
                own_dot = own_dot + value * weight_of
            squares = squares + where(inside[i], own_squares)
            dot = dot + where(inside[i], own_dot)
        send(logits, [warp_sum(squares), warp_sum(dot)], 2 * source, part, rank)
    cute.arch.sync_threads()  # the sources are in shared memory
    if cutlass.const_expr(config.prev > 0):
        logits.wait()
        own_weight = weights(logits, config)
        mixed = [Float32(0.0)] * 8
        for j in cutlass.range_constexpr(sources):
            p = cute.arch.shuffle_sync(own_weight, offset=j)
            values = unpack(load_shared(source_smem.iterator + (j * share + column)))
            mixed = [m + p * value for m, value in zip(mixed, values, strict=True)]
    else:
        mixed = unpack(load_shared(source_smem.iterator + column))

    if cutlass.const_expr(config.normalise):
        own = Float32(0.0)
        for value in mixed:
            own = own + value * value
        total = warp_sum(where(mixes, own))
        if warp < config.mixing:
            send(square, [total], 0, warp, rank)
        square.wait()
        factor = cute.math.rsqrt(square.total(0) * Float32(1.0 / config.columns) + Float32(config.eps))
        mixed = [m * factor * w for m, w in zip(mixed, weight, strict=True)]
    store_global(out.after(token).iterator + (base + column), pack(mixed), mixes)


def bf16_attn_res(
    config: Any, score: Static, norm: Static, delta: Dynamic, blocks: Dynamic, prefix: Dynamic, out: Output, stream: object
) -> None:
    _attn_res(score, norm, delta, blocks, prefix, out, config).launch(
        grid=[config.tokens * config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        cluster=[config.blocks, 1, 1] if config.blocks > 1 else None,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
