"""The end of a LatentMoE layer on a TP8 and a TP16 rank: norm, up-projection and shared down-projection. Weights are cold.

python benchmarks/ops/moe_tail.py --json OUT [--quick] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import BATCHES, name
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_tail as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

SHARED = {"tp8": 768, "tp16": 384}
ROWS, LATENT = 7168, 3584


def configs(tokens: int, shared: int, quick: bool) -> list[op.Config]:
    every = tactics(ROWS, (LATENT, shared), tokens)
    chosen = every[: 1 if quick else 12 if tokens in (1, 8) else 8]
    return [op.Config(tokens, ROWS, LATENT, shared, tactic=tactic) for tactic in chosen]


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


def cases(quick: bool) -> Iterator[Case]:
    for slice_, shared in SHARED.items():
        for tokens in BATCHES:
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
                variants[name(config.tactic)] = lambda i, plan=plan, s=s: op.run(
                    plan, s["r"], s["hidden"], s["norm"], s["up"][i], s["down"][i], s["delta"]
                )
            yield Case({"slice": slice_, "batch": tokens}, moved, variants, copies, "stock (4 launches)")
            del s, variants, incumbent


if __name__ == "__main__":
    parser = arguments("moe_tail")
    parser.add_argument("--quick", action="store_true", help="only the default tactic")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        compile_all((op.spec(c) for n in SHARED.values() for t in BATCHES for c in configs(t, n, options.quick)), options.compile)
    else:
        main("moe_tail", cases(options.quick), options)
