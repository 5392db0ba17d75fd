"""MLA decode between the packed projection and o_proj: query, attention over the paged latent cache, value and gate.

Five launches, each a kernel of `cute.py`: project (norms, q_b, cache insert), absorb (W_UK), attend (split context), merge
(only where the context is split), value (W_UV and gate). With many tokens project is two: norms (with the cache insert), then
`ops/projection`'s product. `run` makes them all; context parallelism calls `run_query`, `run_attention` (with its log-sum-exp)
and `run_value` around its exchange.

Tensors (h local heads, R requests, q queries of each, T = R q tokens):
    x             [T, columns] bf16       the packed projection: q_a 1536 | kv_a 512 | k_pe 64 | gate h 128 | padding
    q_norm [1536], kv_norm [512] bf16;  q_b [h 192, 1536] bf16
    w_uk, w_uv    [h, 128, 512] bf16      the two halves of kv_b's rows of each head: views of it, any head stride
    scales        [2] fp32                q_scale, k_scale of an FP8 (E4M3) cache; not used with bf16
    slot_mapping  [T] int64               cache row of each token: page * block_size + offset; negative: not written
    cache         [pages, block_size, 576] bf16 or u8 (E4M3), any page stride
    table         [R, pages_max] int32;  lengths [R] int32, the context with this step's tokens; 0: an empty shard or a padded row
    query         [T, h, 576] bf16 or u8; latent [T h, 512] bf16; lse [T h] fp32 (natural); y [T, h 128] bf16
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ...reasons import Reason, Refusal
from .. import library, measured, projection
from ..build import ACTIVATION, ARCHS, OUTPUT, STATE, STATIC, Compiled, KernelSpec, Param, Sym, get

NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128
ROW = LATENT + ROPE
KEYS = 64  # keys of one attention tile; a tile lies in one page
SM_COUNT = 132
SHAPE = ("heads", "requests", "queries", "context", "fp8")  # what a measured tactic is for
TOKENS_TOGETHER = 16  # up to so many tokens every block of q_b's product norms all of them itself


@dataclass(frozen=True)
class Config:
    """One rank's MLA decode. `requests` counts padded rows too. `pages`: width of the block table."""

    heads: int
    requests: int
    columns: int  # row length of x
    block_size: int
    pages: int
    queries: int = 1
    fp8: bool = False
    q_rank: int = 1536
    norm_eps: float = 1e-5
    scale: float = (NOPE + ROPE) ** -0.5

    @property
    def tokens(self) -> int:
        return self.requests * self.queries

    @property
    def product(self) -> projection.Config:
        """q_b's product where it is a launch of its own."""
        return projection.Config(self.tokens, self.heads * (NOPE + ROPE), self.q_rank)

    @property
    def apart(self) -> bool:
        """Whether the norms are a launch of their own, and q_b a plain product behind it."""
        return self.tokens > TOKENS_TOGETHER and projection.unavailable_reason(self.product, ARCHS[0]) is None


@dataclass(frozen=True)
class Tactic:
    """`splits`: shares of the context, one CTA each. `stages`: tiles of the cache that a CTA holds or has on their way, and one
    more."""

    splits: int
    stages: int


@dataclass(frozen=True)
class KernelConfig(Config):
    """What the device half is specialised on: the config and the tactic."""

    splits: int = 1
    stages: int = 2


class Weights(NamedTuple):
    """One layer's local weights, and the scales of the cache. Shapes: the head of this module."""

    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    scales: torch.Tensor


