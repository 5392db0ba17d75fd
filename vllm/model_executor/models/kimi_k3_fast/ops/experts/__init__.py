"""Routed MXFP4 experts, W4A16: w13 with SiTU, then w2 with the weighted sum over a token's experts. Two kernels for every batch.

Two schedules, chosen by a tactic:
    pairs    every (token, slot) pair is an entry of its own. No sorting; right while nearly all pairs have different experts.
    grouped  an entry is an expert with its pairs: its weights are read once for up to 8 (w13) or `slots` (w2) tokens, and once
             more, from the L2 cache, for every further so many.
Each has kernels of its own, `cute` and `grouped`: with one token an expert all depends on instructions per byte of weights, with
several on products that serve all of them.
Where the weights lie in stock's layout (`layout` "humming", described in `humming`), `packed` has the kernels of both schedules.
All are deterministic: no atomics, one fixed order of summation.

Tensors (T padded tokens, L latent width, I expert width per rank, E experts, k chosen):
    w13 [E, 2 I, L/2] uint8, gate rows first;  s13 [E, 2 I, L/32] uint8;  w2 [E, L, I/2] uint8;  s2 [E, L, I/32] uint8:
    checkpoint layout ("raw"). In stock's: w13 [E, L/16, 2 N] and w2 [E, K/16, 2 L] int32, s13 [E, L/32, N], s2 [E, K/32, L],
    where N and K are 2 I and I, padded
    z [T, L] bf16;  out r [T, L] bf16, a partial sum over tensor-parallel ranks; rows from num_tokens on are written as zero
    hidden [T k, I]: private to this op. Two-byte words declared bf16 that hold fp16 times 2^`hidden_shift`, since w2
    multiplies in fp16; within eight columns the order is 0 4 1 5 2 6 3 7, the order in which w2 decodes; in stock's layout,
    within 32 columns, that of a lane's words of the token operand. Values under 1e-6 lose
    bits (absolute error up to 2^-34 for K3's bound of 100); values saturate at 65504 where SiTU is unbounded (no linear_beta).
Scale codes 1 to 254 are exact, 0 counts as a factor of zero (2^-127), 255 (NaN) gives values that are not finite: see
`check_scales`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...reasons import Reason, Refusal
from ..build import ACTIVATION, ARCHS, OUTPUT, SETTLED, STATIC, Compiled, KernelSpec, Param, Sym, get
from .layout import (
    GROUP,
    ROUND,
    ROW_UNIT,
    SHARED,
    First,
    GroupedFirst,
    GroupedSecond,
    PackedFirst,
    PackedSecond,
    Second,
    padded_columns,
    padded_rows,
)

if TYPE_CHECKING:
    import torch

    from .torch_form import Weights

SM_COUNT = 132
LARGEST_SCALE = 254
RAW, HUMMING = "raw", "humming"
SHAPE = ("tokens", "hidden", "width", "experts", "top_k", "layout")  # what a measured tactic is for
COLUMNS = 8  # tokens that the matrix unit takes at a time; up to so many, pairs may do without groups


@dataclass(frozen=True)
class Config:
    """One rank's experts. `tokens` counts padded rows too. pitch: rows from the first of gate to the first of up in stock's
    layout, where that is not `width`.
    """

    tokens: int
    hidden: int = 3584
    width: int = 384
    experts: int = 896
    top_k: int = 16
    beta: float = 4.0
    linear_beta: float | None = 25.0
    layout: str = RAW
    pitch: int = 0

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k


@dataclass(frozen=True)
class Tactic:
    """How the work is cut.

    split: warps that share the columns of a w13 tile; stages: w13 tiles in shared memory, as many as fit at most; height: rows
    of w2 that a block owns; warps: of a w2 block; depth: experts that each of them has in shared memory at most.
    Of pairs only: teams, w13 tiles that are multiplied at a time; ahead, experts whose w2 the w13 kernel brings into L2 when its
    own weights are under way.
    Of groups only: slots, tokens of an expert that w2 multiplies at a time; padded, w2 rows are copied one by one, which avoids
    bank conflicts.
    """

    grouped: bool
    split: int = 7
    teams: int = 2
    stages: int = 6
    ahead: int = 16
    height: int = 28
    warps: int = 12
    depth: int = 3
    slots: int = 0
    padded: bool = False

    def __str__(self) -> str:
        if self.grouped:
            cuts = f"s{self.split}-g{self.stages}-h{self.height}-w{self.warps}-d{self.depth}-n{self.slots}"
            return f"grouped-{cuts}{'-p' if self.padded else ''}"
        w13 = f"s{self.split}-t{self.teams}-g{self.stages}-a{self.ahead}"
        return f"pairs-{w13}-h{self.height}-w{self.warps}-d{self.depth}"


@dataclass(frozen=True)
class PackedTactic:
    """How the work on stock's layout is cut.

    strip: row groups of every 64 rows that a w13 item takes, and where pairs are grouped tokens of an expert that are multiplied
    at a time; split: warps that share the columns of an item; flight: steps that each of them has under way at most; spread: a
    block takes every so many-th item, or neighbours; ahead: as for `Tactic`. below: row groups that a w2 block owns, and tokens
    at a time; warps: of a w2 block; depth: steps that each of them has under way at most.
    """

    grouped: bool
    strip: int = 2
    split: int = 8
    flight: int = 6
    spread: bool = True
    ahead: int = 16
    below: int = 4
    warps: int = 16
    depth: int = 6

    def __str__(self) -> str:
        w13 = f"p{self.strip}-s{self.split}-f{self.flight}{'' if self.spread else '-n'}-a{self.ahead}"
        return f"packed{'-grouped' if self.grouped else ''}-{w13}-p{self.below}-w{self.warps}-d{self.depth}"


@dataclass(frozen=True)
class PackedConfig:
    """What the device half for stock's layout is specialised on; fields a kernel does not use are 0. strip, flight: of the kernel
    at hand."""

    hidden: int
    width: int
    pitch: int
    top_k: int
    hidden_shift: int
    grouped: bool
    entries: int
    strip: int = 0
    flight: int = 0
    grid: int = 0
    split: int = 0
    spread: bool = False
    ahead: int = 0
    beta: float = 0.0
    linear_beta: float | None = None
    rows: int = 0  # tokens that w2 has sums for, and of groups the most there are
    warps: int = 0


@dataclass(frozen=True)
class KernelConfig:
    """What the device half is specialised on; fields a kernel does not use are 0."""

    hidden: int
    width: int
    top_k: int
    hidden_shift: int
    slots: int = 0  # groups: token rows that a w13 block keeps; tokens of an expert that w2 multiplies at a time
    grid: int = 0
    split: int = 0
    teams: int = 0
    stages: int = 0
    ahead: int = 0
    gathered: bool = False  # w13 of groups: the rows kept are those of the expert at hand, not all
    beta: float = 0.0
    linear_beta: float | None = None
    rows: int = 0  # tokens that w2 has sums for
    entries: int = 0
    height: int = 0
    warps: int = 0
    depth: int = 0
    padded: bool = False


@dataclass(frozen=True)
class Plan:
    """Kernels in launch order: w13, w2. `kernels` is empty where nothing was compiled."""

    config: Config
    tactic: Tactic | PackedTactic
    specs: tuple[KernelSpec, ...]
    kernels: tuple[Compiled, ...] = ()

    def __str__(self) -> str:
        return f"experts {self.config} {self.tactic}: {', '.join(spec.name for spec in self.specs)}"


@dataclass(frozen=True)
class Routing:
    """Who goes where. `num_tokens` [1], `ids` [T, k]: int32; `weights` [T, k] fp32.

    Grouped by expert, for the grouped schedule, all int32: `offsets` [E + 1] into `pairs` [T k], which lists token * k + slot in
    ascending order within an expert; `active` [E] names the experts with pairs, `num_active` [1] says how many.
    Padded rows are in no group.
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
    """Buffer between the kernels: `hidden` [T k, I], two-byte words."""

    hidden: torch.Tensor


