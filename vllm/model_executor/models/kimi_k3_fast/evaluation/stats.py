"""Exact tests for paired items: the arms answer the same prompts, so only the items on which they differ carry information."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

SAME = 1e-9  # scores closer than this are equal


def binomial_tail(successes: int, trials: int) -> float:
    """P(X >= successes) for X ~ Binomial(trials, 1/2), exactly."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


@dataclass(frozen=True)
class Paired:
    """The one-sided sign test of "the candidate is worse" (for right/wrong scores, McNemar's exact test).

    `p` is the chance of at least `worse` losses among the differing items if neither arm were better.
    """

    items: int
    worse: int
    better: int
    p: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def paired(candidate: Sequence[float], reference: Sequence[float]) -> Paired:
    """Compare item by item. Raises ValueError for sequences of different length."""
    if len(candidate) != len(reference):
        raise ValueError(f"expected the same items on both arms, found {len(candidate)} and {len(reference)}: run both again")
    worse = sum(c < r - SAME for c, r in zip(candidate, reference, strict=True))
    better = sum(c > r + SAME for c, r in zip(candidate, reference, strict=True))
    return Paired(len(candidate), worse, better, binomial_tail(worse, worse + better))


def fewest_losses(alpha: float) -> int:
    """The fewest losses, without a gain, that the test calls a regression: what the gate can see at best."""
    losses = 1
    while 0.5**losses >= alpha:
        losses += 1
    return losses
