"""KDA decode: everything between the in-projection and o_proj in one launch, for plain (q = 1) and verify (q = 2..8) steps.

One cluster of CTAs owns a (request, head): it convolves q, k, v, projects f_b, gates, steps the recurrence in place and writes
the gated, normed
output. See `cute.py` for the schedule and `reference.py` for the equations.

Tensors (h local heads, R requests, q queries of each, T = R q tokens, k drafts, d = 128):
    x            [T, columns] bf16   in-projection's rows: q h d | k h d | v h d | gate h d | f_a d | beta h | padding
    conv_weight  [3 h d, 4] fp32     taps, oldest first, of the q, k and v channels
    f_b          [h d, d] bf16;  a_log [h] fp32;  dt_bias [h d] fp32;  norm_weight [d] bf16
    slots        [R, 1 + k] int32    a request's state slots; the first <= 0 is the null slot: zeros come out and nothing is
                                     written
    conv_state   [slots, 3 + k, 3 h d] bf16, any slot stride;  state [slots, h, d (V), d (K)] fp32, any slot stride
    y            [T, h d] bf16
With drafts (k > 0) also
    accepted     [R] int32           tokens that the last step emitted (>= 1): the recurrence starts from slots[r, accepted - 1]
    starts       [R + 1] int32       the first token of each request; a request may bring fewer than q tokens
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...reasons import Reason, Refusal
from .. import measured
from ..build import ACTIVATION, ARCHS, OUTPUT, SETTLED, STATIC, Compiled, KernelSpec, Param, Sym, get

if TYPE_CHECKING:
    import torch

D = 128
HEADS = (6, 12, 24, 48, 96)
LANES = 8  # threads of a V row
WALK = 4  # requests of one block at most: their windows wait in registers together
SM_COUNT = 132
SHAPE = ("heads", "requests", "queries", "drafts")  # what a measured tactic is for
SMEM_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Config:
    """One rank's KDA decode. `requests` counts padded rows too. `lower_bound` None: the unbounded decay of Kimi-Linear."""

    heads: int
    requests: int
    columns: int  # row length of x
    queries: int = 1
    drafts: int = 0
    lower_bound: float | None = -5.0
    norm_eps: float = 1e-5

    @property
    def tokens(self) -> int:
        return self.requests * self.queries


@dataclass(frozen=True)
class Tactic:
    """`split`: CTAs of a cluster that share a head's V rows. `row_groups`: clusters that share a head's requests. `stages`:
    states that a CTA holds or has on their way.
    """

    split: int
    threads: int
    row_groups: int
    stages: int = 1


@dataclass(frozen=True)
class KernelConfig:
    """What the device half is specialised on."""

    heads: int
    requests: int
    queries: int
    tokens: int
    slots_per_row: int
    lower_bound: float | None
    norm_eps: float
    split: int
    threads: int
    row_groups: int
    rows_per_cta: int
    stages: int

    @property
    def resident(self) -> int:
        """CTAs of an SM: they hide one another's latencies; tokens in a row need more registers."""
        return 3 if self.threads == 128 and self.slots_per_row == 1 else 2

    @property
    def in_waves(self) -> bool:
        """There are more CTAs than the GPU holds at once."""
        return self.heads * self.split * self.row_groups > self.resident * SM_COUNT


@dataclass(frozen=True)
class Plan:
    config: Config
    tactic: Tactic
    spec: KernelSpec
    kernel: Compiled | None

    @property
    def grid(self) -> tuple[int, int]:
        return self.config.heads * self.tactic.split, self.tactic.row_groups


def unavailable_reason(config: Config, arch: str) -> Refusal | None:
    """Why there is no kernel for this configuration, or None."""
    if arch not in ARCHS:
        return Refusal(Reason.OP_ARCH, f"kda: expected one of {', '.join(ARCHS)}, found {arch}")
    needed = 4 * config.heads * D + D + config.heads
    rules = [
        (config.heads >= 1, f"at least one local head, found {config.heads}"),
        (1 <= config.queries <= 8, f"1 to 8 tokens for each request, found {config.queries}"),
        (config.queries <= 1 + config.drafts, f"at most 1 + {config.drafts} tokens for each request, found {config.queries}"),
        (config.requests >= 1, f"at least one request, found {config.requests}"),
        (
            config.columns >= needed and config.columns % 8 == 0,
            f"rows of at least {needed} columns, a multiple of 8; found {config.columns}",
        ),
        (config.lower_bound is None or -5.0 <= config.lower_bound < 0.0, f"a decay bound in [-5, 0), found {config.lower_bound}"),
    ]
    failed = "; ".join(f"expected {text}" for holds, text in rules if not holds)
    return Refusal(Reason.OP_SHAPE, f"kda: {failed}") if failed else None


