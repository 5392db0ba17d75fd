"""Routed MXFP4 experts, W4A16: w13 with SiTU, then w2 with the weighted sum over a token's experts.

Two schedules, chosen by a tactic:
    pairs    every (token, slot) pair streams its expert's weights. No sorting; the w2 block owns output rows of a token and sums the
             16 experts itself. Right while nearly all pairs have different experts (up to about 8 tokens: 120 of 128 are distinct).
    grouped  pairs sorted by expert, each expert's weights are read once for up to 8 tokens; w2 writes every pair's product and a
             third kernel sums them in slot order.
Both are deterministic: no atomics, one fixed order of summation.

Tensors (T padded tokens, L latent width, I expert width per rank, E experts, k chosen):
    w13 [E, 2 I, L/2] uint8, gate rows first;  s13 [E, 2 I, L/32] uint8;  w2 [E, L, I/2] uint8;  s2 [E, L, I/32] uint8: checkpoint layout
    z [T, L] bf16;  out r [T, L] bf16, a partial sum over tensor-parallel ranks; rows from num_tokens on are written as zero
    hidden [T k, I] bf16: private to this op; within eight columns the order is 0 4 1 5 2 6 3 7, the order in which w2 decodes
    partial [T k, L] bf16: the products of the grouped schedule
Scale codes up to 128 are exact (weights up to 12); a larger one, 255 included, makes its products NaN: see `check_scales`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...reasons import Reason, Refusal
from ..build import ACTIVATION, ARCHS, OUTPUT, STATIC, Compiled, KernelSpec, Param, Sym, get

if TYPE_CHECKING:
    import torch

    from .torch_form import Weights

SM_COUNT = 132
LARGEST_SCALE = 128
ROWS = 16  # rows of a tensor-core tile


@dataclass(frozen=True)
class Config:
    """One rank's experts. `tokens` counts padded rows too."""

    tokens: int
    hidden: int = 3584
    width: int = 384
    experts: int = 896
    top_k: int = 16
    beta: float = 4.0
    linear_beta: float | None = 25.0

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k


@dataclass(frozen=True)
class Tactic:
    """How the work is cut.

    split: warps that share the columns of a w13 tile; tiles: 16-row tiles of w2 that a warp fetches at a time; warps: warps of a w2 block;
    slots: tokens of an expert that are multiplied at a time (grouped); resident: blocks for each SM in the grid of a kernel that walks
    over items.
    """

    grouped: bool
    split: int = 4
    tiles: int = 2
    warps: int = 8
    slots: int = 1
    resident: int = 3

    def __str__(self) -> str:
        return (
            f"{'grouped' if self.grouped else 'pairs'}-s{self.split}-t{self.tiles}-w{self.warps}-n{self.slots}-r{self.resident}"
        )


@dataclass(frozen=True)
class KernelConfig:
    """What the device half is specialised on; fields a kernel does not use are 0."""

    hidden: int
    width: int
    top_k: int
    slots: int = 0
    words: int = 0  # 32-bit words that a lane loads of a weight row at a time
    split: int = 0
    tiles: int = 0
    warps: int = 0
    grid: int = 0
    threads: int = 0
    beta: float = 0.0
    linear_beta: float | None = None


@dataclass(frozen=True)
class Plan:
    """Kernels in launch order: w13, w2 and, where grouped, sum. `kernels` is empty where nothing was compiled."""

    config: Config
    tactic: Tactic
    specs: tuple[KernelSpec, ...]
    kernels: tuple[Compiled, ...] = ()

    def __str__(self) -> str:
        return f"experts {self.config} {self.tactic}: {', '.join(spec.name for spec in self.specs)}"