def hidden_shift(config: Config) -> int:
    """The power of two that hidden values are multiplied by: the most for which none leaves fp16."""
    if config.linear_beta is None:
        return 0
    return max(0, math.floor(math.log2(65504 / (config.beta * config.linear_beta))))


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
    if config.layout == HUMMING:
        rules += [
            (config.hidden % ROW_UNIT == 0, f"a latent width that is a multiple of {ROW_UNIT}, found {config.hidden}"),
            (config.width % 64 == 0, f"an expert width that is a multiple of 64, found {config.width}"),
            (config.pitch % 64 == 0, f"a pitch that is a multiple of 64, found {config.pitch}"),
            (not config.pitch or config.pitch >= config.width, f"a pitch of at least {config.width}, found {config.pitch}"),
        ]
    failed = "; ".join(f"expected {text}" for holds, text in rules if not holds)
    return Refusal(Reason.OP_SHAPE, f"experts: {failed}") if failed else None


def check_scales(*scales: torch.Tensor) -> None:
    """Refuse weights that the kernels cannot decode. Raises ValueError. Call it once, when the weights are loaded."""
    for tensor in scales:
        largest = int(tensor.max())
        if largest > LARGEST_SCALE:
            raise ValueError(
                f"Expected E8M0 scale codes up to {LARGEST_SCALE}, found {largest} (NaN). Its output is not finite on any path."
            )