def default_tactic(config: Config) -> Tactic:
    """Split V until there is a block and a half for each SM; then let a block walk over requests, which keep memory busy for one
    another. Tokens that are verified together keep a block busy as they are."""
    pairs = config.heads * config.requests
    split = next((s for s in (2, 4) if pairs * s >= 4 * SM_COUNT // 3), 8)
    resident = 3 * SM_COUNT // (config.heads * split)  # clusters of one head that are resident together
    return _walking(config, Tactic(split, 128, max(1, min(config.requests, resident))))


def _walking(config: Config, tactic: Tactic) -> Tactic:
    """The tactic with as few row groups as asked for, if a block can have their tokens, and no more of them than requests, whose
    slots blocks read without asking; and no more stages than a block has requests."""
    fewest = config.requests if config.drafts else -(-config.requests // WALK)
    groups = min(max(tactic.row_groups, fewest), config.requests)
    return replace(tactic, row_groups=groups, stages=min(tactic.stages, -(-config.requests // groups)))


def _smem_bytes(config: Config, tactic: Tactic) -> int:
    """Of one CTA: its part of the states, what is prepared of each of its tokens, and 1 KB for the rest."""
    values = D // tactic.split
    tokens = config.queries if config.drafts else -(-config.requests // tactic.row_groups)
    return 4 * tactic.stages * values * D + 4 * tokens * (3 * D + 2 * values + 1) + 1024


def tactics(config: Config) -> list[Tactic]:
    """What the benchmark compares."""
    found = [default_tactic(config)]
    for split, threads in ((1, 256), (2, 128), (2, 256), (4, 128), (8, 128)):
        for resident, stages in ((2, 2), (3, 1), (3, 2), (64, 1)):  # blocks of an SM that walk; 64: no block walks
            groups = max(1, min(config.requests, resident * SM_COUNT // (config.heads * split)))
            tactic = _walking(config, Tactic(split, threads, groups, stages))
            walks = tactic.row_groups < config.requests
            fits = (resident if walks else 1) * _smem_bytes(config, tactic) < SMEM_LIMIT
            if fits and tactic not in found and config.heads * tactic.row_groups * split <= 12 * SM_COUNT:
                found.append(tactic)
    return found


def chosen_tactic(config: Config, arch: str) -> Tactic:
    """What was fastest on this architecture at this shape; else the default."""
    shape = {name: getattr(config, name) for name in SHAPE}
    found = measured.chosen(Path(__file__).parent, arch, shape, "requests")
    return _walking(config, Tactic(**found)) if found else default_tactic(config)


def spec(config: Config, tactic: Tactic) -> KernelSpec:
    tactic = _walking(config, tactic)
    h, width, slots_per_row = config.heads, config.heads * D, 1 + config.drafts
    kernel = KernelConfig(
        heads=h,
        requests=config.requests,
        queries=config.queries,
        tokens=config.tokens,
        slots_per_row=slots_per_row,
        lower_bound=config.lower_bound,
        norm_eps=config.norm_eps,
        split=tactic.split,
        threads=tactic.threads,
        row_groups=tactic.row_groups,
        rows_per_cta=-(-config.requests // tactic.row_groups),
        stages=tactic.stages,
    )
    verify = config.drafts > 0
    conv_strides = (Sym("conv_stride", bits=64), 3 * width, 1)
    state_strides = (Sym("state_stride", divisible_by=4, bits=64), D * D, D, 1)
    params = [
        Param("x", "bf16", (config.tokens, config.columns), ACTIVATION),
        Param("conv_weight", "f32", (3 * width, 4), STATIC),
        Param("f_b", "bf16", (width, D), STATIC),
        Param("a_log", "f32", (h,), STATIC, align=4),
        Param("dt_bias", "f32", (width,), STATIC, align=4),
        Param("norm_weight", "bf16", (D,), STATIC, align=2),
        Param("slots", "i32", (config.requests, slots_per_row), SETTLED, align=4),
        *([Param("accepted", "i32", (config.requests,), SETTLED, align=4)] if verify else []),
        *([Param("starts", "i32", (config.requests + 1,), SETTLED, align=4)] if verify else []),
        Param("conv_state", "bf16", (Sym("slots"), 2 + slots_per_row, 3 * width), SETTLED, conv_strides, align=2),
        Param("state", "f32", (Sym("slots"), h, D, D), SETTLED, state_strides),
        Param("y", "bf16", (config.tokens, width), OUTPUT, align=2),
    ]
    entry = "bf16_kda_verify" if verify else "bf16_kda_decode"
    return KernelSpec(entry, "kda", kernel, f"{__name__}.cute:{entry}", tuple(params))


def plan(config: Config, arch: str, tactic: Tactic | None = None, *, load: bool = True) -> Plan:
    """Choose the tactic and fetch the kernel (`load=False`: describe only). Raises ValueError where `unavailable_reason` has
    one."""
    refusal = unavailable_reason(config, arch)
    if refusal:
        raise ValueError(str(refusal))
    tactic = tactic or chosen_tactic(config, arch)
    chosen = spec(config, tactic)
    return Plan(config, tactic, chosen, get(chosen, arch) if load else None)


def run(
    plan: Plan,
    x: torch.Tensor,
    conv_weight: torch.Tensor,
    f_b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    y: torch.Tensor,
    accepted: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    stream: int | None = None,
) -> None:
    """One KDA layer's decode step: writes `y`, and `conv_state` and `state` in place. Shapes: the head of this module."""
    lengths = () if plan.config.drafts == 0 else (accepted, starts)
    assert plan.kernel is not None
    plan.kernel(x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, *lengths, conv_state, state, y, stream=stream)


def columns(heads: int) -> int:
    """Row length of the packed in-projection: padded to a multiple of 16."""
    return -(-(4 * heads * D + D + heads) // 16) * 16


@functools.lru_cache(maxsize=1)
def specs() -> list[KernelSpec]:
    """Served shapes at both ends and the middle of the batch, verify steps, and the small shapes of the tests."""
    served = [Config(h, r, columns(h)) for h, rs in ((12, (1, 8, 64)), (6, (1, 16)), (24, (8,)), (96, (1,))) for r in rs]
    verify = [Config(12, r, columns(12), queries=q, drafts=q - 1) for r, q in ((1, 8), (8, 4))]
    small = [Config(2, 3, columns(2), lower_bound=b) for b in (-5.0, None)] + [Config(2, 3, columns(2), queries=3, drafts=2)]
    found = [spec(c, tactic) for c in (*served, *verify) for tactic in dict.fromkeys(chosen_tactic(c, arch) for arch in ARCHS)]
    return [*found, *(spec(c, default_tactic(c)) for c in small)]
