"""`projection`: y = a W^T for up to 64 tokens, BF16 in, BF16 or FP32 out.

The KDA and MLA input projections and every other matrix that is only multiplied. Weights are static, so they stream before the
dependency wait; `ops/skinny.py` has the geometry. One launch, no workspace; for many tokens the library's product instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...reasons import Reason, Refusal
from .. import library, measured
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, KernelSpec, Param
from ..library import Library
from ..single import Plan, compiled, make
from ..skinny import Shape, Tactic, default_tactic, ring_tactic


@dataclass(frozen=True)
class Config:
    """Sizes: `tokens` of this (padded) batch, `rows` x `columns` of the weight. `out`: "bf16" or "f32". `tactic`: None for the
    measured one, or else the default.
    """

    tokens: int
    rows: int
    columns: int
    out: str = "bf16"
    tactic: Tactic | Library | None = None

    @property
    def chosen(self) -> Tactic | Library:
        """The given tactic, the measured one, or the default; the library for bf16 alone."""
        sizes = {"rows": self.rows, "columns": self.columns}
        found = self.tactic or measured.tactic(Path(__file__).parent, self.tokens, library=self.out == "bf16", **sizes)
        return found or self._unmeasured

    @property
    def shape(self) -> Shape:
        """The geometry of our kernel; of its default where the library multiplies."""
        chosen = self.chosen
        return Shape(self.tokens, (self.columns,), chosen if isinstance(chosen, Tactic) else self._unmeasured)

    @property
    def _unmeasured(self) -> Tactic:
        return measured.unmeasured(self.rows, (self.columns,), self.tokens)


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"projection: expected one of {', '.join(ARCHS)}, found {arch}")
    if config.out not in ("bf16", "f32"):
        return Refusal(Reason.OP_SHAPE, f"projection: expected an output of bf16 or f32, found {config.out}")
    if isinstance(config.chosen, Library):
        problem = library.problem(config.tokens)
        if config.out == "f32":
            problem = "expected an output of bf16 for the library, whose sums have fewer bits than fp32, found f32"
    else:
        problem = config.shape.problem() or config.shape.uncovered(config.rows)
    return Refusal(Reason.OP_SHAPE, f"projection: {problem}") if problem else None


def spec(config: Config) -> KernelSpec | None:
    """The kernel; None where the library multiplies."""
    if isinstance(config.chosen, Library):
        return None
    config = replace(config, tactic=config.shape.tactic)  # what was measured becomes part of the kernel's identity
    params = (
        Param("w", "bf16", (config.rows, config.columns), STATIC),
        Param("x", "bf16", (config.tokens, config.columns), ACTIVATION),
        Param("y", config.out, (config.tokens, config.rows), OUTPUT),
    )
    return KernelSpec("bf16_skinny", "projection", config, f"{__name__}.cute:bf16_skinny", params, settles=True)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return make(config, arch, unavailable_reason(config, arch), spec)


def run(plan: Plan, a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, stream: int | None = None) -> None:
    """a [tokens, columns] bf16, weight [rows, columns] bf16 -> out [tokens, rows], overwritten."""
    if plan.spec is None:
        library.multiply(a, weight, out, stream)
    else:
        compiled(plan)(weight, a, out, stream=stream)


def specs() -> list[KernelSpec]:
    """KDA input projection of a TP8 rank, one shape for each way through the kernel, and a small one."""
    served = [Config(t, 6288, 7168) for t in (1, 8)] + [Config(64, 6288, 7168, tactic=default_tactic(6288, (7168,), 64))]
    rings = [Config(t, 6288, 7168, tactic=ring_tactic(6288, (7168,), t, chunk=256)) for t in (1, 64)]
    return [found for config in [Config(3, 80, 256), *served, *rings] if (found := spec(config))]
