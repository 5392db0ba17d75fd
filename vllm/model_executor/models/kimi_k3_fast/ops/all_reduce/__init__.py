"""`all_reduce`: the sum of a small activation over the ranks of one host, by stores into peer-visible mailboxes. One launch.

    s = bf(sum over ranks of x_r)          x_r [T, D] bf16 of this rank; summed in FP32 in the order of ranks: equal bits on all

    out = s                                                 `run`
    out = this rank's columns of bf(RMSNorm(s) norm)        `run_norm`: the latent, in front of a product of which a rank has
                                                            a share of K

For what no matmul's own exchange covers (`oproj` sums in the launch of its product). Two neighbouring values travel as one word
that carries its epoch (`comm/layout.py`), so there is no flag and no barrier between ranks.

    one-shot   every rank sends every word to all ranks and adds up all of them itself: one trip
    two-shot   words are dealt to ranks by 32; the owner adds up and sends the sums to all: two trips, a world-th of the bytes.
               With the norm, a rank owns its columns and all it has to send on is the sum of their squares, one word a token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...comm import BOUND_NS, RANKS, SMS, Box
from ...reasons import Reason, Refusal
from .. import posted
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, KernelSpec, Param
from ..posted import Plan
from ..single import compiled
from ..skinny import ceil_div

CHUNK = 32  # neighbouring words that have one owner: what a warp sends together
MOST_ITEMS = 8  # words of one thread
NORM_THREADS, NORM_ITEMS = 896, 4  # as above, with the norm: more of them would not fit in registers


class Dealt:
    """How the pairs of x are dealt to ranks and to words of a mailbox: what both configs inherit."""

    tokens: int
    columns: int
    world: int
    shots: int | None

    @property
    def pairs(self) -> int:
        return self.tokens * self.columns // 2

    @property
    def two_shot(self) -> bool:
        """Two trips pay where one would send several times the bytes: from four ranks on, and not for a few rows."""
        return (self.shots or (2 if self.world > 2 and self.pairs > 8192 else 1)) == 2

    @property
    def chunk(self) -> int:
        """Neighbouring words that have one owner."""
        return CHUNK

    @property
    def share(self) -> int:
        """Words that a rank sends to one other on the first trip."""
        return ceil_div(self.pairs, self.chunk * self.world) * self.chunk if self.two_shot else self.pairs

    def owner(self, pair: Any) -> Any:
        """The rank that a pair belongs to. For plain and for traced integers, as `packed` and `word`."""
        return pair // self.chunk % self.world

    def packed(self, pair: Any) -> Any:
        """Number of a pair among its owner's."""
        return pair // (self.chunk * self.world) * self.chunk + pair % self.chunk

    def word(self, pair: Any) -> Any:
        """Which of the sender's words a pair is on the first trip. In two shots only its owner gets it."""
        return self.packed(pair) if self.two_shot else pair


@dataclass(frozen=True)
class Config(Dealt):
    """`shots`: 1 or 2, or None for the default. `bound_ns`: how long to wait for a peer."""

    tokens: int
    columns: int
    world: int
    shots: int | None = None
    threads: int = 512
    bound_ns: int = BOUND_NS

    @property
    def blocks(self) -> int:
        return min(SMS, ceil_div(self.pairs, self.threads))

    @property
    def items(self) -> int:
        """Words of one thread."""
        return ceil_div(self.pairs, self.blocks * self.threads)

    @property
    def words(self) -> int:
        """Words of mailbox that a sender needs."""
        return self.share * (2 if self.two_shot else 1)

    def second(self, pair: Any) -> Any:
        """Which of its owner's words a pair's sum is, on the second trip."""
        return self.share + self.packed(pair)


@dataclass(frozen=True)
class NormConfig(Dealt):
    """`eps` of the norm; the rest as in `Config`. A block has a token."""

    tokens: int
    columns: int
    world: int
    eps: float
    shots: int | None = None
    bound_ns: int = BOUND_NS

    @property
    def chunk(self) -> int:
        """A rank owns the columns that it writes."""
        return self.columns // (2 * self.world)

    @property
    def blocks(self) -> int:
        return self.tokens

    @property
    def items(self) -> int:
        """Words of one thread."""
        return ceil_div(self.columns, 2 * NORM_THREADS)

    @property
    def threads(self) -> int:
        """Whole warps, with as few words a thread as there may be."""
        return ceil_div(self.columns, 2 * 32 * self.items) * 32

    @property
    def words(self) -> int:
        """Words of mailbox that a sender needs."""
        return self.share + (self.tokens if self.two_shot else 0)

    def second(self, token: Any) -> Any:
        """Which of a sender's words the sum of squares over its columns of a token is, on the second trip."""
        return self.share + token


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    c, most = config, MOST_ITEMS * SMS * config.threads
    checks = (
        (c.columns % 2 == 0, f"an even number of columns, found {c.columns}"),
        (c.threads in (128, 256, 512, 1024), f"128, 256, 512 or 1024 threads, found {c.threads}"),
        (c.pairs <= most, f"at most {most} words, {MOST_ITEMS} a thread; found {c.pairs}"),
    )
    return _refusal(c, arch, checks)


