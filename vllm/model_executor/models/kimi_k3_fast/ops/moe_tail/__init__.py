"""`moe_tail`: delta = RMSNorm(r) Wup^T + hidden Wdown^T, the end of a LatentMoE layer on one rank.

r [T, L] is the experts' weighted sum in the latent space (already reduced over ranks), hidden [T, S] the shared experts'
activation. Both products add into the same rows, so they are one matmul over K = L + S: one launch reads both matrices, and the
sum is rounded once. The norm's factor is one number per token and is applied between the two parts. With tensor parallelism the
up-projection may be a shard of rows or a share of K; the caller passes what this rank owns, and reduces delta.

For many tokens: a kernel for the norm and two products of the library, of which the second adds to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...reasons import Reason, Refusal
from .. import library, measured
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, KernelSpec, Param
from ..library import LIBRARY, Library
from ..single import Plan, compiled, find_scratch, make
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
    tactic: Tactic | Library | None = None

    @property
    def _unmeasured(self) -> Tactic:
        kernel = measured.unmeasured if self.r_dtype == "bf16" else default_tactic  # a ring takes bf16 only
        return kernel(self.rows, (self.latent, self.shared), self.tokens)

    @property
    def chosen(self) -> Tactic | Library:
        """The given tactic, the measured one, or the default."""
        found = self.tactic
        if found is None and self.r_dtype == "bf16":
            sizes = {"rows": self.rows, "latent": self.latent, "shared": self.shared}
            found = measured.tactic(Path(__file__).parent, self.tokens, library=True, **sizes)
        return found or self._unmeasured

    @property
    def shape(self) -> Shape:
        """The geometry of the one launch; of its default where the library multiplies."""
        chosen = self.chosen
        return Shape(self.tokens, (self.latent, self.shared), chosen if isinstance(chosen, Tactic) else self._unmeasured)


@dataclass(frozen=True)
class NormConfig:
    """RMSNorm of `tokens` rows of `columns`, a launch of its own."""

    tokens: int
    columns: int
    eps: float


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"moe_tail: expected one of {', '.join(ARCHS)}, found {arch}")
    if config.r_dtype not in ("bf16", "f32"):
        return Refusal(Reason.OP_SHAPE, f"moe_tail: expected r in bf16 or f32, found {config.r_dtype}")
    by_library = isinstance(config.chosen, Library)
    if config.r_dtype == "f32" and (by_library or config.shape.tactic.stages):
        return Refusal(Reason.OP_SHAPE, "moe_tail: expected r in bf16 for the library or for a kernel of stages, found f32")
    problem = library.problem(config.tokens) if by_library else config.shape.uncovered(config.rows)
    problem = problem or config.shape.problem()
    return Refusal(Reason.OP_SHAPE, f"moe_tail: {problem}") if problem else None


def spec(config: Config) -> KernelSpec:
    """The one launch, or the norm's where the library multiplies."""
    t, d, latent, shared = config.tokens, config.rows, config.latent, config.shared
    if isinstance(config.chosen, Library):
        return norm_spec(NormConfig(t, latent, config.eps))
    config = replace(config, tactic=config.shape.tactic)
    params = (
        Param("up", "bf16", (d, latent), STATIC),
        Param("down", "bf16", (d, shared), STATIC),
        Param("norm", "bf16", (latent,), STATIC),
        Param("r", config.r_dtype, (t, latent), ACTIVATION),
        Param("hidden", "bf16", (t, shared), ACTIVATION),
        Param("delta", "bf16", (t, d), OUTPUT),
    )
    return KernelSpec("bf16_norm_skinny", "moe_tail", config, f"{__name__}.cute:bf16_norm_skinny", params)


def norm_spec(config: NormConfig) -> KernelSpec:
    params = (
        Param("norm", "bf16", (config.columns,), STATIC),
        Param("r", "bf16", (config.tokens, config.columns), ACTIVATION),
        Param("normed", "bf16", (config.tokens, config.columns), OUTPUT),
    )
    return KernelSpec("bf16_rms_norm", "moe_tail", config, f"{__name__}.norm:bf16_rms_norm", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    normed = {"normed": ((config.tokens, config.latent), "bf16")} if isinstance(config.chosen, Library) else {}
    return make(config, arch, unavailable_reason(config, arch), spec, normed)


def run(
    plan: Plan,
    r: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    delta: torch.Tensor,
    scratch: Mapping[str, torch.Tensor] | None = None,
    stream: int | None = None,
) -> None:
    """r [T, L], hidden [T, S], norm [L], up [D, L], down [D, S] -> delta [T, D] bf16, overwritten. scratch: the tensors of
    `plan.scratch_shapes()`; raises ValueError where one is missing.
    """
    if not isinstance(plan.config.chosen, Library):
        compiled(plan)(up, down, norm, r, hidden, delta, stream=stream)
        return
    (normed,) = find_scratch(plan, scratch)
    compiled(plan)(norm, r, normed, stream=stream)
    library.multiply(normed, up, delta, stream)
    library.add_product(hidden, down, delta, stream)


def specs() -> list[KernelSpec]:
    """A TP8 rank, one shape for each way through the kernel, and a small one."""
    sizes = 7168, 3584, 768
    served = [
        Config(1, *sizes),
        Config(64, *sizes, tactic=default_tactic(7168, sizes[1:], 64)),
        Config(64, *sizes, tactic=LIBRARY),
    ]
    rings = [Config(t, *sizes, tactic=ring_tactic(7168, sizes[1:], t, splits=s, chunk=256)) for t, s in ((1, 1), (64, 2))]
    return [spec(config) for config in [Config(3, 80, 256, 64), *served, *rings]]
