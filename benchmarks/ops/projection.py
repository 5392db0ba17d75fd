"""Input projections of a TP8 and a TP16 rank: every tactic worth measuring beside cuBLAS and vLLM's skinny GEMM. Weights are
cold.

python benchmarks/ops/projection.py --json OUT [--quick] [--compile]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import projection as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import Tactic, tactics

COLUMNS = 7168
SHAPES = {"tp8": (6288, COLUMNS), "tp8 o_proj": (7168, 1536), "tp16": (3216, COLUMNS)}  # rows, columns
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def name(tactic: Tactic) -> str:
    t = tactic
    if t.chunk:
        return f"ring c{t.chunk} m{t.stages} f{t.fetchers} s{t.splits} {t.row_warps}x{t.k_warps}w"
    last = f"m{t.stages}" if t.stages else f"d{t.depth}"
    return f"g{t.groups} s{t.splits} {t.row_warps}x{t.k_warps}w t{t.tiles} {last}"


def configs(tokens: int, rows: int, columns: int, quick: bool) -> list[op.Config]:
    """Few for the batches between, more for batch 1 and 8."""
    every = tactics(rows, (columns,), tokens)
    chosen = every[: 1 if quick else 12 if tokens in (1, 8) else 8]
    return [op.Config(tokens, rows, columns, tactic=tactic) for tactic in chosen]


def cases(quick: bool) -> Iterator[Case]:
    for slice_, (rows, columns) in SHAPES.items():
        for tokens in BATCHES:
            copies = copies_for(rows * columns * 2)
            w = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(copies)]
            a = torch.randn(tokens, columns, device="cuda").bfloat16()
            y = torch.empty(tokens, rows, device="cuda").bfloat16()
            variants = {"cublas": lambda i, a=a, w=w, y=y: torch.mm(a, w[i].T, out=y)}
            skinny = stock.linear(a, w[0])
            if skinny:
                variants["stock skinny"] = lambda i, a=a, w=w, skinny=skinny: skinny(a, w[i])
            for config in configs(tokens, rows, columns, quick):
                plan = op.plan(config, build.device_arch())
                variants[name(config.tactic)] = lambda i, plan=plan, a=a, w=w, y=y: op.run(plan, a, w[i], y)
            moved = rows * columns * 2 + tokens * (rows + columns) * 2
            yield Case({"slice": slice_, "batch": tokens}, moved, variants, copies, "stock skinny" if skinny else "cublas")
            del w, variants


if __name__ == "__main__":
    parser = arguments("projection")
    parser.add_argument("--quick", action="store_true", help="only the default tactic")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        compile_all(
            (op.spec(c) for n, k in SHAPES.values() for t in BATCHES for c in configs(t, n, k, options.quick)), options.compile
        )
    else:
        main("projection", cases(options.quick), options)