def _fitting(wanted: int, whole: int) -> int:
    """The largest divisor of `whole` that is at most `wanted`."""
    return next(n for n in range(min(wanted, whole), 0, -1) if whole % n == 0)


def _rows(config: Config) -> int:
    """Tokens, up to the next power of two: what w2 keeps sums for, so that few kernels serve all batches."""
    return max(COLUMNS, 1 << (config.tokens - 1).bit_length())


def _entries(config: Config) -> int:
    """The most entries there can be."""
    return min(config.experts, _rows(config) * config.top_k) if config.tokens > COLUMNS else _rows(config) * config.top_k


def fitted(config: Config, tactic: Tactic | PackedTactic) -> Tactic | PackedTactic:
    """The tactic with its cuts made to divide this configuration's shape and to fit into shared memory; of groups where there are
    too many tokens for pairs.
    """
    if config.tokens > COLUMNS and not tactic.grouped:
        return default_tactic(config)
    return _fitted_packed(config, tactic) if isinstance(tactic, PackedTactic) else _fitted_raw(config, tactic)


def _fitted_raw(config: Config, tactic: Tactic) -> Tactic:
    height, rows, entries = _fitting(tactic.height, config.hidden), _rows(config), _entries(config)
    if tactic.grouped:
        split, slots = _fitting(tactic.split, config.hidden // GROUP), max(1, min(tactic.slots, config.tokens))
        stages = GroupedFirst(config.hidden, min(COLUMNS, config.tokens), split).stages(tactic.stages)
        second = GroupedSecond(config.width, height, slots, tactic.padded)
        depth = second.depth(tactic.depth, tactic.warps, rows, entries, rows * config.top_k)
        return replace(tactic, split=split, teams=0, stages=stages, ahead=0, height=height, depth=depth, slots=slots)
    split, ahead = _fitting(tactic.split, config.hidden // ROUND), min(tactic.ahead, entries)
    stages = First(config.hidden, split, tactic.teams).stages(tactic.stages)
    depth = Second(config.width, height).depth(tactic.depth, tactic.warps, rows, entries)
    return replace(tactic, split=split, stages=stages, ahead=ahead, height=height, depth=depth, slots=0, padded=False)


def _fitted_packed(config: Config, tactic: PackedTactic) -> PackedTactic:
    grouped, rows, entries = tactic.grouped, _rows(config), _entries(config)
    shares = config.hidden * tactic.strip // (8 * GROUP)
    least = PackedFirst(config.hidden, config.width, tactic.strip, 1, 1, grouped).finishers  # a warp for each
    split = next(n for n in range(max(_fitting(tactic.split, shares), least), shares + 1) if shares % n == 0)
    below = next(p for p in (1, 2, 4, 8) if p >= tactic.below and config.width * p % (8 * GROUP) == 0)

    def first(flight: int) -> PackedFirst:
        return PackedFirst(config.hidden, config.width, tactic.strip, split, flight, grouped)

    def second(depth: int) -> PackedSecond:
        return PackedSecond(config.width, below, tactic.warps, depth, grouped)

    flight = next((n for n in range(tactic.flight, 0, -1) if first(n).bytes(entries, SM_COUNT, rows * config.top_k) <= SHARED), 0)
    depth = next((n for n in range(tactic.depth, 0, -1) if second(n).bytes(rows, entries, rows * config.top_k) <= SHARED), 0)
    ahead = 0 if grouped else min(tactic.ahead, entries)
    return replace(tactic, split=split, flight=flight, ahead=ahead, below=below, depth=depth)


PAIRS = Tactic(grouped=False)
GROUPED = Tactic(grouped=True, split=8, stages=8, warps=8, slots=4)
PAIRS_CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"ahead": 0},
    {"split": 4, "teams": 3, "warps": 8, "depth": 4},
    {"split": 14, "teams": 1, "stages": 8, "ahead": 32, "warps": 16, "depth": 2},
    {"split": 4, "teams": 4, "ahead": 32, "height": 14, "warps": 16},
)
GROUPED_CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"warps": 12, "depth": 2},
    {"warps": 16, "depth": 2, "split": 14},
    {"padded": True, "warps": 12, "depth": 2, "split": 7},
    {"warps": 4, "depth": 6, "split": 4},
)


