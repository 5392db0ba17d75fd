"""Device half of `ops/pairs.py`: the outputs of a skinny matmul are summed over ranks as they leave the block's own sum.

A kernel uses it in this order, each thread for its own outputs:

    reduction = Reduction(config, token, Target(...), post, group, first)   # behind the dependency wait
    block.reduce(reduction.emit)                                            # sends each output on its first trip
    reduction.finish()                                                      # receives, adds up, stores

or, where the next launch sums, with an `Outbox`, which only sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.cutlass_dsl import select_

from ..order import Ordered
from ..pairs import Pairs, posted_word
from .exchange import Exchange, Post
from .ptx import store_bf16
from .vectors import pack_bf16, unpack_bf16


@dataclass
class Item:
    """One output of this thread. Lanes 2i and 2i + 1 hold neighbouring rows of a token: a pair, which travels as one word."""

    token: Any
    row: Any
    pair: Any  # number of the pair in its group
    inside: Any  # this lane's row exists
    either: Any  # a row of the pair exists
    old: Any = None  # what the target held before, where it is added to


class Target:
    """Where the sums go, a bf16 tensor [T, D]: read, to `add` to it, when the outputs are known to be this thread's, and written
    at the end.
    """

    def __init__(self, tensor: Any, add: bool = False) -> None:
        self.tensor, self.add, self.rows = tensor, add, tensor.shape[1]

    def read(self, token: Any, row: Any) -> Float32 | None:
        if not self.add:
            return None
        return self.tensor[token, cutlass.min(row, self.rows - 1)].to(Float32)

    def put(self, item: Item, y: Any) -> None:
        """target = y, or bf(target + y); y is rounded to BF16 first, as the model rounds it."""
        y = y.to(BFloat16).to(Float32)
        store_bf16(self.tensor.iterator + (item.token * self.rows + item.row), item.old + y if self.add else y, item.inside)


def _across(value: Any) -> Any:
    """The value of the other lane of the pair."""
    return cute.arch.shuffle_sync_bfly(value, offset=1)


class Outbox:
    """Sends this rank's outputs to all ranks, as one thread sees it. `ready`: of the dependency wait."""

    def __init__(self, config: Pairs, ready: Ordered, post: Post) -> None:
        self.config = config
        self.exchange = Exchange(config.world, config.bound_ns, ready, post)
        thread, _, _ = cute.arch.thread_idx()
        self.odd = thread % 2
        half = config.world // 2
        self.ranks = [self.odd * half + j for j in range(half)]  # the lanes of a pair share the peers
        self.boxes = [self.exchange.box_of(r) for r in self.ranks]

    def emit(self, token: Any, row: Any, value: Any, inside: Any) -> None:
        """Takes an output as the block's sum leaves it, and sends it. Both rows of a pair exist."""
        self._send_to_all(posted_word(self.config.rows, token, row), self._word(value(0)), inside)

    def finish(self) -> None:
        """Everything after the block's own sums."""
        tactic = self.config.shape.tactic
        self.exchange.arrive(tactic.groups * tactic.splits)

    def _word(self, mine: Any) -> Uint32:
        """This lane's value and its neighbour's, rounded to BF16; both lanes of a pair hold the same word."""
        other = _across(mine)
        return pack_bf16(self._by_lane(mine, other), self._by_lane(other, mine))

    def _by_lane(self, even: Any, odd: Any) -> Any:
        """`even` in the lanes of even number, `odd` in the others."""
        return type(even)(select_(self.odd == 0, even, odd))

    def _send_to_all(self, index: Any, word: Uint32, inside: Boolean) -> None:
        for box in self.boxes:
            self.exchange.send(box, index, word, inside)


class Reduction(Outbox):
    """The sum over ranks, as one thread sees it. `group`: of blocks; `first`: its first row; `ready`: of the dependency wait."""

    def __init__(self, config: Pairs, ready: Ordered, target: Target, post: Post, group: Any, first: Any) -> None:
        self.target, self.group, self.first = target, group, first
        self.items: list[Item] = []
        super().__init__(config, ready, post)

    def emit(self, token: Any, row: Any, value: Any, inside: Any) -> None:
        """Takes an output as the block's sum leaves it, and sends it on its first trip."""
        mine = value(0)
        either = (Int32(inside) | _across(Int32(inside))) != 0
        pair = (token * self.config.shape.tactic.rows + (row - self.first)) // 2
        item = Item(token, row, pair, inside, either)
        self.items.append(item)
        word = self._word(mine)
        if self.config.two_shot:
            box = self.exchange.box_of(self._owner(item))
            self.exchange.send(box, self._index(item), word, either & (self.odd == 0))
        else:
            self._send_to_all(self._index(item), word, either)
        item.old = self.target.read(token, row)  # behind the sending, which would wait for it

    def finish(self) -> None:
        """Everything after the block's own sums."""
        shape = self.config.shape
        idle = shape.tokens * shape.tactic.rows <= shape.tactic.threads - 32  # the last warp, which has no outputs
        if idle:
            super().finish()
        self._receive()
        if not idle:
            super().finish()

    def _receive(self) -> None:
        """All sums, and put them where they belong."""
        if not self.config.two_shot:
            for item in self.items:
                self.target.put(item, self._total(item, item.either))
            return
        for item in self.items:  # the pairs that are this rank's to add up
            owned = item.either & (self._owner(item) == self.exchange.post.rank)
            self._send_to_all(self._index(item, second=True), self._word(self._total(item, owned)), owned)
        for item in self.items:
            (word,) = self.exchange.receive([self._owner(item)], self._index(item, second=True), item.either, relayed=True)
            self.target.put(item, self._own_half(word))

    def _own_half(self, word: Uint32) -> Float32:
        return self._by_lane(*unpack_bf16(word))

    def _owner(self, item: Item) -> Any:
        return self.config.owner(item.pair)

    def _index(self, item: Item, second: bool = False) -> Any:
        return self.config.word(self.group, item.pair, second)

    def _total(self, item: Item, inside: Boolean) -> Float32:
        """This lane's half of the pair summed over all ranks, in their order, in FP32."""
        words = self.exchange.receive(self.ranks, self._index(item), inside)
        others = [_across(word) for word in words]
        low = [self._by_lane(mine, other) for mine, other in zip(words, others, strict=True)]
        high = [self._by_lane(other, mine) for mine, other in zip(words, others, strict=True)]
        total = Float32(0.0)
        for word in [*low, *high]:
            total = total + self._own_half(word)
        return total
