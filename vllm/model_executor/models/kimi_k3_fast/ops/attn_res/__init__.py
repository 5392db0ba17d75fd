"""`attn_res`: K3's replacement of the residual stream, with the RMSNorm that follows it. One launch.

    prefix <- bf(prefix + delta)                           if the previous MLP's output is pending
    blocks[write] <- prefix                                if this layer closes a block
    logit_j = rsqrt(mean(s_j^2) + eps) <s_j, score>        for the closed blocks 0..prev-1 and the prefix;
                                                           score = norm weight * projection row
    out = bf(RMSNorm(sum_j softmax_j(logit) s_j))          or without the norm, at the end of the model

All in fp32 between the bf. With prev = 0 the mixture is the prefix itself.

Over several ranks the launch before may only have posted its part of delta to all of them (`ops/pairs.py`). Then

    delta = bf(sum over ranks of bf(part_r))               in the order of ranks: equal bits on all
    prefix <- delta                                        where it is the first of a new accumulation (`replaces`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...comm import BOUND_NS, RANKS, SMS, Box
from ...reasons import Reason, Refusal
from .. import measured, posted
from ..build import ACTIVATION, ARCHS, OUTPUT, SETTLED, STATE, STATIC, Compiled, KernelSpec, Param, get

MOST_THREADS = 640  # of a block where there are few: its registers leave room for the ring of the next kernel


@dataclass(frozen=True)
class Config:
    """`rows`: rows of the buffers `blocks` and `prefix` (the largest batch), `prev`: closed blocks mixed in, `write`: block to
    close, or -1.

    `blocks`: thread blocks of a token's cluster, `parts`: warps that share a source in each; None: the numbers that were fastest,
    or the default. `world`: ranks that posted delta, 1 where it is a tensor; `replaces`: it takes the prefix's place; `bound_ns`:
    how long to wait for a peer.
    """

    tokens: int
    columns: int
    prev: int
    has_delta: bool
    write: int = -1
    normalise: bool = True
    eps: float = 1e-5
    closed: int = 8  # blocks the buffer can hold
    rows: int = 64
    blocks: int | None = None
    parts: int | None = None
    world: int = 1
    replaces: bool = False
    bound_ns: int = BOUND_NS

    @property
    def words(self) -> int:
        """Words of mailbox that every rank has sent."""
        return self.tokens * self.columns // 2 if self.world > 1 else 0

    @property
    def share(self) -> int:
        """Columns of one thread block."""
        assert self.blocks is not None, "a config is resolved before its shape is asked for"
        return self.columns // self.blocks

    @property
    def mixing(self) -> int:
        """Warps that mix, a thread eight columns."""
        return -(-self.share // 256)

    @property
    def sharing(self) -> int:
        """Warps that share a source."""
        assert self.parts is not None, "a config is resolved before its warps are asked for"
        return self.parts

    @property
    def pieces(self) -> int:
        """Pieces of 256 columns that one warp takes of its source."""
        return -(-self.mixing // self.sharing)

    @property
    def padded(self) -> int:
        """Columns of whole pieces: what the prefix's and the delta's share take in shared memory."""
        return 256 * self.sharing * self.pieces

    @property
    def threads(self) -> int:
        return 32 * max(self.mixing, (self.prev + 1) * self.sharing)


@dataclass(frozen=True)
class Plan(posted.Posting):
    """What will run: one kernel."""

    config: Config
    arch: str
    spec: KernelSpec

    def __str__(self) -> str:
        c = self.config
        shape = f"attn_res {c.tokens}x{c.columns} sources {c.prev + 1}"
        shape += f" posted by {c.world} ranks" if c.world > 1 else ""
        return f"{shape} {self.spec.name}, clusters of {c.blocks} blocks of {c.threads} threads, {c.parts} warps a source"


def resolved(config: Config, arch: str) -> Config:
    """The config with numbers of blocks and of warps for a source: those measured with as many sources, or with more."""
    found: dict[str, int] = {}
    if config.blocks is None:
        shape = {"columns": config.columns, "tokens": config.tokens}
        more = range(config.prev + 1, config.closed + 2)
        rows = (measured.chosen(Path(__file__).parent, arch, {"sources": n, **shape}, "tokens") for n in more)
        found = next(filter(None, rows), {})
        fitting = next(blocks for blocks in (4, 2, 1) if config.columns % (8 * blocks) == 0 or blocks == 1)
        config = replace(config, blocks=found.get("blocks", fitting))
    return config if config.parts else replace(config, parts=found.get("parts", _parts(config)))


def _parts(config: Config) -> int:
    """As many warps for a source as mix anyway, and enough for at most seven pieces of 256 columns each; where every block has an
    SM to itself, a warp for each piece, if the block may have so many."""
    assert config.blocks is not None
    sources, least = config.prev + 1, max(1, config.mixing // (config.prev + 1), -(-config.mixing // 7))
    if config.tokens * config.blocks > SMS:
        return least
    return max(least, min(config.mixing, MOST_THREADS // 32 // sources))


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this shape on this architecture, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"attn_res: expected one of {', '.join(ARCHS)}, found {arch}")
    c = resolved(config, arch)
    assert c.blocks is not None
    checks = (
        (1 <= c.tokens <= c.rows, f"1 to {c.rows} tokens, found {c.tokens}"),
        (1 <= c.blocks <= 8, f"a cluster of 1 to 8 blocks, found {c.blocks}"),
        (c.columns % (8 * c.blocks) == 0, f"columns in multiples of {8 * c.blocks}, found {c.columns}"),
        (c.threads <= 1024, f"at most 1024 threads a block, found {c.threads} for {c.share} columns of {c.prev + 1} sources"),
        (0 <= c.prev <= c.closed <= 15, f"0 <= prev <= closed <= 15, found {c.prev} and {c.closed}"),
        (-1 <= c.write < c.closed, f"a block to close below {c.closed}, found {c.write}"),
        (c.write < 0 or c.write >= c.prev, f"a block to close that is not mixed in, found {c.write} with {c.prev} sources"),
        (c.world in (1, *RANKS), f"1, 2, 4 or 8 ranks within one host, found {c.world}"),
        (c.world == 1 or c.has_delta, f"a pending delta where {c.world} ranks posted, found none"),
        (c.world > 1 or not c.replaces, "several ranks that posted what replaces the prefix, found one"),
    )
    failed = [text for holds, text in checks if not holds]
    return Refusal(Reason.OP_SHAPE, f"attn_res: expected {failed[0]}") if failed else None


def spec(config: Config, arch: str = "sm_90a") -> KernelSpec:
    """The kernel of a config; `arch` matters where the number of blocks is left to be chosen."""
    config = resolved(config, arch)
    shape = (config.rows, config.columns)
    posted_or_updated = config.world > 1 or not config.has_delta  # by the launch in front
    params = (
        Param("score", "f32", (config.columns,), STATIC),
        Param("norm", "bf16", (config.columns,), STATIC),
        *(() if config.world > 1 else (Param("delta", "bf16", (config.tokens, config.columns), ACTIVATION),)),
        Param("blocks", "bf16", (config.closed, *shape), SETTLED),
        Param("prefix", "bf16", shape, STATE if posted_or_updated else SETTLED),
        Param("out", "bf16", (config.tokens, config.columns), OUTPUT),
        *(posted.params(config.world) if config.world > 1 else ()),
    )
    if config.world > 1:
        return KernelSpec("bf16_attn_res_received", "attn_res", config, f"{__name__}.received:bf16_attn_res_received", params)
    return KernelSpec("bf16_attn_res", "attn_res", config, f"{__name__}.cute:bf16_attn_res", params)


def plan(config: Config, arch: str) -> Plan:
    """Raises ValueError where `unavailable_reason` has one."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    config = resolved(config, arch)
    return Plan(config, arch, spec(config))