class Context(NamedTuple):
    """Where this step's rows go and what it attends to."""

    slot_mapping: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Plan:
    config: Config
    tactic: Tactic
    specs: dict[str, KernelSpec]
    kernels: dict[str, Compiled] = field(repr=False)

    def scratch_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of what the caller allocates once: q, query, latent, lse and, with splits, the partial
        results."""
        c, s = self.config, self.tactic.splits
        rows = c.tokens * c.heads
        shapes = {
            "q": ((c.tokens, c.heads * (NOPE + ROPE)), "bf16"),
            "query": ((c.tokens, c.heads, ROW), "u8" if c.fp8 else "bf16"),
            "latent": ((rows, LATENT), "bf16"),
            "lse": ((rows,), "f32"),
        }
        if c.apart:
            shapes["normed"] = ((c.tokens, c.q_rank), "bf16")
        if s > 1:
            shapes |= {"partial": ((s, rows, LATENT), "f32"), "partial_lse": ((s, rows), "f32")}
        return shapes


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this configuration, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"mla: expected one of {', '.join(ARCHS)}, found {arch}")
    needed = config.q_rank + ROW + config.heads * VALUE
    rules = [
        (
            config.heads >= 1 and config.requests >= 1,
            f"at least one head and request, found {config.heads} and {config.requests}",
        ),
        (1 <= config.queries <= 8, f"1 to 8 tokens for each request, found {config.queries}"),
        (config.block_size % KEYS == 0, f"pages of a multiple of {KEYS} tokens, found {config.block_size}"),
        (config.q_rank % 256 == 0, f"a query rank that is a multiple of 256, found {config.q_rank}"),
        (
            config.columns >= needed and config.columns % 8 == 0,
            f"rows of at least {needed} columns, a multiple of 8; found {config.columns}",
        ),
        (config.pages >= 1, f"a block table of at least one page, found {config.pages}"),
    ]
    failed = "; ".join(f"expected {text}" for holds, text in rules if not holds)
    return Refusal(Reason.OP_SHAPE, f"mla: {failed}") if failed else None


def default_tactic(config: Config) -> Tactic:
    """As many shares as fill the machine once, but none shorter than two tiles of the longest context."""
    tiles_of_rows = -(-config.queries * config.heads // 16)
    longest = config.pages * config.block_size // KEYS
    splits = max(1, min(SM_COUNT // (config.requests * tiles_of_rows), -(-longest // 2)))
    return Tactic(splits, 4 if config.fp8 else 2)


def chosen_tactic(config: Config, arch: str) -> Tactic:
    """What was fastest on this architecture at this shape, for this much room in the table or the next larger; else the
    default."""
    shape = {name: getattr(config, name) for name in SHAPE if name != "context"} | {"context": config.pages * config.block_size}
    found = measured.chosen(Path(__file__).parent, arch, shape, "context")
    return Tactic(**found) if found else default_tactic(config)


def tactics(config: Config) -> list[Tactic]:
    """What the benchmark compares."""
    base = default_tactic(config)
    splits = {1, base.splits, max(1, base.splits // 2), max(1, base.splits // 4)}
    if config.fp8:
        splits.add(base.splits * 2)
    return [Tactic(s, stages) for s in sorted(splits) for stages in ((2, 4) if config.fp8 else (2, 3))]


def _specs(config: Config, tactic: Tactic) -> dict[str, KernelSpec]:
    c, rows = config, config.tokens * config.heads
    kernel = KernelConfig(**vars(config), splits=tactic.splits, stages=tactic.stages)
    cached = "u8" if c.fp8 else "bf16"
    x = Param("x", "bf16", (c.tokens, c.columns), ACTIVATION)
    scales = Param("scales", "f32", (2,), STATIC, align=4)
    cache = Param("cache", cached, (Sym("cache_pages"), c.block_size, ROW), STATE, (Sym("page_stride", 16, 64), ROW, 1))
    head_strides = (Sym("head_stride", 8), LATENT, 1)
    q = ("q", "bf16", (c.tokens, c.heads * (NOPE + ROPE)))
    query = ("query", cached, (c.tokens, c.heads, ROW))
    latent, lse = ("latent", "bf16", (rows, LATENT)), ("lse", "f32", (rows,))
    partial = ("partial", "f32", (tactic.splits, rows, LATENT))
    partial_lse = ("partial_lse", "f32", (tactic.splits, rows))
    result = partial if tactic.splits > 1 else ("latent", "bf16", (1, rows, LATENT))
    result_lse = partial_lse if tactic.splits > 1 else ("lse", "f32", (1, rows))
    prefix = "fp8" if c.fp8 else "bf16"

    def spec(entry: str, *params: Param) -> KernelSpec:
        return KernelSpec(f"{prefix}_{entry}", "mla", kernel, f"{__name__}.cute:{entry}", params)

    norms = (Param("q_norm", "bf16", (c.q_rank,), STATIC), Param("kv_norm", "bf16", (LATENT,), STATIC))
    q_b = Param("q_b", "bf16", (c.heads * (NOPE + ROPE), c.q_rank), STATIC)
    insert = (scales, Param("slot_mapping", "i64", (c.tokens,), ACTIVATION, align=8), cache)
    if config.apart:
        normed = Param("normed", "bf16", (c.tokens, c.q_rank), OUTPUT)
        first = {"norms": spec("mla_norms", x, *norms, *insert, normed)}
        product = projection.spec(config.product)
        if product is not None:  # else it is the library's
            first["product"] = product
    else:
        first = {"project": spec("mla_project", x, *norms, q_b, *insert, Param(*q, OUTPUT))}
    found = first | {
        "absorb": spec(
            "mla_absorb",
            Param(*q, ACTIVATION),
            Param("w_uk", "bf16", (c.heads, NOPE, LATENT), STATIC, head_strides),
            scales,
            Param(*query, OUTPUT),
        ),
        "attend": spec(
            "mla_attend",
            Param(*query, ACTIVATION),
            cache,
            Param("table", "i32", (c.requests, c.pages), ACTIVATION, align=4),
            Param("lengths", "i32", (c.requests,), ACTIVATION, align=4),
            scales,
            Param(*result, OUTPUT),
            Param(*result_lse, OUTPUT, align=4),
        ),
        "value": spec(
            "mla_value",
            x,
            Param(*latent, ACTIVATION),
            Param("w_uv", "bf16", (c.heads, VALUE, LATENT), STATIC, head_strides),
            Param("y", "bf16", (c.tokens, c.heads * VALUE), OUTPUT),
        ),
    }
    if tactic.splits > 1:
        found["merge"] = spec(
            "mla_merge",
            Param(*partial, ACTIVATION),
            Param(*partial_lse, ACTIVATION, align=4),
            Param(*latent, OUTPUT),
            Param(*lse, OUTPUT, align=4),
        )
    return found


def plan(config: Config, arch: str, tactic: Tactic | None = None, *, load: bool = True) -> Plan:
    """Choose the tactic and fetch the kernels (`load=False`: describe only). Raises ValueError where `unavailable_reason` has
    one."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    tactic = tactic or chosen_tactic(config, arch)
    chosen = _specs(config, tactic)
    return Plan(config, tactic, chosen, {name: get(spec, arch) for name, spec in chosen.items()} if load else {})


