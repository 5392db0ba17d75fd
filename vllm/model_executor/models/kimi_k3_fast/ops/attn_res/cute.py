"""Device half of `attn_res`: one cluster per token, every source's bytes in flight at once, two exchanges of a few numbers.

A token is 7168 columns of up to nine sources: 129 KB that one SM could not load fast enough. A cluster's blocks take a share of
the columns each; a thread holds 8 columns of all sources in registers, so they are read once. What must be known of the whole
row is little: two sums for each source, and one of the mixture. Blocks push them into each other's shared memory and meet.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import cluster_barrier, load_shared, push_f32, store_global, store_shared_f32
from ..device.vectors import load_words, pack_bf16, unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents


def unpack(words: Any) -> list[Any]:
    return [value for word in words for value in unpack_bf16(word)]


def pack(values: list[Any]) -> Any:
    return tuple(pack_bf16(even, odd) for even, odd in zip(values[0::2], values[1::2], strict=True))


def warp_sums(values: list[Any], lane: Any) -> tuple[Any, Any, Any]:
    """Sums of many values over a warp, each ending in one lane: (sum, which value, whether this lane holds one).

    Each round halves the list: a lane keeps one half and sends its neighbour the other. n values cost about n shuffles instead
    of 5 n.
    """
    which, count = cutlass.Int32(0), cutlass.Int32(len(values))
    for offset in (16, 8, 4, 2, 1):
        upper = (lane & offset) != 0
        half = (len(values) + 1) // 2
        pairs = [(values[i], values[i + half] if i + half < len(values) else Float32(0.0)) for i in range(half)]
        sent = [Float32(select_(upper, low, high)) for low, high in pairs]
        kept = [Float32(select_(upper, high, low)) for low, high in pairs]
        values = [k + cute.arch.shuffle_sync_bfly(s, offset=offset) for k, s in zip(kept, sent, strict=True)]
        # The upper half of an odd list is one shorter: its last place is padding.
        which = which + cutlass.Int32(select_(upper, cutlass.Int32(half), cutlass.Int32(0)))
        count = cutlass.Int32(select_(upper, count - half, cutlass.min(count, half)))
    return values[0], which, count > 0


class Exchange:
    """`count` sums over the cluster's columns, for all its threads."""

    def __init__(self, config: Any, count: int, allocator: Any) -> None:
        self.config, self.count = config, count
        self.ours = allocator.allocate_tensor(Float32, cute.make_layout(config.warps * count), byte_alignment=16)
        self.all = allocator.allocate_tensor(Float32, cute.make_layout(count * config.pitch), byte_alignment=16)

    def sums(self, values: list[Any], rank: Any) -> list[Any]:
        thread, _, _ = cute.arch.thread_idx()
        config, count = self.config, self.count
        value, which, held = warp_sums(values, thread % 32)
        store_shared_f32(self.ours.iterator + (thread // 32 * count + which), value, held)
        cute.arch.sync_threads()
        for start in range(0, count * config.blocks, config.threads):
            index = thread + start
            at, peer = cutlass.min(index // config.blocks, count - 1), index % config.blocks
            total = self.ours[at]
            for warp in range(1, config.warps):
                total = total + self.ours[warp * count + at]
            push_f32(self.all.iterator + (at * config.pitch + rank), total, peer, index < count * config.blocks)
        if config.blocks > 1:
            cluster_barrier()
        else:
            cute.arch.sync_threads()
        return [self._over_blocks(at) for at in range(count)]

    def _over_blocks(self, at: int) -> Any:
        words = [
            w
            for start in range(0, self.config.pitch, 4)
            for w in load_shared(self.all.iterator + (at * self.config.pitch + start))
        ]
        total = words[0].bitcast(Float32)
        for word in words[1 : self.config.blocks]:
            total = total + word.bitcast(Float32)
        return total


@cute.kernel
def _attn_res(
    score: Static, norm: Static, delta: Dynamic, blocks: Dynamic, prefix: Dynamic, out: Output, config: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    row, rank = index // config.blocks, index % config.blocks
    allocator = SmemAllocator()
    logits = Exchange(config, 2 * (config.prev + 1), allocator)
    square = Exchange(config, 1, allocator)
    column = rank * config.share + cutlass.min(thread * 8, config.share - 8)
    real = thread * 8 < config.share  # threads past the share repeat its last columns and count for nothing
    weight = unpack(load_words(norm.early().iterator + column))
    scores = [w.bitcast(Float32) for half in (0, 4) for w in load_words(score.early().iterator + (column + half))]
    if cutlass.const_expr(config.blocks > 1):
        cute.arch.cluster_arrive()  # nobody pushes into a block that has not started
        cute.arch.cluster_wait()
    release_dependents()

    token = dependency_wait()
    at = row * config.columns + column
    running, closed = prefix.after(token).iterator + at, blocks.after(token).iterator
    stride = config.rows * config.columns
    current = load_words(running)
    words = [load_words(closed + (j * stride + at)) for j in range(config.prev)]
    if cutlass.const_expr(config.has_delta):
        added = unpack(load_words(delta.after(token).iterator + at))
        current = pack([a + b for a, b in zip(unpack(current), added, strict=True)])
        store_global(running, current, real)
    if cutlass.const_expr(config.write >= 0):
        store_global(closed + (config.write * stride + at), current, real)
    sources = [unpack(w) for w in [*words, current]]

    if cutlass.const_expr(config.prev > 0):
        partial = []
        for source in sources:
            squares = dot = Float32(0.0)
            for value, s in zip(source, scores, strict=True):
                squares = squares + value * value
                dot = dot + value * s
            partial += [Float32(select_(real, squares, Float32(0.0))), Float32(select_(real, dot, Float32(0.0)))]
        sums = logits.sums(partial, rank)
        scale = Float32(1.0 / config.columns)
        logit = [d * cute.math.rsqrt(s * scale + Float32(config.eps)) for s, d in zip(sums[0::2], sums[1::2], strict=True)]
        top = logit[0]
        for value in logit[1:]:
            top = cute.arch.fmax(top, value)
        share = [cute.math.exp(value - top) for value in logit]
        total = share[0]
        for value in share[1:]:
            total = total + value
        inverse = Float32(1.0) / total
        mixed = [share[0] * inverse * value for value in sources[0]]
        for p, source in zip(share[1:], sources[1:], strict=True):
            mixed = [m + p * inverse * value for m, value in zip(mixed, source, strict=True)]
    else:
        mixed = sources[0]

    if cutlass.const_expr(config.normalise):
        own = Float32(0.0)
        for value in mixed:
            own = own + value * value
        (mean,) = square.sums([Float32(select_(real, own, Float32(0.0)))], rank)
        factor = cute.math.rsqrt(mean * Float32(1.0 / config.columns) + Float32(config.eps))
        mixed = [m * factor * w for m, w in zip(mixed, weight, strict=True)]
    store_global(out.after(token).iterator + at, pack(mixed), real)


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