def compiled(plan: Plan) -> Compiled:
    """The callable kernel of a plan: loads or compiles it. Once, before capture."""
    return get(plan.spec, plan.arch)


def run(
    plan: Plan,
    score: torch.Tensor,
    norm: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    prefix: torch.Tensor,
    out: torch.Tensor,
    mailbox: Box | None = None,
    stream: int | None = None,
) -> None:
    """score [D] fp32, norm [D] bf16, delta [T, D] bf16, blocks [closed, rows, D] and prefix [rows, D] bf16 (updated) -> out [T,
    D] bf16. `mailbox`: into which ranks have posted delta, which then is no tensor.

    Without a pending delta or without the norm, any tensor of the right shape stands in; it is not read. Raises ValueError where
    the mailbox does not fit the plan.
    """
    if plan.config.world > 1:
        compiled(plan)(score, norm, blocks, prefix, out, *posted.arguments(plan, mailbox), stream=stream)
        return
    compiled(plan)(score, norm, delta, blocks, prefix, out, stream=stream)


def specs() -> list[KernelSpec]:
    """The served forms (embedding, inside a block, closing a block, end of the model) and a small one."""
    wide = [(0, False, 0, True), (1, True, -1, True), (8, True, -1, True), (7, True, 7, True), (8, True, -1, False)]
    served = [Config(1, 7168, prev, delta, write, norm) for prev, delta, write, norm in wide]
    over_ranks = [(2, 1, -1, True, True), (2, 7, 7, True, False), (2, 8, -1, False, False), (8, 8, -1, True, False)]
    served += [Config(1, 7168, p, True, w, norm, world=n, replaces=first) for n, p, w, norm, first in over_ranks]
    small = Config(3, 256, 2, True, 2, closed=3, rows=4, blocks=2)
    return [spec(config) for config in [small, replace(small, world=2), *served]]
