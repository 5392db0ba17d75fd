"""`oproj`: the attention output projection, the sum over ranks and the update of the residual prefix, in one launch.

    y = bf(sum over ranks of x_r Wo_r^T)         x_r [T, K], Wo_r [D, K] of this rank; D = hidden size
    prefix = y                                   at a layer that starts a new accumulation ("write")
    prefix = bf(prefix + y)                      at the others ("add")
    each rank's x_r Wo_r^T, to all ranks         where AttnRes behind it adds up and updates the prefix ("post")

The matmul is the skinny one of `ops/skinny.py`. Each output, once summed over the block, is rounded to BF16 and sent to the
peers' mailboxes as a pair of neighbours in one self-validating word, in one shot or two (`ops/pairs.py`); there is no flag and no
barrier between ranks.

Sums run in the order of ranks, so all ranks hold the same bits. With one rank no mailbox is needed, and for many tokens it is the
library's product, which adds to the prefix itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...comm import BOUND_NS, Box
from ...reasons import Reason, Refusal
from .. import library, measured, posted
from ..build import ACTIVATION, ARCHS, STATE, STATIC, KernelSpec, Param
from ..library import Library
from ..pairs import Pairs
from ..single import compiled
from ..skinny import Shape, Tactic, ring_tactic


@dataclass(frozen=True)
class Config(Pairs):
    """`tokens` of this (padded) batch; `rows` x `columns` of this rank's weight; `world` ranks; `update`: "write", "add" or
    "post".

    `shots`: 1 or 2, or None for the default of the batch. `tactic`: None for the default. `bound_ns`: how long to wait for a
    peer.
    """

    tokens: int
    rows: int
    columns: int
    world: int = 1
    update: str = "add"
    shots: int | None = None
    tactic: Tactic | Library | None = None
    bound_ns: int = BOUND_NS

    @property
    def posts(self) -> bool:
        return self.update == "post"

    @property
    def chosen(self) -> Tactic | Library:
        """The given tactic, the measured one, or the default. The library for one rank alone."""
        sizes = {"rows": self.rows, "columns": self.columns}
        found = self.tactic or measured.tactic(Path(__file__).parent, self.tokens, library=self.world == 1, **sizes)
        return self.dealt(found or self._unmeasured)

    @property
    def shape(self) -> Shape:
        """The geometry of our kernel; of its default where the library multiplies."""
        chosen = self.chosen
        return Shape(self.tokens, (self.columns,), chosen if isinstance(chosen, Tactic) else self._unmeasured)

    @property
    def _unmeasured(self) -> Tactic:
        return measured.unmeasured(self.rows, (self.columns,), self.tokens)


class Plan(posted.Plan):
    """One kernel, or the library's product; with one rank no mailbox."""

    def __str__(self) -> str:
        c = self.config
        if self.spec is None:
            return f"oproj {c.tokens}x{c.rows}x{c.columns} {c.update} alone, product by the library"
        trips = "posted" if c.posts else f"{2 if c.two_shot else 1}-shot"
        how = "alone" if c.world == 1 else f"{trips} over {c.world} ranks, {self.words} words"
        return f"oproj {c.tokens}x{c.rows}x{c.columns} {c.update} {how}, {c.shape.tactic}, {c.shape.smem_bytes} B shared"


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"oproj: expected one of {', '.join(ARCHS)}, found {arch}")
    if isinstance(config.chosen, Library):
        problem = library.problem(config.tokens)
        problem = problem or (None if config.world == 1 else f"expected one rank for the library, found {config.world}")
    else:
        problem = config.shape.problem() or config.shape.uncovered(config.rows, config.whole)
    problem = config.exchange_problem() or problem
    if config.update not in ("write", "add", "post"):
        problem = f"expected update write, add or post, found {config.update}"
    return Refusal(Reason.OP_SHAPE, f"oproj: {problem}") if problem else None


def spec(config: Config) -> KernelSpec | None:
    """The kernel; None where the library multiplies."""
    if isinstance(config.chosen, Library):
        return None
    config = replace(config, tactic=config.shape.tactic)
    params: tuple[Param, ...] = (
        Param("w", "bf16", (config.rows, config.columns), STATIC),
        Param("x", "bf16", (config.tokens, config.columns), ACTIVATION),
    )
    if config.posts:
        name, entry = "bf16_oproj_posted", "bf16_oproj_posted"
    else:
        params += (Param("prefix", "bf16", (config.tokens, config.rows), STATE),)
        name, entry = "bf16_oproj", "bf16_oproj"
    if config.world > 1:
        params += posted.params(config.world)
        if not config.posts:
            name, entry = f"bf16_oproj_{'two_shot' if config.two_shot else 'one_shot'}", "bf16_oproj_reduced"
    return KernelSpec(name, "oproj", config, f"{__name__}.cute:{entry}", params, settles=True)


def plan(config: Config, arch: str) -> posted.Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return Plan.make(config, arch, unavailable_reason(config, arch), spec)


def run(
    plan: posted.Plan,
    y: torch.Tensor,
    weight: torch.Tensor,
    prefix: torch.Tensor | None,
    mailbox: Box | None = None,
    stream: int | None = None,
) -> None:
    """y [tokens, columns] bf16, weight [rows, columns] bf16; prefix [tokens, rows] bf16 is updated in place, alike on all ranks;
    not used where the sums are only posted.

    Raises ValueError where the mailbox does not fit the plan.
    """
    if plan.spec is None:
        (library.multiply if plan.config.update == "write" else library.add_product)(y, weight, prefix, stream)
        return
    if plan.config.world == 1:
        compiled(plan)(weight, y, prefix, stream=stream)
        return
    into = () if plan.config.posts else (prefix,)
    compiled(plan)(weight, y, *into, *posted.arguments(plan, mailbox), stream=stream)


def specs() -> list[KernelSpec]:
    """One rank of a TP8 and the only rank of a TP1 deployment, and small ones of each kind."""
    served = [Config(t, 7168, 1536, world=8, update=u) for t in (1, 8, 64) for u in ("write", "add")]
    served += [Config(t, 7168, 12288, update=u) for t in (1, 8) for u in ("write", "add")]
    served += [Config(t, 7168, 1536, world=2, update="post") for t in (1, 8)]
    small = [Config(3, 160, 256, world=world, shots=shots) for world, shots in ((1, None), (2, 1), (2, 2), (4, 2))]
    small += [Config(3, 160, 256, world=world, update="post") for world in (2, 4)]
    rings = [Config(t, 7168, 1536, 8, tactic=ring_tactic(7168, (1536,), t)) for t in (1, 32)]
    return [found for config in [*small, *served, *rings] if (found := spec(config))]