def run_query(
    plan: Plan, x: torch.Tensor, w: Weights, context: Context, scratch: dict[str, torch.Tensor], stream: int | None = None
) -> None:
    """Write this step's cache rows and `scratch["query"]`."""
    kernels, insert = plan.kernels, (w.scales, context.slot_mapping, context.cache)
    if plan.config.apart:
        kernels["norms"](x, w.q_norm, w.kv_norm, *insert, scratch["normed"], stream=stream)
        if "product" in kernels:
            kernels["product"](w.q_b, scratch["normed"], scratch["q"], stream=stream)
        else:
            library.multiply(scratch["normed"], w.q_b, scratch["q"], stream)
    else:
        kernels["project"](x, w.q_norm, w.kv_norm, w.q_b, *insert, scratch["q"], stream=stream)
    kernels["absorb"](scratch["q"], w.w_uk, w.scales, scratch["query"], stream=stream)


def run_attention(plan: Plan, w: Weights, context: Context, scratch: dict[str, torch.Tensor], stream: int | None = None) -> None:
    """Attend with `scratch["query"]`: writes `scratch["latent"]` and `scratch["lse"]`; zeros and -inf where there is no
    context."""
    whole = plan.tactic.splits == 1
    partial = (scratch["latent"][None], scratch["lse"][None]) if whole else (scratch["partial"], scratch["partial_lse"])
    where = (context.cache, context.table, context.lengths)
    plan.kernels["attend"](scratch["query"], *where, w.scales, *partial, stream=stream)
    if not whole:
        plan.kernels["merge"](*partial, scratch["latent"], scratch["lse"], stream=stream)


def run_value(
    plan: Plan, x: torch.Tensor, w: Weights, y: torch.Tensor, scratch: dict[str, torch.Tensor], stream: int | None = None
) -> None:
    """Project `scratch["latent"]` to values and gate them: writes `y`."""
    plan.kernels["value"](x, scratch["latent"], w.w_uv, y, stream=stream)


def run(
    plan: Plan,
    x: torch.Tensor,
    w: Weights,
    context: Context,
    y: torch.Tensor,
    scratch: dict[str, torch.Tensor],
    stream: int | None = None,
) -> None:
    """One MLA layer's decode step: writes the cache rows and `y`. `scratch`: the tensors of `plan.scratch_shapes()`."""
    run_query(plan, x, w, context, scratch, stream)
    run_attention(plan, w, context, scratch, stream)
    run_value(plan, x, w, y, scratch, stream)


def columns(heads: int, q_rank: int = 1536) -> int:
    """Row length of the packed projection: padded to a multiple of 16."""
    return -(-(q_rank + ROW + heads * VALUE) // 16) * 16


@functools.lru_cache(maxsize=1)
def specs() -> list[KernelSpec]:
    """Served shapes at both ends of the batch, and the small shapes of the tests."""
    shapes = ((12, False, 768, 1), (12, True, 1536, 64), (6, False, 384, 8))
    served = [Config(h, r, columns(h), block, 131072 // block, fp8=fp8) for h, fp8, block, r in shapes]
    small = [Config(2, 3, columns(2, 256), 64, 4, queries=q, fp8=fp8, q_rank=256) for q, fp8 in ((1, False), (3, True))]
    return [spec for c in (*served, *small) for spec in _specs(c, default_tactic(c)).values()]
