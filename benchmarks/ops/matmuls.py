"""What the benchmarks of the four matmuls share: which tactics they compare, their options, and the table that they may write.

Most of their time is no measurement: importing vLLM takes some 15 s, and its skinny GEMM (up to 16 tokens) is compiled by its own
DSL for every shape, in seconds each. `--slices` and `--batches` choose what a run pays for; below each case stands what it took.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import winners
from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, arguments, main
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.library import LIBRARY, Library
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def name(tactic: Tactic | Library) -> str:
    if isinstance(tactic, Library):
        return "library"
    t = tactic
    if t.chunk:
        leaves = (" e1" if t.passing else "") + (f" p{t.pace}" if t.pace else "") + (" l1" if t.by_lanes else "")
        return f"ring c{t.chunk} m{t.stages} f{t.fetchers} s{t.splits} {t.row_warps}x{t.k_warps}w{leaves}"
    last = f"m{t.stages}" if t.stages else f"d{t.depth}"
    return f"g{t.groups} s{t.splits} {t.row_warps}x{t.k_warps}w t{t.tiles} {last}"


def compared(op: Any, config: Any, others: list[Tactic], quick: bool, library: bool = True) -> list[Any]:
    """The config with what `plan` takes, with the library where it can serve, with our kernel where that is not what `plan`
    takes, a ring with a stage more and less, and for many tokens other numbers of warps; and, unless quick, with some others,
    more for batch 1 and 8.
    """
    kernel = config.shape.tactic
    narrow = [narrower(op, config, tiles) for tiles in (1, 2, 3)] if kernel.stages and not kernel.chunk else []
    rings = [replace(kernel, stages=kernel.stages + n) for n in (-1, 1)] if kernel.chunk else []
    more = others[: 0 if quick else 12 if config.tokens in (1, 8) else 8]
    every = dict.fromkeys([config.chosen, *([LIBRARY] if library else []), kernel, *rings, *narrow, *more])
    found = [replace(config, tactic=tactic) for tactic in every]
    return [c for c in found if op.unavailable_reason(c, "sm_90a") is None]


def narrower(op: Any, config: Any, tiles: int) -> Tactic:
    """The kernel's tactic with so many tiles of rows for a warp, and no more warps than the rows need."""
    kernel = config.shape.tactic
    for row_warps in range(1, 17):
        kernel = replace(kernel, row_warps=row_warps, tiles=tiles)
        if op.unavailable_reason(replace(config, tactic=kernel), "sm_90a") is None:
            break
    return kernel


def options(benchmark: str, slices: Iterable[str]) -> argparse.ArgumentParser:
    """The options of all four; a benchmark may add its own."""
    parser = arguments(benchmark)
    parser.add_argument("--quick", action="store_true", help="only the tactic that is served and the library")
    parser.add_argument("--slices", default=",".join(slices), help="tensor-parallel slices, by commas")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="numbers of tokens, by commas")
    parser.add_argument("--tactics", type=Path, help="write the fastest tactics to this table")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    return parser


def batches(chosen: argparse.Namespace) -> list[int]:
    return [int(tokens) for tokens in chosen.batches.split(",")]


def run(
    benchmark: str,
    chosen: argparse.Namespace,
    configs: list[Any],
    specs: Callable[[Any], build.KernelSpec | None],
    cases: Iterator[Case],
    shape: tuple[str, ...],
) -> None:
    """Compile what the configs need; then measure, and write the table. `shape`: what a row of it names, besides tokens."""
    arch = chosen.compile or build.device_arch()
    compile_all((spec for spec in map(specs, configs) if spec is not None), arch)
    if chosen.compile:
        return
    timings = main(benchmark, cases, chosen)
    if chosen.tactics:
        sizes = ("tokens", *shape)
        ours = [replace(t, label={**t.label, "tokens": t.label["batch"]}) for t in timings if shape[0] in t.label]

        def fields(label: dict[str, Any]) -> dict[str, dict[str, Any]]:
            """Names are short: in another case the same one is another tactic."""
            return {name(c.tactic): asdict(c.tactic) for c in configs if all(getattr(c, n) == label[n] for n in sizes)}

        winners.write(chosen.tactics, arch, ours, fields, sizes, chosen.commit)
