"""Each C++ operator of a decode step alone: its time, the bytes it must read and write, and the share of the bandwidth that a
copy reaches in the same process. PyTorch's form of the same operator runs interleaved, call by call.

    python benchmarks/cpu_ops.py --out benchmarks/results/cpu_ops.json [--batches 1,2,8,64] [--level auto] [--context 1024]

Sizes are those of `cpu_decode.py --model 1b`: hidden 2048, 16 heads of 128, 64 experts of 1024 in a latent of 1024, top 8.
Weights rotate through copies that together pass the last-level cache, so that a call finds none of its weights there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_decode import copy_bandwidth, provenance

from vllm.model_executor.models.kimi_k3_fast.fast.backend import Forms, TorchForms
from vllm.model_executor.models.kimi_k3_fast.ops.cpu import CpuForms
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights as ExpertWeights
from vllm.model_executor.models.kimi_k3_fast.ops.kda.torch_form import Weights as KdaWeights

HIDDEN, HEADS, DIM, LATENT, SHARED, EXPERTS, WIDTH, TOP_K, BLOCK = 2048, 16, 128, 512, 64, 64, 1024, 8, 128
BF16 = torch.bfloat16
COLD_BYTES = 1 << 29  # of rotated copies: more than a last-level cache holds


@dataclass(frozen=True)
class Case:
    """`calls`: the same operator on different copies of its inputs. `bytes`: what one call must read and write."""

    name: str
    bytes: int
    calls: list[Callable[[Forms], Any]]


def size(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def rotated(name: str, moved: int, make: Callable[[], Callable[[Forms], Any]]) -> Case:
    return Case(name, moved, [make() for _ in range(max(2, min(64, COLD_BYTES // moved)))])


def linear(name: str, tokens: int, rows: int, columns: int) -> Case:
    x = torch.randn(tokens, columns, dtype=BF16)

    def make() -> Callable[[Forms], Any]:
        weight = torch.randn(rows, columns, dtype=BF16)
        return lambda ops: ops.linear(x, weight)

    return rotated(name, 2 * (rows * columns + tokens * (rows + columns)), make)


def kda(tokens: int) -> Case:
    width = HEADS * DIM
    packed, slots = torch.randn(tokens, 4 * width + DIM + HEADS, dtype=BF16), torch.arange(tokens) + 1
    w = KdaWeights(
        torch.randn(3 * width, 4),
        torch.randn(width, DIM, dtype=BF16),
        torch.ones(HEADS, 1),
        torch.randn(HEADS, DIM),
        torch.ones(DIM),
        -5.0,
    )
    state = tokens * width * DIM * 4
    moved = 2 * state + 2 * tokens * 9 * width * 2 + size(packed, w.f_b, w.conv)

    def make() -> Callable[[Forms], Any]:
        conv_state, states = torch.randn(tokens + 1, 3, 3 * width, dtype=BF16), torch.zeros(tokens + 1, HEADS, DIM, DIM)
        return lambda ops: ops.kda_step(packed, conv_state, states, slots, w, BF16)

    return rotated("kda", moved, make)


def attend(tokens: int, context: int) -> Case:
    query, columns = torch.randn(tokens, HEADS, LATENT + SHARED, dtype=BF16), -(-context // BLOCK)
    table = torch.randperm(tokens * columns).view(tokens, columns).int()
    lengths, scale = torch.full((tokens,), context), (DIM + SHARED) ** -0.5
    moved = tokens * context * (LATENT + SHARED) * 2 + size(query) + tokens * HEADS * LATENT * 4

    def make() -> Callable[[Forms], Any]:
        cache = torch.randn(tokens * columns, BLOCK, LATENT + SHARED, dtype=BF16)
        return lambda ops: ops.attend(query, cache, table, lengths, LATENT, scale, context)

    return rotated(f"mla attend, context {context}", moved, make)


def absorb(tokens: int) -> Case:
    q = torch.randn(tokens, HEADS, DIM + SHARED, dtype=BF16)

    def make() -> Callable[[Forms], Any]:
        w_uk = torch.randn(HEADS, DIM, LATENT, dtype=BF16)
        return lambda ops: ops.absorb(q, w_uk)

    return rotated("mla absorb", 2 * HEADS * DIM * LATENT + size(q), make)


def values(tokens: int) -> Case:
    lat, gate = torch.randn(tokens, HEADS, LATENT), torch.randn(tokens, HEADS * DIM, dtype=BF16)

    def make() -> Callable[[Forms], Any]:
        w_uv = torch.randn(HEADS, DIM, LATENT, dtype=BF16)
        return lambda ops: ops.values(lat, w_uv, gate)

    return rotated("mla values", 2 * HEADS * DIM * LATENT + size(lat, gate), make)


def attn_res(tokens: int) -> Case:
    delta, score = torch.randn(tokens, HIDDEN, dtype=BF16), torch.randn(HIDDEN)

    def make() -> Callable[[Forms], Any]:
        sources = torch.randn(4, tokens, HIDDEN)
        return lambda ops: ops.mix(sources, delta, score, score, 1e-5, BF16)

    return rotated("attn_res, 4 sources", 4 * tokens * HIDDEN * 4 + 2 * size(delta), make)


def route(tokens: int) -> Case:
    x, bias = torch.randn(tokens, HIDDEN, dtype=BF16), torch.randn(EXPERTS)

    def make() -> Callable[[Forms], Any]:
        gate = torch.randn(EXPERTS, HIDDEN)
        return lambda ops: ops.route(x, gate, bias, TOP_K, True, 1.0)

    return rotated("router", 4 * EXPERTS * HIDDEN + size(x), make)


def experts(tokens: int) -> Case:
    latent = 1024
    x, weights = torch.randn(tokens, latent, dtype=BF16), torch.rand(tokens, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
    one = 3 * WIDTH * latent // 2 * 17 // 16  # codes and scales of an expert

    def make() -> Callable[[Forms], Any]:
        byte = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8)  # noqa: E731
        w = ExpertWeights(
            byte(0, 256, EXPERTS, 2 * WIDTH, latent // 2),
            byte(118, 124, EXPERTS, 2 * WIDTH, latent // 32),
            byte(0, 256, EXPERTS, latent, WIDTH // 2),
            byte(118, 124, EXPERTS, latent, WIDTH // 32),
        )
        return lambda ops: ops.experts(x, ids, weights, w, 4.0, 25.0)

    moved = int(ids.unique().numel()) * one + 2 * size(x)
    return Case(f"experts, {ids.unique().numel()} of {EXPERTS}", moved, [make() for _ in range(6)])  # 6 layers of 102 MiB


def shared(tokens: int) -> Case:
    x = torch.randn(tokens, HIDDEN, dtype=BF16)

    def make() -> Callable[[Forms], Any]:
        weight = torch.randn(4 * WIDTH, HIDDEN, dtype=BF16)
        return lambda ops: ops.gate_up(x, weight, 4.0, 25.0)

    return rotated("shared gate and up", 2 * 4 * WIDTH * HIDDEN + size(x), make)


def cases(tokens: int, context: int) -> list[Callable[[], Case]]:
    """Made one after another: together they would not fit."""
    return [
        lambda: attn_res(tokens),
        lambda: linear("kda in_proj", tokens, 4 * HEADS * DIM + DIM + HEADS, HIDDEN),
        lambda: kda(tokens),
        lambda: linear("o_proj", tokens, HIDDEN, HEADS * DIM),
        lambda: absorb(tokens),
        lambda: attend(tokens, context),
        lambda: values(tokens),
        lambda: route(tokens),
        lambda: experts(tokens),
        lambda: shared(tokens),
    ]


def measure(case: Case, forms: dict[str, Forms], seconds: float) -> dict[str, float]:
    """Median microseconds of a call of each form, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    end = time.perf_counter() + seconds
    names = list(forms)
    for count, call in enumerate(itertools.cycle(case.calls)):
        name = names[(count + count // len(case.calls)) % len(names)]  # each form meets each copy, cold
        began = time.perf_counter()
        call(forms[name])
        times[name].append((time.perf_counter() - began) * 1e6)
        if time.perf_counter() > end and count >= 8:
            break
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,2,8,64")
    parser.add_argument("--level", default="auto", help="instruction set")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each operator and batch")
    options = parser.parse_args()
    cpp = CpuForms(options.level)
    forms: dict[str, Forms] = {"cpp": cpp, "torch": TorchForms()}
    report: dict[str, Any] = {"benchmark": "cpu_ops", "backend": cpp.name, "threads": torch.get_num_threads(), "results": []}
    report["provenance"], bandwidth = provenance(), copy_bandwidth()
    report["copy_gb_per_s"] = bandwidth / 1e9
    for batch in map(int, options.batches.split(",")):
        for make in cases(batch, options.context):
            case = make()
            found = measure(case, forms, options.seconds)
            floor = case.bytes / bandwidth * 1e6
            row = {
                "op": case.name,
                "batch": batch,
                "bytes": case.bytes,
                "us": found,
                "floor_us": floor,
                "share": floor / found["cpp"],
            }
            report["results"].append(row | {"ratio": found["torch"] / found["cpp"]})
            times = f"cpp {found['cpp']:9.1f} us, torch {found['torch']:9.1f} us, {found['torch'] / found['cpp']:5.2f}x"
            print(
                f"batch {batch:3d} {case.name:28s} {times}; {case.bytes / 2**20:7.2f} MiB, {row['share']:6.1%} of a copy",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
