"""Device half of `all_reduce`. The protocol between ranks is `ops/device/exchange.py`; which word goes where, the op's head."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import inline_ptx

from ..device.exchange import Exchange, Post
from ..device.vectors import pack_bf16, unpack_bf16
from ..order import Dynamic, Output, Peers, dependency_wait, release_dependents


def _sum(words: list[Any]) -> Uint32:
    """BF16 pairs added up in FP32, in the order given."""
    even, odd = Float32(0.0), Float32(0.0)
    for word in words:
        low, high = unpack_bf16(word)
        even, odd = even + low, odd + high
    return pack_bf16(even, odd)


@cute.kernel
def _all_reduce(
    x: Dynamic,
    out: Output,
    peers: Peers,
    box: Dynamic,
    epoch: Dynamic,
    rank: Int32,
    words: Int32,
    config: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    release_dependents()
    token = dependency_wait()
    exchange = Exchange(config.world, config.bound_ns, token, Post(peers, box, epoch, rank, words))
    ranks = list(range(config.world))
    boxes = [exchange.box_of(r) for r in ranks]
    source, target = x.after(token).iterator, out.after(token).iterator
    pairs = [block * config.threads + thread + i * config.blocks * config.threads for i in range(config.items)]
    # Threads past the end repeat the last word and neither send nor store it.
    inside = [pair < config.pairs for pair in pairs]
    pairs = [cutlass.min(pair, config.pairs - 1) for pair in pairs]
    load = "ld.global.b32 {$w0}, [{$r0}];"
    own = [inline_ptx(load, write_only_types=[Uint32], read_only_args=[source + 2 * pair]) for pair in pairs]
    for pair, word, real in zip(pairs, own, inside, strict=True):
        if cutlass.const_expr(config.two_shot):
            exchange.send(exchange.box_of(config.owner(pair)), config.word(pair), word, real)
        else:
            for to in boxes:
                exchange.send(to, config.word(pair), word, real)
    cute.arch.sync_threads()
    exchange.arrive(config.blocks)
    if cutlass.const_expr(config.two_shot):
        for pair, real in zip(pairs, inside, strict=True):
            mine = real & (config.owner(pair) == rank)
            total = _sum(exchange.receive(ranks, config.word(pair), mine))
            for to in boxes:
                exchange.send(to, config.word(pair, second=True), total, mine)
    for pair, real in zip(pairs, inside, strict=True):
        if cutlass.const_expr(config.two_shot):
            (word,) = exchange.receive([config.owner(pair)], config.word(pair, second=True), real, relayed=True)
        else:
            word = _sum(exchange.receive(ranks, config.word(pair), real))
        inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[target + 2 * pair, word], predicate=real)


def bf16_all_reduce(config: Any, *args: Any) -> None:
    *tensors, stream = args
    _all_reduce(*tensors, config).launch(
        grid=[config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