@dataclass(frozen=True)
class Routing:
    """Who goes where. `num_tokens` [1], `ids` [T, k]: int32; `weights` [T, k] fp32.

    Grouped by expert, for the grouped schedule, all int32: `offsets` [E + 1] into `pairs` [T k], which lists token * k + slot in
    ascending order within an expert; `active` [E] names the experts with pairs, `num_active` [1] says how many. Padded rows are in no group.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    num_tokens: torch.Tensor
    offsets: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    active: torch.Tensor | None = None
    num_active: torch.Tensor | None = None


@dataclass(frozen=True)
class Scratch:
    """Buffers between the kernels: `hidden` [T k, I] and, where grouped, `partial` [T k, L]; bf16."""

    hidden: torch.Tensor
    partial: torch.Tensor | None = None


def words_for(columns: int) -> int:
    """How many 32-bit words of a row a lane loads at once: the most for which four lanes step evenly through the row."""
    return next((words for words in (4, 2, 1) if columns % (32 * words) == 0), 0)


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this configuration, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"experts: expected one of {', '.join(ARCHS)}, found {arch}")
    rules = [
        (1 <= config.tokens <= 64, f"1 to 64 tokens, found {config.tokens}"),
        (config.hidden > 0 and config.hidden % 128 == 0, f"a latent width that is a multiple of 128, found {config.hidden}"),
        (config.width > 0 and config.width % 32 == 0, f"an expert width that is a multiple of 32, found {config.width}"),
        (1 <= config.top_k <= config.experts, f"1 to {config.experts} experts for each token, found {config.top_k}"),
    ]
    failed = "; ".join(f"expected {text}" for holds, text in rules if not holds)
    return Refusal(Reason.OP_SHAPE, f"experts: {failed}") if failed else None


def check_scales(*scales: torch.Tensor) -> None:
    """Refuse weights that the kernels cannot decode. Raises ValueError. Call it once, when the weights are loaded."""
    for tensor in scales:
        largest = int(tensor.max())
        if largest > LARGEST_SCALE:
            raise ValueError(
                f"Expected E8M0 scale codes up to {LARGEST_SCALE} (weights up to 12), found {largest}"
                f"{' (NaN)' if largest == 255 else ''}. Such experts would give NaN here: serve them on the standard path."
            )


def _fitting(wanted: int, whole: int) -> int:
    """The largest divisor of `whole` that is at most `wanted`."""
    return next(n for n in range(min(wanted, whole), 0, -1) if whole % n == 0)


def fitted(config: Config, tactic: Tactic) -> Tactic:
    """The tactic with its cuts made to divide this configuration's shape."""
    chunks = config.hidden // 128
    row_tiles = config.hidden // ROWS
    split = _fitting(tactic.split, chunks)
    if not tactic.grouped:
        warps = _fitting(tactic.warps, config.top_k)
        return replace(tactic, split=split, warps=warps, slots=1, tiles=_fitting(min(tactic.tiles, 2 * warps), row_tiles))
    return replace(tactic, split=max(split, 2), tiles=_fitting(tactic.tiles, row_tiles))


PAIRS = Tactic(grouped=False, split=4, tiles=1, warps=8, resident=3)
GROUPED = Tactic(grouped=True, split=4, tiles=2, warps=4, slots=4, resident=3)
PAIRS_CUTS = (PAIRS, replace(PAIRS, split=7, warps=16, resident=2), replace(PAIRS, split=2, tiles=2, resident=5))
GROUPED_CUTS = (GROUPED, replace(GROUPED, slots=8, resident=2), replace(GROUPED, split=7, tiles=4, resident=2))


def default_tactic(config: Config) -> Tactic:
    """Pairs while nearly all are distinct experts."""
    return fitted(config, PAIRS if config.tokens <= 8 else GROUPED)


def tactics(config: Config) -> list[Tactic]:
    """What the benchmark compares."""
    found: list[Tactic] = []
    for grouped in (False, True):
        if (grouped and config.tokens < 4) or (not grouped and config.tokens > 16):
            continue
        for tactic in GROUPED_CUTS if grouped else PAIRS_CUTS:
            tactic = fitted(config, tactic)
            if tactic not in found:
                found.append(tactic)
    return found


