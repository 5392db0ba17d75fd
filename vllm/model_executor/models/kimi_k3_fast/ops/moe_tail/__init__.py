"""`moe_tail`: delta = RMSNorm(r) Wup^T + hidden Wdown^T, the end of a LatentMoE layer.

r [T, L] is the experts' weighted sum in the latent space (already reduced over ranks), hidden [T, S] the shared experts'
activation. Both products add into the same rows, so they are one matmul over K = L + S: one launch reads both matrices, and the
sum is rounded once. The norm's factor is one number per token and is applied between the two parts.

    delta = bf(sum over ranks of bf(r_i Wup_i^T + hidden_i Wdown_i^T))

With several ranks r_i is rank i's share of the columns of RMSNorm(r), normalised by whoever summed it, and Wup_i these columns of
the whole up-projection, in place. The sum over ranks happens in the same launch, as in `oproj`, in the order of ranks: equal bits
on all. Or the launch only posts its part to all ranks (`posts`), for AttnRes behind it to add up.

For many tokens of one rank: a kernel for the norm, where it is to be done, and two products of the library, of which the second
adds to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...comm import BOUND_NS, Box
from ...reasons import Reason, Refusal
from .. import library, measured, posted, single
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, KernelSpec, Param
from ..library import LIBRARY, Library
from ..pairs import Pairs
from ..single import compiled, find_scratch
from ..skinny import Shape, Tactic, default_tactic, ring_tactic


@dataclass(frozen=True)
class Config(Pairs):
    """`rows`: D of the matrices; `latent`: L and `shared`: S of this rank. `r_dtype`: "bf16" or "f32". `normed`: r is normalised
    already. `pitch`: elements between two rows of the up-projection, 0 for L. `world` ranks; `shots`: 1 or 2, or None for the
    default of the batch; `bound_ns`: how long to wait for a peer; `posts`: the next launch sums.
    """

    tokens: int
    rows: int
    latent: int
    shared: int
    eps: float = 1e-5
    r_dtype: str = "bf16"
    tactic: Tactic | Library | None = None
    normed: bool = False
    pitch: int = 0
    world: int = 1
    shots: int | None = None
    bound_ns: int = BOUND_NS
    posts: bool = False

    @property
    def _unmeasured(self) -> Tactic:
        kernel = measured.unmeasured if self.r_dtype == "bf16" else default_tactic  # a ring takes bf16 only
        return kernel(self.rows, (self.latent, self.shared), self.tokens)

    @property
    def chosen(self) -> Tactic | Library:
        """The given tactic, the measured one, or the default. The library for one rank alone."""
        found = self.tactic
        if found is None and self.r_dtype == "bf16":
            sizes = {"rows": self.rows, "latent": self.latent, "shared": self.shared, "world": self.world}
            found = measured.tactic(Path(__file__).parent, self.tokens, library=self.world == 1, **sizes)
        return self.dealt(found or self._unmeasured)

    @property
    def shape(self) -> Shape:
        """The geometry of the one launch; of its default where the library multiplies."""
        chosen = self.chosen
        return Shape(self.tokens, (self.latent, self.shared), chosen if isinstance(chosen, Tactic) else self._unmeasured)


@dataclass(frozen=True)
class Plan(posted.Posting, single.Plan):
    """As any op's of one launch, which may take a mailbox."""


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
    problem = _problem(config) or config.shape.problem() or config.exchange_problem()
    return Refusal(Reason.OP_SHAPE, f"moe_tail: {problem}") if problem else None


def _problem(c: Config) -> str | None:
    if c.r_dtype not in ("bf16", "f32"):
        return f"expected r in bf16 or f32, found {c.r_dtype}"
    by_library = isinstance(c.chosen, Library)
    if c.r_dtype == "f32" and (by_library or c.normed or c.shape.tactic.stages):
        return "expected r in bf16 for the library, for a kernel of stages and where r is normalised already, found f32"
    if c.pitch and (c.pitch % 8 or c.pitch < c.latent):
        return f"expected rows of whole 16 bytes that hold {c.latent} columns, found a pitch of {c.pitch}"
    if c.world > 1 and (by_library or not c.normed):
        return f"expected a kernel and a normalised r where {c.world} ranks sum in one launch, found {c}"
    return library.problem(c.tokens) if by_library else c.shape.uncovered(c.rows, c.whole)


