"""Routed MXFP4 experts: w13, w2 and both, every tactic side by side, at the shapes of TP8 and TP16 ranks.

    python benchmarks/ops/experts.py --json OUT [--tp 8,16] [--batches 1,2,4,8,16,32,64]
    ncu --set full --clock-control none python benchmarks/ops/experts.py --once w13 --batches 8 [--tp 8]

`--once` launches one part three times with the default tactic, with nothing around it, for a profiler.

One layer's experts (2 GB for a TP8 rank) stay; every call of a graph routes its tokens to other experts, drawn evenly, so
weights come from memory as they do in a model. `moved`: codes and scales of the distinct experts of a call, on average.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ahead import compile_all
from timing import Case, arguments, main

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import experts as op
from vllm.model_executor.models.kimi_k3_fast.ops.experts import reference
from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights

ROUTINGS = 24  # as many calls as one graph holds: no call meets the experts of the last one in the cache


def draw_weights(config: op.Config) -> Weights:
    e, length, width = config.experts, config.hidden, config.width

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return Weights(
        draw(0, 256, e, 2 * width, length // 2),
        draw(118, 124, e, 2 * width, length // 32),
        draw(0, 256, e, length, width // 2),
        draw(118, 124, e, length, width // 32),
    )


def draw_routings(config: op.Config) -> list[op.Routing]:
    routings = []
    for _ in range(ROUTINGS):
        ids = torch.rand(config.tokens, config.experts, device="cuda").topk(config.top_k).indices.int()
        weights = torch.softmax(torch.rand(config.tokens, config.top_k, device="cuda"), dim=1)
        routings.append(reference.group(config, ids, weights, config.tokens))
    return routings


def call(i: int, plan: op.Plan, part: str, tensors: tuple, routings: list[op.Routing]) -> None:
    """One call of a part with routing i."""
    weights, z, scratch, out = tensors
    if part != "w2":
        op.run_w13(plan, weights, z, routings[i], scratch)
    if part != "w13":
        op.run_w2(plan, weights, routings[i], scratch, out)


def cases(tps: list[int], batches: list[int]) -> Iterator[Case]:
    arch = build.device_arch()
    for tp in tps:
        weights = draw_weights(op.Config(1, width=3072 // tp))
        for batch in batches:
            config = op.Config(batch, width=3072 // tp)
            routings = draw_routings(config)
            z = torch.randn(batch, config.hidden, device="cuda").bfloat16()
            scratch = op.Scratch(
                torch.zeros(config.pairs, config.width, dtype=torch.bfloat16, device="cuda"),
            )
            out = torch.zeros_like(z)
            distinct = sum(int(routing.num_active) for routing in routings) / ROUTINGS
            row_bytes = config.hidden // 2 + config.hidden // 32
            parts = {"w13": 2 * config.width * row_bytes, "w2": config.width * row_bytes, "both": 3 * config.width * row_bytes}
            for part, expert_bytes in parts.items():
                variants = {}
                for tactic in op.tactics(config):
                    plan = op.plan(config, arch, tactic)
                    tensors = (weights, z, scratch, out)
                    variants[str(tactic)] = partial(call, plan=plan, part=part, tensors=tensors, routings=routings)
                label = {"tp": tp, "batch": batch, "part": part, "experts": round(distinct, 1)}
                yield Case(label, round(distinct * expert_bytes), variants, copies=ROUTINGS)


def once(part: str, tp: int, batch: int) -> None:
    """Three launches with different experts."""
    config = op.Config(batch, width=3072 // tp)
    plan = op.plan(config, build.device_arch())
    z = torch.randn(batch, config.hidden, device="cuda").bfloat16()
    scratch = op.Scratch(torch.zeros(config.pairs, config.width, dtype=torch.bfloat16, device="cuda"))
    tensors, routings = (draw_weights(config), z, scratch, torch.zeros_like(z)), draw_routings(config)
    torch.cuda.synchronize()
    for i in range(3):
        call(i, plan, part, tensors, routings)
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = arguments("experts")
    parser.add_argument("--tp", default="8,16")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--once", choices=("w13", "w2", "both"), help="launch a part three times, for a profiler")
    options = parser.parse_args()
    numbers = [[int(n) for n in text.split(",")] for text in (options.tp, options.batches)]
    if options.once:
        once(options.once, numbers[0][0], numbers[1][0])
    else:
        configs = [op.Config(batch, width=3072 // tp) for tp in numbers[0] for batch in numbers[1]]
        specs = [spec for c in configs for tactic in op.tactics(c) for spec in op.specs_for(c, tactic)]
        compile_all(dict.fromkeys(specs), build.device_arch())
        main("experts", cases(*numbers), options)