def norm_unavailable_reason(config: NormConfig, arch: str) -> Refusal | None:
    """Why there is no kernel with the norm for this shape on this architecture, or None."""
    c, most = config, 2 * NORM_ITEMS * NORM_THREADS
    checks = (
        (c.columns % (2 * c.world) == 0, f"a share of whole words of the columns, found {c.columns} for {c.world} ranks"),
        (c.columns <= most, f"at most {most} columns, {NORM_ITEMS} words a thread; found {c.columns}"),
        (c.tokens <= SMS, f"at most {SMS} tokens, whose blocks must run at once; found {c.tokens}"),
    )
    return _refusal(c, arch, checks)


def _refusal(c: Dealt, arch: str, further: tuple[tuple[bool, str], ...]) -> Refusal | None:
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"all_reduce: expected one of {', '.join(ARCHS)}, found {arch}")
    checks = (
        (c.tokens >= 1 and c.columns >= 1, f"tokens and columns, found {c.tokens} and {c.columns}"),
        (c.world in RANKS, f"2, 4 or 8 ranks within one host, found {c.world}"),
        (c.shots in (None, 1, 2), f"1 or 2 shots, found {c.shots}"),
        *further,
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


def norm_spec(config: NormConfig) -> KernelSpec:
    params = (
        Param("norm", "bf16", (config.columns,), STATIC),
        Param("x", "bf16", (config.tokens, config.columns), ACTIVATION),
        Param("out", "bf16", (config.tokens, config.columns // config.world), OUTPUT),
        *posted.params(config.world),
    )
    name = "bf16_all_reduce_norm_two_shot" if config.two_shot else "bf16_all_reduce_norm_one_shot"
    return KernelSpec(name, "all_reduce", config, f"{__name__}.norm:bf16_all_reduce_norm", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return Plan.make(config, arch, unavailable_reason(config, arch), spec)


def norm_plan(config: NormConfig, arch: str) -> Plan:
    """Raises ValueError where `norm_unavailable_reason` has one."""
    return Plan.make(config, arch, norm_unavailable_reason(config, arch), norm_spec)


def run(plan: Plan, x: torch.Tensor, out: torch.Tensor, mailbox: Box, stream: int | None = None) -> None:
    """x [tokens, columns] bf16 of this rank -> out [tokens, columns] bf16, the sum, alike on all ranks; `out` may be `x`.

    Raises ValueError where the mailbox does not fit the plan.
    """
    compiled(plan)(x, out, *posted.arguments(plan, mailbox), stream=stream)


def run_norm(plan: Plan, x: torch.Tensor, norm: torch.Tensor, out: torch.Tensor, mailbox: Box, stream: int | None = None) -> None:
    """x [tokens, columns] bf16 of this rank, norm [columns] bf16, the same on all ranks -> out [tokens, columns / world] bf16, of
    the normalised sum the columns from rank * columns / world on.

    Raises ValueError where the mailbox does not fit the plan.
    """
    compiled(plan)(norm, x, out, *posted.arguments(plan, mailbox), stream=stream)


def specs() -> list[KernelSpec]:
    """The hidden state and the latent of one rank of a TP8 deployment, and small ones of each kind."""
    served = [Config(t, columns, 8) for columns in (7168, 3584) for t in (1, 8, 64)]
    small = [Config(3, 64, world, shots, threads=128) for world, shots in ((2, 1), (2, 2), (4, 2))]
    normed = [NormConfig(3, 64, world, 1e-5, shots) for world, shots in ((2, 1), (4, 2))]
    normed += [NormConfig(t, 3584, 8, 1e-5) for t in (1, 8, 64)]
    return [*map(spec, [*small, *served]), *map(norm_spec, normed)]