def spec(config: Config) -> KernelSpec | None:
    """The one launch; where the library multiplies the norm's, or None where r is normalised already."""
    t, d, latent, shared = config.tokens, config.rows, config.latent, config.shared
    if isinstance(config.chosen, Library):
        return None if config.normed else norm_spec(NormConfig(t, latent, config.eps))
    config = replace(config, tactic=config.shape.tactic)
    params = (
        Param("up", "bf16", (d, latent), STATIC, strides=(config.pitch or latent, 1)),
        Param("down", "bf16", (d, shared), STATIC),
        *(() if config.normed else (Param("norm", "bf16", (latent,), STATIC),)),
        Param("r", config.r_dtype, (t, latent), ACTIVATION),
        Param("hidden", "bf16", (t, shared), ACTIVATION),
        *(() if config.posts else (Param("delta", "bf16", (t, d), OUTPUT),)),
        *(posted.params(config.world) if config.world > 1 else ()),
    )
    name = "bf16_tail" if config.normed else "bf16_norm_skinny"
    if config.world > 1:
        name = f"bf16_tail_{'posted' if config.posts else 'two_shot' if config.two_shot else 'one_shot'}"
    return KernelSpec(name, "moe_tail", config, f"{__name__}.cute:bf16_tail", params, settles=True)


def norm_spec(config: NormConfig) -> KernelSpec:
    params = (
        Param("norm", "bf16", (config.columns,), STATIC),
        Param("r", "bf16", (config.tokens, config.columns), ACTIVATION),
        Param("normed", "bf16", (config.tokens, config.columns), OUTPUT),
    )
    return KernelSpec("bf16_rms_norm", "moe_tail", config, f"{__name__}.norm:bf16_rms_norm", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    by_library = isinstance(config.chosen, Library) and not config.normed
    scratch = {"normed": ((config.tokens, config.latent), "bf16")} if by_library else {}
    return Plan(config, arch, spec(config), scratch)


def run(
    plan: Plan,
    r: torch.Tensor,
    hidden: torch.Tensor,
    norm: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    delta: torch.Tensor | None,
    scratch: Mapping[str, torch.Tensor] | None = None,
    mailbox: Box | None = None,
    stream: int | None = None,
) -> None:
    """r [T, L], hidden [T, S], norm [L], up [D, L] with rows `pitch` apart, down [D, S] -> delta [T, D] bf16, overwritten. norm:
    not used where r is `normed`. scratch: the tensors of `plan.scratch_shapes()`. mailbox: where several ranks sum; delta is then
    alike on all of them, or not used where the plan `posts`. Raises ValueError where one is missing or does not fit.
    """
    config = plan.config
    if not isinstance(config.chosen, Library):
        norms = () if config.normed else (norm,)
        post = posted.arguments(plan, mailbox) if config.world > 1 else ()
        into = () if config.posts else (delta,)
        compiled(plan)(up, down, *norms, r, hidden, *into, *post, stream=stream)
        return
    if not config.normed:
        (normed,) = find_scratch(plan, scratch)
        compiled(plan)(norm, r, normed, stream=stream)
        r = normed
    library.multiply(r, up, delta, stream)
    library.add_product(hidden, down, delta, stream)


def specs() -> list[KernelSpec]:
    """A TP8 rank alone and one of eight that sum, one shape for each way through the kernel, and small ones."""
    sizes = 7168, 3584, 768
    served = [
        Config(1, *sizes),
        Config(64, *sizes, tactic=default_tactic(7168, sizes[1:], 64)),
        Config(64, *sizes, tactic=LIBRARY),
    ]
    rings = [Config(t, *sizes, tactic=ring_tactic(7168, sizes[1:], t, chunk=256)) for t in (1, 64)]
    small = [Config(3, 80, 256, 64), Config(3, 80, 256, 64, normed=True)]
    small += [Config(3, 160, 256, 64, normed=True, pitch=1024, world=w, shots=s) for w, s in ((2, 1), (2, 2), (4, 2))]
    small += [Config(3, 160, 256, 64, normed=True, world=w, posts=True) for w in (2, 4)]
    ranks = [Config(t, 7168, 448, 768, normed=True, pitch=3584, world=8) for t in (1, 8, 64)]
    ranks += [Config(t, 7168, 1792, 768, normed=True, pitch=3584, world=2, posts=True) for t in (1, 8)]
    return [found for config in [*small, *served, *rings, *ranks] if (found := spec(config))]
