"""Where the outputs of a skinny matmul lie in a mailbox, when they are summed over ranks.

Two neighbouring rows of a token are a pair, which travels as one word (`comm/layout.py`). Where the sum happens in the launch of
the product, each group of blocks numbers its own pairs, and the same group on the other ranks takes them.

    one-shot   every rank sends every pair to all ranks and adds up all of them itself: one trip, D * (world - 1) pairs / 2 sent
    two-shot   pairs are dealt to ranks by 16; the owner adds them up and sends the sum to all: two trips, 2 / world of the bytes,
               so that two ranks have nothing to gain from it

Where the launch only posts, every rank sends every pair to all, and AttnRes behind it adds them up: nobody holds an SM with its
ring of weights while words travel, so the next matmul's ring fills. Pairs are numbered through then, and groups hold whole ones.

Pure Python: the host half plans with it, the device half (`device/reduction.py`) traces with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from ..comm import RANKS, SMS
from .library import Library
from .skinny import Shape, Tactic, ceil_div

ONE_SHOT_TOKENS = 4  # above it the bytes of one-shot cost more than the second trip of two-shot
CHUNK = 16  # neighbouring pairs that have one owner: what a warp holds


def trips(world: int, tokens: int) -> int:
    """Over the link, for a sum over `world` ranks."""
    return 2 if world > 2 and tokens > ONE_SHOT_TOKENS else 1


def posted_word(rows: int, token: Any, row: Any) -> Any:
    """Which of the sender's words holds rows `row` and `row` + 1 of a token, where the next launch sums. For plain and for traced
    integers.
    """
    return token * (rows // 2) + row // 2


class Pairs(ABC):
    """What a config inherits whose op sums its outputs over `world` ranks; `shots`: 1 or 2, or None for the default of the batch;
    `bound_ns`: how long to wait for a peer.
    """

    tokens: int
    rows: int
    world: int
    shots: int | None
    bound_ns: int

    @property
    @abstractmethod
    def posts(self) -> bool:
        """The sums are the next launch's."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The geometry of the product."""

    def exchange_problem(self) -> str | None:
        """Why these ranks cannot sum in one launch, or None."""
        blocks = self.shape.tactic.groups * self.shape.tactic.splits
        if self.world not in (1, *RANKS):
            return f"expected 1, 2, 4 or 8 ranks within one host, found {self.world}"
        if self.shots not in (None, 1, 2):
            return f"expected 1 or 2 shots, found {self.shots}"
        if self.world > 1 and blocks > SMS:
            return f"expected at most {SMS} blocks, which wait for each other's counterparts and must run at once, found {blocks}"
        if self.posts and (self.world == 1 or self.shots == 2 or self.rows % 2):
            return f"expected several ranks, one shot and whole pairs of rows where the next launch sums, found {self}"
        return None

    def dealt(self, chosen: Tactic | Library) -> Tactic | Library:
        """The tactic whose groups hold whole pairs, where they must."""
        if not self.posts or isinstance(chosen, Library):
            return chosen
        return replace(chosen, height=chosen.height + chosen.height % 2)

    @property
    def whole(self) -> int:
        """Rows that are dealt together."""
        return 2 if self.posts else 1

    @property
    def two_shot(self) -> bool:
        return self.world > 1 and not self.posts and (self.shots or trips(self.world, self.tokens)) == 2

    @property
    def group_words(self) -> int:
        """Words that one group of blocks sends to one rank, in one shot."""
        pairs = ceil_div(self.tokens * self.shape.tactic.rows, 2)
        return ceil_div(pairs, CHUNK * self.world) * CHUNK if self.two_shot else pairs

    def owner(self, pair: Any) -> Any:
        """The rank that adds up a pair of a group in two shots. For plain and for traced integers, as `word`."""
        return pair // CHUNK % self.world

    def word(self, group: Any, pair: Any, second: bool = False) -> Any:
        """Which of the sender's words a pair is. In two shots a rank's chunks lie packed, the sums (`second`) behind."""
        if not self.two_shot:
            return group * self.group_words + pair
        behind = self.group_words * self.shape.tactic.groups if second else 0
        return behind + group * self.group_words + pair // (CHUNK * self.world) * CHUNK + pair % CHUNK

    @property
    def words(self) -> int:
        """Words of mailbox that a sender needs."""
        if self.posts:
            return self.tokens * self.rows // 2
        return 0 if self.world == 1 else self.group_words * self.shape.tactic.groups * (2 if self.two_shot else 1)
