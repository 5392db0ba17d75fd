"""`all_reduce`: the sum of a small activation over the ranks of one host, by stores into peer-visible mailboxes. One launch.

    out = bf(sum over ranks of x_r)        x_r [T, D] bf16 of this rank; summed in FP32 in the order of ranks: equal bits on all

For what no matmul's own exchange covers (`oproj` sums in the launch of its product). Two neighbouring values travel as one word
that carries its epoch (`comm/layout.py`), so there is no flag and no barrier between ranks.

    one-shot   every rank sends every word to all ranks and adds up all of them itself: one trip
    two-shot   words are dealt to ranks by 32; the owner adds up and sends the sums to all: two trips, a world-th of the bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...comm import BOUND_NS, Box
from ...reasons import Reason, Refusal
from .. import posted
from ..build import ACTIVATION, ARCHS, OUTPUT, KernelSpec, Param
from ..posted import Plan
from ..single import compiled

SMS = 132  # blocks that surely run at once, as they wait for their counterparts
CHUNK = 32  # neighbouring words that have one owner: what a warp sends together
MOST_ITEMS = 8  # words of one thread


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Config:
    """`shots`: 1 or 2, or None for the default. `bound_ns`: how long to wait for a peer."""

    tokens: int
    columns: int
    world: int
    shots: int | None = None
    threads: int = 512
    bound_ns: int = BOUND_NS

    @property
    def pairs(self) -> int:
        return self.tokens * self.columns // 2

    @property
    def two_shot(self) -> bool:
        """Two trips pay where one would send several times the bytes: from four ranks on, and not for a few rows."""
        return (self.shots or (2 if self.world > 2 and self.pairs > 8192 else 1)) == 2

    @property
    def blocks(self) -> int:
        return min(SMS, ceil_div(self.pairs, self.threads))

    @property
    def items(self) -> int:
        """Words of one thread."""
        return ceil_div(self.pairs, self.blocks * self.threads)

    @property
    def share(self) -> int:
        """Words that a rank sends to one other on the first trip."""
        return ceil_div(self.pairs, CHUNK * self.world) * CHUNK if self.two_shot else self.pairs

    @property
    def words(self) -> int:
        """Words of mailbox that a sender needs."""
        return self.share * (2 if self.two_shot else 1)

    def owner(self, pair: Any) -> Any:
        """The rank that adds up a pair in two shots. For plain and for traced integers, as `word`."""
        return pair // CHUNK % self.world

    def word(self, pair: Any, second: bool = False) -> Any:
        """Which of the sender's words a pair is. In two shots a rank's chunks lie packed, the sums (`second`) behind."""
        if not self.two_shot:
            return pair
        return (self.share if second else 0) + pair // (CHUNK * self.world) * CHUNK + pair % CHUNK


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"all_reduce: expected one of {', '.join(ARCHS)}, found {arch}")
    c, most = config, MOST_ITEMS * SMS * config.threads
    checks = (
        (c.tokens >= 1 and c.columns % 2 == 0, f"rows of an even number of columns, found {c.tokens} of {c.columns}"),
        (c.world in (2, 4, 8), f"2, 4 or 8 ranks within one host, found {c.world}"),
        (c.shots in (None, 1, 2), f"1 or 2 shots, found {c.shots}"),
        (c.threads in (128, 256, 512, 1024), f"128, 256, 512 or 1024 threads, found {c.threads}"),
        (c.pairs <= most, f"at most {most} words, {MOST_ITEMS} a thread; found {c.pairs}"),
    )
    failed = [text for holds, text in checks if not holds]
    return Refusal(Reason.OP_SHAPE, f"all_reduce: expected {failed[0]}") if failed else None


def spec(config: Config) -> KernelSpec:
    shape = (config.tokens, config.columns)
    params = (
        Param("x", "bf16", shape, ACTIVATION),
        Param("out", "bf16", shape, OUTPUT),
        *posted.params(config.world),
    )
    name = "bf16_all_reduce_two_shot" if config.two_shot else "bf16_all_reduce_one_shot"
    return KernelSpec(name, "all_reduce", config, f"{__name__}.cute:bf16_all_reduce", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return Plan.make(config, arch, unavailable_reason(config, arch), spec)


def run(plan: Plan, x: torch.Tensor, out: torch.Tensor, mailbox: Box, stream: int | None = None) -> None:
    """x [tokens, columns] bf16 of this rank -> out [tokens, columns] bf16, the sum, alike on all ranks; `out` may be `x`.

    Raises ValueError where the mailbox does not fit the plan.
    """
    compiled(plan)(x, out, *posted.arguments(plan, mailbox), stream=stream)


def specs() -> list[KernelSpec]:
    """The hidden state and the latent of one rank of a TP8 deployment, and small ones of each kind."""
    served = [Config(t, columns, 8) for columns in (7168, 3584) for t in (1, 8, 64)]
    small = [Config(3, 64, world, shots, threads=128) for world, shots in ((2, 1), (2, 2), (4, 2))]
    return [spec(config) for config in [*small, *served]]