def specs_for(config: Config, tactic: Tactic) -> tuple[KernelSpec, ...]:
    """The kernels of one tactic, in launch order."""
    t, n = Sym("tokens"), Sym("pairs")  # the code is the same for every batch
    k, hidden, width, e = config.top_k, config.hidden, config.width, config.experts
    base = KernelConfig(hidden=hidden, width=width, top_k=k, slots=tactic.slots)
    w13 = replace(
        base,
        split=tactic.split,
        grid=SM_COUNT * tactic.resident,
        beta=config.beta,
        linear_beta=config.linear_beta,
    )
    w2 = replace(base, words=words_for(width), tiles=tactic.tiles, warps=tactic.warps)
    first = [Param("w13", "u8", (e, 2 * width, hidden // 2), STATIC), Param("s13", "u8", (e, 2 * width, hidden // 32), STATIC)]
    second = [Param("w2", "u8", (e, hidden, width // 2), STATIC), Param("s2", "u8", (e, hidden, width // 32), STATIC)]
    z = Param("z", "bf16", (t, hidden), ACTIVATION)
    ids, weights = (Param(name, dtype, (t, k), ACTIVATION, align=4) for name, dtype in (("ids", "i32"), ("weights", "f32")))
    num_tokens, num_active = (Param(name, "i32", (1,), ACTIVATION, align=4) for name in ("num_tokens", "num_active"))
    groups = [
        Param("offsets", "i32", (e + 1,), ACTIVATION, align=4),
        Param("pairs", "i32", (n,), ACTIVATION, align=4),
        Param("active", "i32", (e,), ACTIVATION, align=4),
        num_active,
    ]

    def row_buffer(name: str, columns: int, access: object) -> Param:
        return Param(name, "bf16", (n, columns), access)  # type: ignore[arg-type]

    out = Param("out", "bf16", (t, hidden), OUTPUT)
    if not tactic.grouped:
        return (
            _spec("mxfp4_w13_pairs", w13, *first, z, ids, num_tokens, row_buffer("hidden", width, OUTPUT)),
            _spec("mxfp4_w2_pairs", w2, *second, row_buffer("hidden", width, ACTIVATION), ids, weights, num_tokens, out),
        )
    w2 = replace(w2, grid=SM_COUNT * tactic.resident)
    total = KernelConfig(hidden=hidden, width=0, top_k=k, threads=_fitting(128, hidden))
    summed = Param("partial", "bf16", (t, k, hidden), ACTIVATION)
    return (
        _spec("mxfp4_w13_grouped", w13, *first, z, *groups, row_buffer("hidden", width, OUTPUT)),
        _spec(
            "mxfp4_w2_grouped",
            w2,
            *second,
            row_buffer("hidden", width, ACTIVATION),
            *groups,
            row_buffer("partial", hidden, OUTPUT),
        ),
        _spec("experts_sum", total, summed, weights, num_tokens, out),
    )


def _spec(name: str, config: KernelConfig, *params: Param) -> KernelSpec:
    return KernelSpec(name, "experts", config, f"{__name__}.cute:{name}", params)


@functools.cache
def plan(config: Config, arch: str, tactic: Tactic | None = None, compiled: bool = True) -> Plan:
    """The kernels for one configuration, compiled or loaded now. Raises ValueError where `unavailable_reason` refuses."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    tactic = fitted(config, tactic) if tactic else default_tactic(config)
    specs = specs_for(config, tactic)
    return Plan(config, tactic, specs, tuple(get(spec, arch) for spec in specs) if compiled else ())


def run(
    plan: Plan,
    weights: Weights,
    z: torch.Tensor,
    routing: Routing,
    scratch: Scratch,
    out: torch.Tensor,
    stream: int | None = None,
) -> None:
    """Launch the plan's kernels. Shapes: see the module; nothing is allocated."""
    run_w13(plan, weights, z, routing, scratch, stream)
    run_w2(plan, weights, routing, scratch, out, stream)


def run_w13(plan: Plan, weights: Weights, z: torch.Tensor, routing: Routing, scratch: Scratch, stream: int | None = None) -> None:
    """hidden = SiTU(w1 z, w3 z) for every pair."""
    where = _groups(routing) if plan.tactic.grouped else (routing.ids, routing.num_tokens)
    plan.kernels[0](weights.w13, weights.s13, z, *where, scratch.hidden, stream=stream)


def run_w2(
    plan: Plan, weights: Weights, routing: Routing, scratch: Scratch, out: torch.Tensor, stream: int | None = None
) -> None:
    """out = weighted sum of w2 hidden over each token's experts."""
    if not plan.tactic.grouped:
        plan.kernels[1](
            weights.w2, weights.s2, scratch.hidden, routing.ids, routing.weights, routing.num_tokens, out, stream=stream
        )
        return
    partial = scratch.partial
    assert partial is not None
    plan.kernels[1](weights.w2, weights.s2, scratch.hidden, *_groups(routing), partial, stream=stream)
    c = plan.config
    plan.kernels[2](partial.view(c.tokens, c.top_k, c.hidden), routing.weights, routing.num_tokens, out, stream=stream)


def _groups(routing: Routing) -> tuple[torch.Tensor | None, ...]:
    return routing.offsets, routing.pairs, routing.active, routing.num_active


SMALL = Config(tokens=4, hidden=256, width=64, experts=32, top_k=4)  # what the tests compile for every architecture
SERVED_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def specs() -> list[KernelSpec]:
    """The served shapes (TP8 and TP16) with their default tactics, and the small shapes of the tests."""
    small = [SMALL, replace(SMALL, width=96, top_k=2)]
    found = [spec for c in small for tactic in (PAIRS, GROUPED) for spec in specs_for(c, fitted(c, tactic))]
    for width in (384, 192):
        for tokens in SERVED_TOKENS:
            config = Config(tokens=tokens, width=width)
            found += specs_for(config, default_tactic(config))
    return list(dict.fromkeys(found))
