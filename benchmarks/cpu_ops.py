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
from vllm.model_executor.models.kimi_k3_fast.model import kda as equations
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


def kda_weights() -> KdaWeights:
    conv, f_b = torch.randn(3 * HEADS * DIM, 4), torch.randn(HEADS * DIM, DIM, dtype=BF16)
    return KdaWeights(conv, f_b, torch.ones(HEADS, 1), torch.randn(HEADS, DIM), torch.ones(DIM), -5.0)


def kda(tokens: int) -> Case:
    width, w = HEADS * DIM, kda_weights()
    packed, slots = torch.randn(tokens, 4 * width + DIM + HEADS, dtype=BF16), torch.arange(tokens) + 1
    state = tokens * width * DIM * 4
    moved = 2 * state + 2 * tokens * 9 * width * 2 + size(packed, w.f_b, w.conv)

    def make() -> Callable[[Forms], Any]:
        conv_state, states = torch.randn(tokens + 1, 3, 3 * width, dtype=BF16), torch.zeros(tokens + 1, HEADS, DIM, DIM)
        return lambda ops: ops.kda_step(packed, conv_state, states, slots, w, BF16)

    return rotated("kda", moved, make)


def kda_prompt(tokens: int) -> Case:
    """A prompt of one request, from a zero state, against the chunks of the standard path."""
    width, w = HEADS * DIM, kda_weights()
    packed, slots = torch.randn(tokens, 4 * width + DIM + HEADS, dtype=BF16), torch.ones(1, dtype=torch.long)
    conv_state, state = torch.zeros(2, 3, 3 * width, dtype=BF16), torch.zeros(2, HEADS, DIM, DIM)
    starts, resumed = torch.tensor([0, tokens]), torch.zeros(1, dtype=torch.bool)

    def standard() -> torch.Tensor:
        qkv, gate, f_a, beta = packed.split([3 * width, width, DIM, HEADS], dim=1)
        heads = lambda x: x.unflatten(-1, (HEADS, DIM))  # noqa: E731
        g = equations.log_decay(heads(torch.nn.functional.linear(f_a, w.f_b)), torch.zeros(HEADS), w.dt_bias, -5.0)
        mixed, conv_state[1] = equations.short_conv(qkv, torch.zeros_like(conv_state[1]), w.conv)
        q, k, v = (heads(x) for x in mixed.chunk(3, dim=-1))
        o, state[1] = equations.chunked(
            *equations.normalise(q, k), v.float(), g, beta.float().sigmoid(), torch.zeros_like(state[1])
        )
        return equations.gated_norm(o.to(BF16), heads(gate), w.out_norm)

    def call(ops: Forms) -> torch.Tensor:
        if isinstance(ops, CpuForms):
            return ops.kda_prompt(packed, conv_state, state, slots, starts, resumed, w, BF16)
        return standard()

    moved = size(packed, w.f_b, w.conv) + 2 * tokens * width + 2 * width * DIM * 4
    return Case(f"kda prompt of {tokens}", moved, [call, call])  # the inputs are read once


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


def prompts() -> list[Callable[[], Case]]:
    return [lambda n=n: kda_prompt(n) for n in (64, 512)]  # type: ignore[misc]


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


def plot(report: dict[str, Any], file: Path) -> None:
    """Share of the copy's bandwidth of every operator of a decode step, a bar for each batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["results"] if "prompt" not in row["op"]]
    batches = sorted({row["batch"] for row in rows})
    names = list(dict.fromkeys(row["op"].partition(",")[0] for row in rows))
    shares = {(row["op"].partition(",")[0], row["batch"]): row["share"] for row in rows}
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for place, batch in enumerate(batches):
        at = [i + (place - (len(batches) - 1) / 2) * 0.8 / len(batches) for i in range(len(names))]
        heights = [shares.get((name, batch), 0.0) for name in names]
        axes.barh(at, heights, 0.75 / len(batches), label=f"batch {batch}", color=pyplot.cm.Blues_r(0.15 + 0.2 * place))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("bytes that must move, over time, against a copy in the same process (1 is the copy)")
    axes.set_title(f"{report['backend']}, {report['provenance']['cpu']}, {report['threads']} threads", fontsize=10)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


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
    batches = [(batch, cases(batch, options.context)) for batch in map(int, options.batches.split(","))]
    for batch, made in [*batches, (1, prompts())]:
        for make in made:
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
    plot(report, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
