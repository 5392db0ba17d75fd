"""The end of a LatentMoE layer on a TP8 and a TP16 rank: norm, up-projection and shared down-projection. Weights are cold.

python benchmarks/ops/moe_tail.py --json OUT [--quick] [--slices tp8] [--batches 1,64] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import matmuls, stock
from benchmarks.timing import Case, copies_for
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_tail as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

SHARED = {"tp8": 768, "tp16": 384}
ROWS, LATENT = 7168, 3584


def configs(tokens: int, shared: int, quick: bool) -> list[op.Config]:
    return matmuls.compared(op, op.Config(tokens, ROWS, LATENT, shared), tactics(ROWS, (LATENT, shared), tokens), quick)


def stock_tail(s: dict[str, torch.Tensor]) -> Callable[[int], object] | None:
    """vLLM's launches for the same work: norm, up, shared down, add."""
    norm, up, down = stock.rms_norm(), stock.linear(s["r"], s["up"][0]), stock.linear(s["hidden"], s["down"][0])
    if norm is None:
        return None
    matmul_up = up or (lambda a, w: a @ w.T)
    matmul_down = down or (lambda a, w: a @ w.T)
    normed = torch.empty_like(s["r"])

    def run(i: int) -> None:
        norm(normed, s["r"], s["norm"], 1e-5)
        torch.add(matmul_up(normed, s["up"][i]), matmul_down(s["hidden"], s["down"][i]), out=s["delta"])

    return run


def cases(slices: list[str], batches: list[int], quick: bool) -> Iterator[Case]:
    for slice_ in slices:
        for tokens in batches:
            shared = SHARED[slice_]
            moved = ROWS * (LATENT + shared) * 2 + tokens * (LATENT + shared + ROWS) * 2
            copies = copies_for(moved)
            s = {
                "r": torch.randn(tokens, LATENT, device="cuda").bfloat16(),
                "hidden": torch.randn(tokens, shared, device="cuda").bfloat16(),
                "norm": torch.ones(LATENT, device="cuda").bfloat16(),
                "delta": torch.empty(tokens, ROWS, device="cuda").bfloat16(),
                "up": [torch.randn(ROWS, LATENT, device="cuda").bfloat16() for _ in range(copies)],
                "down": [torch.randn(ROWS, shared, device="cuda").bfloat16() for _ in range(copies)],
            }
            variants: dict[str, Callable[[int], object]] = {}
            incumbent = stock_tail(s)
            if incumbent:
                variants["stock (4 launches)"] = incumbent
            for config in configs(tokens, shared, quick):
                plan = op.plan(config, build.device_arch())
                scratch = {n: torch.empty(shape, device="cuda").bfloat16() for n, (shape, _) in plan.scratch_shapes().items()}
                variants[matmuls.name(config.tactic)] = lambda i, plan=plan, s=s, scratch=scratch: op.run(
                    plan, s["r"], s["hidden"], s["norm"], s["up"][i], s["down"][i], s["delta"], scratch
                )
            label = {"slice": slice_, "batch": tokens, "rows": ROWS, "latent": LATENT, "shared": shared, "world": 1}
            yield Case(label, moved, variants, copies, "stock (4 launches)")
            del s, variants, incumbent


if __name__ == "__main__":
    options = matmuls.options("moe_tail", SHARED).parse_args()
    slices, batches = options.slices.split(","), matmuls.batches(options)
    every = [c for n in slices for t in batches for c in configs(t, SHARED[n], options.quick)]
    matmuls.run("moe_tail", options, every, op.spec, cases(slices, batches, options.quick), ("rows", "latent", "shared", "world"))
