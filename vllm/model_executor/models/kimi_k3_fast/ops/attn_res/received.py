"""Device half of `attn_res` behind launches that only posted delta: this one receives it and adds it up.

As in `cute.py`, but for the prefix, which comes from other GPUs and last: every mixing thread receives its own eight columns of
it and keeps them in registers, while warps have weighed the closed blocks before they begin to wait.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Uint32
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device import exchange
from ..device.ptx import store_global
from ..device.reduce import warp_sum
from ..device.vectors import load_words
from ..order import Dynamic, Output, Settled, Static, dependency_wait
from ..pairs import posted_word
from .cute import (
    Exchange,
    Place,
    added,
    begin,
    launch,
    mixture,
    normalised,
    pack,
    scores_at,
    send,
    softmax,
    square_sum,
    sums,
    together,
    unpack,
    weigh_closed,
    where,
)

IN_FLIGHT = 16  # words that a thread waits for at once: each takes two registers and an address


def received(config: Any, ranks: exchange.Exchange, first: Any, inside: Boolean) -> Any:
    """Eight columns of delta from pair `first` of this rank's mailbox on, as four words."""
    senders = list(range(config.world))
    step = max(1, IN_FLIGHT // config.world)
    found: list[Uint32] = []
    for at in range(0, 4, step):
        pairs = [pair for pair in range(at, min(at + step, 4)) for _ in senders]
        words = ranks.receive(senders * (len(pairs) // config.world), [first + pair for pair in pairs], inside)
        found += [exchange.add_up(words[i : i + config.world]) for i in range(0, len(words), config.world)]
    return tuple(found)


def _by_source(config: Any, place: Place, logits: Exchange, own: Exchange) -> tuple[Any, Any]:
    """This lane's two sums: of a closed block, and in lane `prev` of the prefix."""
    lane = cutlass.min(place.lane, config.prev - 1)
    squares, dot = (
        Float32(select_(place.lane < config.prev, logits.total(2 * lane + which), own.total(which))) for which in (0, 1)
    )
    return squares, dot


@cute.kernel
def _attn_res_received(
    score: Static,
    norm: Static,
    blocks: Settled,
    prefix: Dynamic,
    out: Output,
    post: tuple[Any, ...],
    config: cutlass.Constexpr,
):
    """post: the fields of its `Post`."""
    place = Place(config)
    share, mixing = config.share, config.mixing
    memory = SmemAllocator()
    source_smem = memory.allocate_tensor(BFloat16, cute.make_layout(max(1, config.prev) * share), byte_alignment=16)
    score_smem = memory.allocate_tensor(Float32, cute.make_layout(share), byte_alignment=16)
    logits = Exchange(config, 2 * max(1, config.prev), config.parts, memory)
    own, square = Exchange(config, 2, mixing, memory), Exchange(config, 1, mixing, memory)
    weight = begin(config, place, score, norm, score_smem, [logits, own, square] if config.prev > 0 else [square])

    weigh_closed(config, place, blocks, source_smem, score_smem, logits)

    token = dependency_wait()
    running, closed = prefix.after(token).iterator, blocks.after(token).iterator
    mine = place.thread * 8 < share
    at = place.base + place.column
    ranks = exchange.Exchange(config.world, config.bound_ns, token, exchange.Post(*post), sent=True)
    held = load_words(running + at)  # as the epoch: on its way while words travel
    current = received(config, ranks, posted_word(config.columns, place.row, place.first + place.column), mine)
    if cutlass.const_expr(not config.replaces):
        current = together(held, current)
    store_global(running + at, current, mine)
    if cutlass.const_expr(config.write >= 0):
        store_global(closed + (config.write * place.stride + at), current, mine)
    mixed = unpack(current)
    if cutlass.const_expr(config.prev > 0):
        squares, dot = (warp_sum(where(mine, x)) for x in sums(mixed, scores_at(score_smem, place.column)))
        if place.warp < mixing:
            send(own, [squares, dot], 0, place.warp, place.rank)
        cute.arch.sync_threads()  # the blocks are in shared memory
        logits.wait()
        own.wait()
        squares, dot = _by_source(config, place, logits, own)
        share_of = softmax(squares, dot, config)
        mixed = added(mixture(config, place, share_of, source_smem, config.prev), mixed, share_of, config.prev)

    if cutlass.const_expr(config.normalise):
        total = square_sum(place, mixed)
        if place.warp < mixing:
            send(square, [total], 0, place.warp, place.rank)
        mixed = normalised(config, square, mixed, weight)
    store_global(out.after(token).iterator + at, pack(mixed), place.mixes)


def bf16_attn_res_received(
    config: Any, score: Static, norm: Static, blocks: Settled, prefix: Dynamic, out: Output, *args: Any
) -> None:
    *post, stream = args
    launch(_attn_res_received(score, norm, blocks, prefix, out, tuple(post), config), config, stream)
