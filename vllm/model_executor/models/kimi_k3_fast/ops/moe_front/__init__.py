"""`moe_front`: everything that reads the MoE input m [T, D], and the choice of experts.

Kernel 1, one matmul over three matrices that stay where the checkpoint loader put them: router logits (fp32), the latent z = m
Wdown^T (bf16) and the shared experts' hidden = SiTU(gate, up) (bf16). Each group of blocks works on one matrix; the groups are
dealt so that every block reads the same number of bytes. A rank that owns only some rows of the router and of the
down-projection passes those rows.

Kernel 2, `topk`: sigmoid scores, the 16 largest of score + bias (ties to the lower id), renormalised weights; and, where asked
for, the list of (token, slot) pairs by expert. Over several ranks, each with a share of the logits and of z, it gathers both
first, through the mailboxes: all ranks hold the whole z and make the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...comm import BOUND_NS, RANKS, Box
from ...reasons import Reason, Refusal
from .. import measured, posted
from ..build import ACTIVATION, ARCHS, OUTPUT, STATE, STATIC, KernelSpec, Param
from ..single import Plan, compiled, make
from ..skinny import TILE, Shape, Tactic, ceil_div, default_tactic, ring_tactic


@dataclass(frozen=True)
class Config:
    """Rows of the three matrices on this rank: `experts`, `latent`, and 2 x `shared` (gate rows first); `columns` is D."""

    tokens: int
    columns: int
    experts: int
    latent: int
    shared: int
    beta: float = 4.0
    linear_beta: float | None = 25.0
    tactic: Tactic | None = None

    @property
    def rows(self) -> tuple[int, int, int]:
        return self.experts, self.latent, 2 * self.shared

    @property
    def groups(self) -> tuple[int, int, int]:
        """Groups for each matrix."""
        router, down, gate_up = deal(self.rows, self.shape.tactic.groups)
        return router, down, gate_up

    @property
    def chosen(self) -> Tactic:
        """The given tactic, the measured one, or the default. Not the library: from its tensor cores logits come with fewer bits
        than FP32, and three products took 16 us longer than the one launch (64 tokens on H200).
        """
        sizes = {"columns": self.columns, "experts": self.experts, "latent": self.latent, "shared": self.shared}
        found = self.tactic or measured.tactic(Path(__file__).parent, self.tokens, library=False, **sizes)
        return found if isinstance(found, Tactic) else self._unmeasured()

    @property
    def shape(self) -> Shape:
        """The geometry of a block, the same for all three matrices."""
        return Shape(self.tokens, (self.columns,), self.chosen)

    def _unmeasured(self) -> Tactic:
        """A ring where it fits the groups as they are dealt, else the default, with more tiles or warps where they do not fit:
        dealing whole groups to matrices leaves some with a tile more.
        """
        ring = measured.unmeasured(sum(self.rows), (self.columns,), self.tokens, whole=TILE)
        if ring.chunk and self._most(ring.groups) <= ring.height:
            return ring
        tactic = default_tactic(sum(self.rows), (self.columns,), self.tokens)
        tactic = replace(tactic, groups=max(3, tactic.groups))
        held = self._most(tactic.groups)
        if tactic.stages:
            return measured.narrow(tactic, held)
        while tactic.rows < held:
            wide = tactic.tiles >= 4
            tactic = replace(tactic, row_warps=tactic.row_warps + wide, tiles=tactic.tiles + (not wide))
        return tactic

    def _most(self, groups: int) -> int:
        """Rows of the fullest of so many groups; gate and up go by pairs."""
        router, down, gate_up = deal(self.rows, groups)
        return max(ceil_div(self.experts, router), ceil_div(self.latent, down), 2 * ceil_div(self.shared, gate_up))


def deal(rows: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Groups for each matrix: at least one each, the next always to the matrix whose groups hold most rows."""
    dealt = [1] * len(rows)
    for _ in range(groups - len(rows)):
        fullest = max(range(len(rows)), key=lambda i: rows[i] / dealt[i])
        dealt[fullest] += 1
    return tuple(dealt)


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"moe_front: expected one of {', '.join(ARCHS)}, found {arch}")
    problem = config.shape.problem()
    experts, latent, shared = config.experts, config.latent, ceil_div(config.shared, config.groups[2]) * config.groups[2]
    for rows, groups in zip((experts, latent, 2 * shared), config.groups, strict=True):  # gate and up go by pairs
        problem = problem or replace(config.shape, tactic=replace(config.shape.tactic, groups=groups)).uncovered(rows)
    return Refusal(Reason.OP_SHAPE, f"moe_front: {problem}") if problem else None


