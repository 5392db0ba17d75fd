"""Device half of `all_reduce`. The protocol between ranks is `ops/device/exchange.py`; which word goes where, the op's head."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Uint32

from ..device.exchange import Exchange, Post, add_up
from ..device.ptx import load_word, store_word
from ..order import Dynamic, Ordered, Output, dependency_wait, release_dependents


class Group:
    """The ranks, as one thread sees them."""

    def __init__(self, config: Any, token: Ordered, post: Post) -> None:
        self.config, self.exchange = config, Exchange(config.world, config.bound_ns, token, post)
        self.ranks = list(range(config.world))
        self.boxes = [self.exchange.box_of(r) for r in self.ranks]

    def first_trip(self, x: Any, pairs: list[Any], inside: list[Boolean]) -> None:
        """Send the pairs of x that are `inside` to who adds them up."""
        words = [load_word(x + 2 * pair) for pair in pairs]
        for pair, word, real in zip(pairs, words, inside, strict=True):
            for box in [self.exchange.box_of(self.config.owner(pair))] if self.config.two_shot else self.boxes:
                self.exchange.send(box, self.config.word(pair), word, real)

    def total(self, pair: Any, inside: Boolean) -> Uint32:
        """A pair of x added up over all ranks."""
        return add_up(self.exchange.receive(self.ranks, self.config.word(pair), inside))


@cute.kernel
def _all_reduce(x: Dynamic, out: Output, post: tuple[Any, ...], config: cutlass.Constexpr):
    """post: the fields of its `Post`."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    release_dependents()
    token = dependency_wait()
    own = Post(*post)
    group = Group(config, token, own)
    source, target = x.after(token).iterator, out.after(token).iterator
    pairs = [block * config.threads + thread + i * config.blocks * config.threads for i in range(config.items)]
    # Threads past the end repeat the last word and neither send nor store it.
    inside = [pair < config.pairs for pair in pairs]
    pairs = [cutlass.min(pair, config.pairs - 1) for pair in pairs]
    group.first_trip(source, pairs, inside)
    if cutlass.const_expr(config.two_shot):
        for pair, real in zip(pairs, inside, strict=True):
            mine = real & (config.owner(pair) == own.rank)
            total = group.total(pair, mine)
            for to in group.boxes:
                group.exchange.send(to, config.second(pair), total, mine)
    for pair, real in zip(pairs, inside, strict=True):
        if cutlass.const_expr(config.two_shot):
            (word,) = group.exchange.receive([config.owner(pair)], config.second(pair), real, relayed=True)
        else:
            word = group.total(pair, real)
        store_word(target + 2 * pair, word, real)
    cute.arch.sync_threads()
    group.exchange.arrive(config.blocks)


def bf16_all_reduce(config: Any, x: Dynamic, out: Output, *args: Any) -> None:
    *post, stream = args
    launch(_all_reduce(x, out, tuple(post), config), config, stream)


def launch(kernel: Any, config: Any, stream: object) -> None:
    kernel.launch(
        grid=[config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
