"""The one timer of every benchmark: CUDA-graph replay, cold L2, interleaved variants, medians, and where a number comes from.

A decode kernel meets weights that no cache holds, inside a replayed graph. So a case is called over `copies` sets of its tensors,
in turn, until the sets together exceed the L2 cache twice over; one graph holds `CALLS` such calls; and the graphs of all
variants of a case are replayed in turn in the same process, so that clocks and neighbours touch them alike. The time of a call is
the median over replays. The GPU spins while a replay is being launched: without that the launch, some tens of microseconds of the
host, would be part of the time.

    variants = {"ours": lambda i: run(plan, w[i], x[i], y[i]), "stock": lambda i: ...}
    main("projection", [Case({"tp": 8, "batch": 1}, moved_bytes, variants, copies, baseline="stock")])

prints a table; `--json OUT` writes it with its provenance.
`copies_for(bytes_of_one_set)` says how many sets are needed. A case whose data is warm in the served model (activations of a few
KB) uses one copy, and says so in its label.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

COPY_BYTES_PER_SECOND = {"NVIDIA H200": 4.3e12}  # what a large device-to-device copy reaches, reads and writes together
CALLS = 24  # calls in one graph, rounded up to a multiple of the copies
REPLAYS = 41
SPIN_CYCLES = 1_000_000  # half a millisecond: longer than the launch of any graph here


@dataclass(frozen=True)
class Case:
    """One problem and the implementations that are compared on it.

    `label`: what makes the problem (sizes, batch, tensor-parallel slice). `moved`: bytes that must cross the memory bus once, the
    floor. `variants`: name -> function that runs the implementation on tensor set i. `copies`: number of tensor sets.
    """

    label: dict[str, Any]
    moved: int
    variants: dict[str, Callable[[int], object]]
    copies: int = 1
    baseline: str | None = None  # the incumbent among the variants; speedups are given against it
    calls: int = CALLS  # in one graph; fewer where a call is long


@dataclass
class Timing:
    """Microseconds of one call: median, and the 10th and 90th percentile over replays."""

    variant: str
    label: dict[str, Any]
    us: float
    us_p10: float
    us_p90: float
    moved: int
    gb_per_s: float
    share_of_floor: float | None
    speedup: float | None = None
    copies: int = 1
    error: str | None = field(default=None)


def copies_for(bytes_of_one_set: int, cap: int = 64) -> int:
    """Tensor sets so that together they hold twice the L2 cache, at least 3, at most `cap`."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(3, min(cap, -(-2 * cache // max(bytes_of_one_set, 1))))


def _graph(run: Callable[[int], object], copies: int, calls: int = CALLS) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about `calls` calls that goes over the copies in turn, and its number of calls.

    Warms up first: capture may not compile.
    """
    calls = -(-calls // copies) * copies
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):
            run(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    return graph, calls


def replay_us(graph: torch.cuda.CUDAGraph, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Microseconds of the GPU for one replay, which it finds launched when it begins."""
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(case: Case, replays: int = REPLAYS) -> list[Timing]:
    """Time every variant of a case, interleaved. A variant that raises is reported with its error and no time."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    failed: list[Timing] = []
    for name, run in case.variants.items():
        try:
            graphs[name] = _graph(run, case.copies, case.calls)
        except Exception as error:  # one broken variant shall not hide the others
            nothing = float("nan")
            failed.append(
                Timing(
                    name, case.label, nothing, nothing, nothing, case.moved, 0.0, None, error=f"{type(error).__name__}: {error}"
                )
            )
            torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(replays):
        for name, (graph, calls) in graphs.items():
            samples[name].append(replay_us(graph, start, end) / calls)
    floor = COPY_BYTES_PER_SECOND.get(torch.cuda.get_device_name())
    timings = []
    for name, times in samples.items():
        us = statistics.median(times)
        tenth = statistics.quantiles(times, n=10)
        rate = case.moved / us / 1e3
        share = rate * 1e9 / floor if floor else None
        timings.append(Timing(name, case.label, us, tenth[0], tenth[-1], case.moved, rate, share, copies=case.copies))
    base = next((t.us for t in timings if t.variant == case.baseline), None)
    for timing in timings:
        timing.speedup = base / timing.us if base else None
    return timings + failed


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Where numbers come from: device, driver, versions, commit and date. What cannot be found out is null, never guessed."""
    smi = _output("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader", "-i", "0")
    driver, sm_clock, memory_clock, power = [part.strip() for part in smi.split(",")] if smi else [None] * 4
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "gpus_visible": torch.cuda.device_count(),
        "driver": driver,
        "sm_clock": sm_clock,
        "memory_clock": memory_clock,
        "power_limit": power,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {
            name: _version(name)
            for name in ("torch", "triton", "vllm", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python")
        },
        "commit": commit or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "method": {
            "calls_per_graph": CALLS,
            "replays": REPLAYS,
            "statistic": "median",
            "l2": "cold where copies > 1",
            "launch": "hidden behind a spin",
        },
    }


def report(name: str, timings: list[Timing], commit: str | None = None) -> dict[str, Any]:
    """The JSON of one run."""
    return {"benchmark": name, "provenance": provenance(commit), "results": [vars(t) for t in timings]}


def _row(timing: Timing) -> str:
    label = " ".join(f"{key}={value}" for key, value in timing.label.items())
    if timing.error:
        return f"{label:<44} {timing.variant:<28} failed: {timing.error}"
    share = f"{timing.share_of_floor:6.1%}" if timing.share_of_floor is not None else "     -"
    speedup = f"{timing.speedup:5.2f}x" if timing.speedup else ""
    return f"{label:<44} {timing.variant:<28} {timing.us:8.2f} us {timing.gb_per_s:8.0f} GB/s {share} {speedup}"


def arguments(name: str) -> argparse.ArgumentParser:
    """The options that every benchmark has; a benchmark may add its own before parsing."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/ops/{name}.py")
    parser.add_argument("--json", type=Path, help="write the results with their provenance to this file")
    parser.add_argument("--commit", help="the commit measured, where the tree is not a git checkout")
    return parser


def main(name: str, cases: Iterable[Case], options: argparse.Namespace | None = None) -> list[Timing]:
    """Measure the cases (made lazily, so that each may free its memory), print a line for each variant, and write `--json`."""
    options = options or arguments(name).parse_args()
    timings: list[Timing] = []
    began = time.monotonic()
    for case in cases:
        ready = time.monotonic()
        rows = measure(case)
        timings += rows
        now = time.monotonic()
        print(*map(_row, rows), f"    {ready - began:.1f} s to prepare, {now - ready:.1f} s to measure", sep="\n", flush=True)
        began = now
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report(name, timings, options.commit), indent=1, default=str) + "\n")
    return timings
