"""`moe_tail`: delta = RMSNorm(r) Wup^T + hidden Wdown^T, the end of a LatentMoE layer on one rank.

r [T, L] is the experts' weighted sum in the latent space (already reduced over ranks), hidden [T, S] the shared experts'
activation. Both products add into the same rows, so they are one matmul over K = L + S: one launch reads both matrices, and the
sum is rounded once. The norm's factor is one number per token and is applied between the two parts. With tensor parallelism the
up-projection may be a shard of rows or a share of K; the caller passes what this rank owns, and reduces delta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...reasons import Reason, Refusal
from .. import measured
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, KernelSpec, Param
from ..single import Plan, compiled, make
from ..skinny import Shape, Tactic, default_tactic, ring_tactic


@dataclass(frozen=True)
class Config:
    """`rows`: D of the matrices here; `latent`: L; `shared`: S of this rank. `r_dtype`: "bf16" or "f32"."""

    tokens: int
    rows: int
    latent: int
    shared: int
    eps: float = 1e-5
    r_dtype: str = "bf16"
    tactic: Tactic | None = None

    @property
    def shape(self) -> Shape:
        columns, tactic = (self.latent, self.shared), self.tactic
        if tactic is None and self.r_dtype == "bf16":
            sizes = {"rows": self.rows, "latent": self.latent, "shared": self.shared}
            tactic = measured.tactic(Path(__file__).parent, self.tokens, **sizes)
        return Shape(self.tokens, columns, tactic or default_tactic(self.rows, columns, self.tokens))


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"moe_tail: expected one of {', '.join(ARCHS)}, found {arch}")
    if config.r_dtype not in ("bf16", "f32"):
        return Refusal(Reason.OP_SHAPE, f"moe_tail: expected r in bf16 or f32, found {config.r_dtype}")
    if config.r_dtype == "f32" and config.shape.tactic.stages:
        return Refusal(Reason.OP_SHAPE, "moe_tail: expected r in bf16 where it passes through stages, found f32")
    problem = config.shape.problem() or config.shape.uncovered(config.rows)
    return Refusal(Reason.OP_SHAPE, f"moe_tail: {problem}") if problem else None


def spec(config: Config) -> KernelSpec:
    config = replace(config, tactic=config.shape.tactic)
    t, d, latent, shared = config.tokens, config.rows, config.latent, config.shared
    params = (
        Param("up", "bf16", (d, latent), STATIC),
        Param("down", "bf16", (d, shared), STATIC),
        Param("norm", "bf16", (latent,), STATIC),
        Param("r", config.r_dtype, (t, latent), ACTIVATION),
        Param("hidden", "bf16", (t, shared), ACTIVATION),
        Param("delta", "bf16", (t, d), OUTPUT),
    )
    return KernelSpec("bf16_norm_skinny", "moe_tail", config, f"{__name__}.cute:bf16_norm_skinny", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return make(config, arch, unavailable_reason(config, arch), spec)


def run(
    plan: Plan,
    r: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    delta: torch.Tensor,
    stream: int | None = None,
) -> None:
    """r [T, L], hidden [T, S], norm [L], up [D, L], down [D, S] -> delta [T, D] bf16, overwritten."""
    compiled(plan)(up, down, norm, r, hidden, delta, stream=stream)


def specs() -> list[KernelSpec]:
    """A TP8 rank, one shape for each way through the kernel, and a small one."""
    served = [Config(t, 7168, 3584, 768) for t in (1, 64)]
    sizes = 7168, 3584, 768
    rings = [Config(t, *sizes, tactic=ring_tactic(7168, sizes[1:], t, splits=s, chunk=256)) for t, s in ((1, 1), (64, 2))]
    return [spec(config) for config in [Config(3, 80, 256, 64), *served, *rings]]