def spec(config: Config) -> KernelSpec:
    """Kernel 1."""
    config = replace(config, tactic=config.shape.tactic)
    t, k = config.tokens, config.columns
    params = (
        Param("router", "bf16", (config.experts, k), STATIC),
        Param("down", "bf16", (config.latent, k), STATIC),
        Param("gate_up", "bf16", (2 * config.shared, k), STATIC),
        Param("x", "bf16", (t, k), ACTIVATION),
        Param("logits", "f32", (t, config.experts), OUTPUT),
        Param("z", "bf16", (t, config.latent), OUTPUT),
        Param("hidden", "bf16", (t, config.shared), OUTPUT),
    )
    return KernelSpec("bf16_front_skinny", "moe_front", config, f"{__name__}.cute:bf16_front_skinny", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    return make(config, arch, unavailable_reason(config, arch), spec)


def run(
    plan: Plan,
    m: torch.Tensor,
    router: torch.Tensor,
    down: torch.Tensor,
    gate_up: torch.Tensor,
    logits: torch.Tensor,
    z: torch.Tensor,
    hidden: torch.Tensor,
    stream: int | None = None,
) -> None:
    """m [T, D], router [E, D], down [L, D], gate_up [2S, D] -> logits [T, E] fp32, z [T, L] bf16, hidden [T, S] bf16,
    overwritten.
    """
    compiled(plan)(router, down, gate_up, m, logits, z, hidden, stream=stream)


@dataclass(frozen=True)
class TopkConfig:
    """Choice of `top_k` of `experts` experts for each of `tokens` tokens. `grouped`: also list the pairs by expert.

    With a `world` of several ranks the logits, and the `latent` columns of z, are gathered from equal shares, rank 0's first;
    `bound_ns`: how long to wait for a peer.
    """

    tokens: int
    experts: int = 896
    top_k: int = 16
    renormalise: bool = True
    scaling: float = 1.0
    grouped: bool = False
    world: int = 1
    latent: int = 0
    bound_ns: int = BOUND_NS

    @property
    def threads(self) -> int:
        """Threads of a block: one for an expert, in whole warps."""
        return ceil_div(self.experts, 32) * 32

    @property
    def shares(self) -> tuple[int, int]:
        """Words of a token that a rank sends: its logits, and its columns of z, two in a word."""
        return self.experts // self.world, self.latent // self.world // 2

    @property
    def words(self) -> int:
        """Words of mailbox that a sender needs."""
        return 0 if self.world == 1 else self.tokens * sum(self.shares)


def topk_unavailable_reason(config: TopkConfig, arch: str) -> Refusal | None:
    """Why there is no top-k kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"topk: expected one of {', '.join(ARCHS)}, found {arch}")
    c, problem = config, None
    if not (1 <= c.top_k <= min(32, c.experts) and c.experts <= 1024):
        problem = f"at most 32 of at most 1024 experts, found {c.top_k} of {c.experts}"
    elif not 1 <= c.tokens <= 64:
        problem = f"1 to 64 tokens, found {c.tokens}"
    elif c.world not in (1, *RANKS):
        problem = f"1, 2, 4 or 8 ranks within one host, found {c.world}"
    elif c.world > 1 and (c.experts % c.world or c.latent < 1 or c.latent % (2 * c.world)):
        problem = f"experts and pairs of columns of z in equal shares, found {c.experts} and {c.latent} for {c.world} ranks"
    return Refusal(Reason.OP_SHAPE, f"topk: expected {problem}") if problem else None


def topk_spec(config: TopkConfig) -> KernelSpec:
    params: tuple[Param, ...] = (
        Param("bias", "f32", (config.experts,), STATIC),
        Param("logits", "f32", (config.tokens, config.experts // config.world), ACTIVATION),
        Param("num_tokens", "i32", (1,), ACTIVATION, align=4),
        Param("ids", "i32", (config.tokens, config.top_k), OUTPUT),
        Param("weights", "f32", (config.tokens, config.top_k), OUTPUT),
    )
    if config.grouped:
        params += (
            Param("offsets", "i32", (config.experts + 1,), OUTPUT, align=4),
            Param("pairs", "i32", (config.tokens * config.top_k,), OUTPUT, align=4),
            Param("active", "i32", (config.experts,), OUTPUT, align=4),
            Param("num_active", "i32", (1,), OUTPUT, align=4),
            Param("arrived", "i32", (1,), STATE, align=4),
        )
    if config.world > 1:
        params += (
            Param("z_own", "bf16", (config.tokens, config.latent // config.world), ACTIVATION),
            Param("z", "bf16", (config.tokens, config.latent), OUTPUT),
            *posted.params(config.world),
        )
    return KernelSpec("topk", "moe_front", config, f"{__name__}.topk:topk", params)


def topk_plan(config: TopkConfig, arch: str) -> posted.Plan:
    """Raises ValueError where `topk_unavailable_reason` has one."""
    return posted.Plan.make(config, arch, topk_unavailable_reason(config, arch), topk_spec)


@dataclass(frozen=True)
class Groups:
    """All tokens' pairs by expert, int32: what the grouped schedule of `experts` reads, and `arrived` [1], zero before the first
    launch and after each.

    `offsets` [E + 1] into `pairs` [T k], which lists token * k + slot in ascending order within an expert; `active` [E] names
    the experts with pairs in ascending order, `num_active` [1] says how many. What lies behind them is left as it was.
    """

    offsets: torch.Tensor
    pairs: torch.Tensor
    active: torch.Tensor
    num_active: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """What a rank of several has of z, z_own [T, L / world] bf16, where the whole goes, z [T, L] bf16, overwritten, alike on all
    ranks; and the mailbox through which it comes.
    """

    z_own: torch.Tensor
    z: torch.Tensor
    mailbox: Box


def run_topk(
    plan: posted.Plan,
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    groups: Groups | None = None,
    gather: Gather | None = None,
    stream: int | None = None,
) -> None:
    """logits [T, E / world] fp32, bias [E] fp32, num_tokens [1] int32 -> ids [T, k] int32 in order of choice, weights [T, k]
    fp32; overwritten, alike on all ranks. Padded rows get id 0 and weight 0 and are in no group; their z is gathered as well.
    Raises ValueError where `groups` or `gather` is missing, or is there and not planned for, or its mailbox does not fit.
    """
    for name, given, wanted in (("groups", groups, plan.config.grouped), ("gather", gather, plan.config.world > 1)):
        if wanted != (given is not None):
            found = "and found none" if given is None else "only for a plan that has it"
            raise ValueError(f"topk: expected {name} {found}; plan: {plan}.")
    listed = (groups.offsets, groups.pairs, groups.active, groups.num_active, groups.arrived) if groups else ()
    gathered = (gather.z_own, gather.z, *posted.arguments(plan, gather.mailbox)) if gather else ()
    compiled(plan)(bias, logits, num_tokens, ids, weights, *listed, *gathered, stream=stream)


def specs() -> list[KernelSpec]:
    """A TP8 rank with all rows of router and down, one shape for each way through the kernel, and a small one."""
    served = [Config(t, 7168, 896, 3584, 768) for t in (1, 64)]
    choices = [topk_spec(TopkConfig(1))] + [
        topk_spec(TopkConfig(t, e, k, grouped=True)) for t, e, k in ((64, 896, 16), (3, 48, 4))
    ]
    gathering = (TopkConfig(1, world=8, latent=3584), TopkConfig(64, grouped=True, world=8, latent=3584))
    choices += map(topk_spec, (*gathering, TopkConfig(3, 48, 4, grouped=True, world=4, latent=80)))
    rings = [replace(c, tactic=ring_tactic(sum(c.rows), (c.columns,), c.tokens, chunk=256)) for c in served[:2]]
    return [spec(config) for config in [Config(3, 256, 48, 80, 32), *served, *rings]] + choices