def _grouped(config: Config) -> Tactic:
    """Groups: few tokens meet in an expert while there are few."""
    return replace(GROUPED, slots=2 if config.tokens <= 16 else 4)


PACKED = PackedTactic(grouped=False)
PACKED_GROUPED = PackedTactic(grouped=True, strip=4, spread=False, warps=8, depth=8)
PACKED_CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"ahead": 0},
    {"spread": False},
    {"strip": 4},
    {"strip": 2},
    {"flight": 5},
    {"split": 14, "flight": 4},
    {"flight": 4, "warps": 8, "depth": 5},
)
PACKED_GROUPED_CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"spread": True},
    {"warps": 12, "depth": 6},
    {"spread": True, "warps": 12, "depth": 6},
    {"split": 14, "flight": 3},
)


def _packed(config: Config) -> PackedTactic:
    """The widest strips with which nine blocks of ten are busy to the end; not spread where they are widest: it was slower on
    H200, and lacks registers on sm_103a.
    """

    def even(strip: int) -> bool:
        items = config.pairs * PackedFirst(config.hidden, config.width, strip, 1, 1, False).tiles
        return 10 * items >= 9 * SM_COUNT * -(-items // SM_COUNT)

    strip = next((strip for strip in (4, 2) if even(strip)), 1)
    return replace(PACKED, strip=strip, spread=strip < 4)


def _packed_grouped(config: Config) -> PackedTactic:
    """Neighbouring items for a block while tokens are few, as they have the same ones; spread, what blocks read at a time lies
    closer together."""
    return replace(PACKED_GROUPED, spread=config.tokens > 32)


def default_tactic(config: Config) -> Tactic | PackedTactic:
    """Pairs while nearly all are distinct experts."""
    pairs = config.tokens <= COLUMNS
    if config.layout == HUMMING:
        return fitted(config, _packed(config) if pairs else _packed_grouped(config))
    return fitted(config, PAIRS if pairs else _grouped(config))


@functools.cache
def _measured() -> list[dict[str, Any]]:
    """tactics.json: for an architecture and a shape the tactic that was fastest, and where that number comes from."""
    return json.loads((Path(__file__).parent / "tactics.json").read_text())


def chosen_tactic(config: Config, arch: str) -> Tactic | PackedTactic:
    """What was fastest on this architecture, for this many tokens or the next larger number measured; else the default."""
    wanted = replace(config, tokens=0)
    rows = [
        row
        for row in _measured()
        if row["arch"] == arch
        and row["tokens"] >= config.tokens
        and all(row[name] == getattr(wanted, name) for name in SHAPE if name != "tokens")
    ]
    if not rows:
        return default_tactic(config)
    kind = PackedTactic if config.layout == HUMMING else Tactic
    return fitted(config, kind(**min(rows, key=lambda row: row["tokens"])["tactic"]))


def tactics(config: Config) -> list[Tactic | PackedTactic]:
    """What the benchmark compares."""
    if config.layout == HUMMING:
        cuts = [replace(_packed(config), **cut) for cut in PACKED_CUTS] if config.tokens <= COLUMNS else []
        if config.tokens >= COLUMNS // 2:
            cuts += [replace(_packed_grouped(config), **cut) for cut in PACKED_GROUPED_CUTS]
        return [t for t in dict.fromkeys(_fitted_packed(config, cut) for cut in cuts) if min(t.flight, t.depth) > 1]
    wanted = [replace(PAIRS, **cut) for cut in PAIRS_CUTS] if config.tokens <= COLUMNS else []
    if config.tokens >= COLUMNS // 2:
        wanted += [replace(_grouped(config), **cut) for cut in GROUPED_CUTS]
    found = dict.fromkeys(_fitted_raw(config, tactic) for tactic in wanted)
    return [tactic for tactic in found if tactic.depth and tactic.stages > 1]


def specs_for(config: Config, tactic: Tactic | PackedTactic) -> tuple[KernelSpec, ...]:
    """The kernels of one tactic, in launch order."""
    t, n = Sym("tokens"), Sym("pairs")
    k, hidden, width, e = config.top_k, config.hidden, config.width, config.experts
    w13: KernelConfig | PackedConfig
    w2: KernelConfig | PackedConfig
    if isinstance(tactic, PackedTactic):
        w13, w2, name = *_packed_configs(config, tactic), "packed_grouped" if tactic.grouped else "packed"
        rows, columns = padded_rows(2 * (config.pitch or width)), padded_columns(config.pitch or width)
        first = [Param("w13", "i32", (e, hidden // 16, 2 * rows), STATIC), Param("s13", "u8", (e, hidden // 32, rows), STATIC)]
        second = [Param("w2", "i32", (e, columns // 16, 2 * hidden), STATIC)]
        second += [Param("s2", "u8", (e, columns // 32, hidden), STATIC)]
    else:
        w13, w2, name = *_raw_configs(config, tactic), "grouped" if tactic.grouped else "pairs"
        first = [
            Param("w13", "u8", (e, 2 * width, hidden // 2), STATIC),
            Param("s13", "u8", (e, 2 * width, hidden // 32), STATIC),
        ]
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
    chosen = [*groups, weights] if tactic.grouped else [ids, weights, num_tokens]  # as w2 takes them
    settles = isinstance(tactic, PackedTactic)  # w13 is between the choice and w2, and lets w2 start when the choice is finished
    if settles:
        chosen = [replace(param, access=SETTLED) for param in chosen]
    written, read = (Param("hidden", "bf16", (n, width), access) for access in (OUTPUT, ACTIVATION))
    out = Param("out", "bf16", (t, hidden), OUTPUT)
    first += [z, *groups] if tactic.grouped else [*second, z, ids, num_tokens]
    return (
        replace(_spec(f"mxfp4_w13_{name}", w13, *first, written), settles=settles),
        _spec(f"mxfp4_w2_{name}", w2, *second, read, *chosen, out),
    )


def _raw_configs(config: Config, tactic: Tactic) -> tuple[KernelConfig, KernelConfig]:
    """Of w13 and w2."""
    base = KernelConfig(config.hidden, config.width, config.top_k, hidden_shift(config))
    w13 = replace(base, grid=SM_COUNT, split=tactic.split, teams=tactic.teams, stages=tactic.stages, ahead=tactic.ahead)
    w13 = replace(w13, beta=config.beta, linear_beta=config.linear_beta)
    w2 = replace(base, rows=_rows(config), entries=_entries(config), height=tactic.height, warps=tactic.warps, depth=tactic.depth)
    if tactic.grouped:
        w13 = replace(w13, slots=min(COLUMNS, config.tokens), gathered=config.tokens > COLUMNS)
        w2 = replace(w2, slots=tactic.slots, padded=tactic.padded)
    return w13, w2


def _packed_configs(config: Config, tactic: PackedTactic) -> tuple[PackedConfig, PackedConfig]:
    """Of w13 and w2."""
    shape = (config.hidden, config.width, config.pitch or config.width, config.top_k, hidden_shift(config))
    base = PackedConfig(*shape, grouped=tactic.grouped, entries=_entries(config))
    w13 = replace(base, strip=tactic.strip, flight=tactic.flight, grid=SM_COUNT, split=tactic.split, spread=tactic.spread)
    w13 = replace(w13, ahead=tactic.ahead, beta=config.beta, linear_beta=config.linear_beta)
    w13 = replace(w13, rows=_rows(config)) if tactic.grouped else w13
    return w13, replace(base, strip=tactic.below, flight=tactic.depth, rows=_rows(config), warps=tactic.warps)


def _spec(name: str, config: KernelConfig | PackedConfig, *params: Param) -> KernelSpec:
    device = "packed" if "_packed" in name else "grouped" if name.endswith("_grouped") else "cute"
    return KernelSpec(name, "experts", config, f"{__name__}.{device}:{name}", params)


@functools.cache
def plan(config: Config, arch: str, tactic: Tactic | PackedTactic | None = None, compiled: bool = True) -> Plan:
    """The kernels for one configuration, compiled or loaded now. Raises ValueError where `unavailable_reason` refuses."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    tactic = fitted(config, tactic) if tactic else chosen_tactic(config, arch)
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
    w = weights
    if plan.tactic.grouped:
        plan.kernels[0](w.w13, w.s13, z, *_groups(routing), scratch.hidden, stream=stream)
    else:
        plan.kernels[0](w.w13, w.s13, w.w2, w.s2, z, routing.ids, routing.num_tokens, scratch.hidden, stream=stream)


def run_w2(
    plan: Plan, weights: Weights, routing: Routing, scratch: Scratch, out: torch.Tensor, stream: int | None = None
) -> None:
    """out = weighted sum of w2 hidden over each token's experts."""
    r = routing
    where = (*_groups(r), r.weights) if plan.tactic.grouped else (r.ids, r.weights, r.num_tokens)
    plan.kernels[1](weights.w2, weights.s2, scratch.hidden, *where, out, stream=stream)


def _groups(routing: Routing) -> tuple[torch.Tensor | None, ...]:
    return routing.offsets, routing.pairs, routing.active, routing.num_active


SMALL = Config(tokens=4, hidden=256, width=64, experts=32, top_k=4)  # what the tests compile for every architecture
SERVED_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def specs() -> list[KernelSpec]:
    """The served shapes (TP8 and TP16) with the tactics of every architecture, and the small shapes of the tests."""
    small = [SMALL, replace(SMALL, width=96, top_k=2), replace(SMALL, tokens=16)]
    found = [spec for c in small for tactic in (PAIRS, GROUPED) for spec in specs_for(c, fitted(c, tactic))]
    packed = [replace(SMALL, layout=HUMMING), replace(SMALL, tokens=16, width=128, layout=HUMMING)]
    found += [spec for c in packed for tactic in (PACKED, PACKED_GROUPED) for spec in specs_for(c, fitted(c, tactic))]
    for width, layout in itertools.product((384, 192), (RAW, HUMMING)):
        for tokens in SERVED_TOKENS:
            config = Config(tokens=tokens, width=width, layout=layout)
            for tactic in dict.fromkeys(chosen_tactic(config, arch) for arch in ARCHS):
                found += specs_for(config, tactic)
    return list(dict.fromkeys(found))
