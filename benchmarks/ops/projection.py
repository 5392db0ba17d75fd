"""Projections of a TP8 and a TP16 rank: what is served and other tactics beside cuBLAS and vLLM's skinny GEMM. Weights are cold.

python benchmarks/ops/projection.py --json OUT [--quick] [--slices tp8] [--matrices in_proj] [--batches 1,64] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import matmuls, stock
from benchmarks.timing import Case, copies_for
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import projection as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

COLUMNS = 7168
BATCHES = matmuls.BATCHES
MATRICES = {  # rows, columns: KDA's and MLA's input, the attention's output, MLA's second query projection (above 16 tokens)
    "tp8": {"in_proj": (6288, COLUMNS), "mla_in": (3648, COLUMNS), "o_proj": (7168, 1536), "q_b": (2304, 1536)},
    "tp16": {"in_proj": (3216, COLUMNS), "mla_in": (2880, COLUMNS), "o_proj": (7168, 768), "q_b": (1152, 1536)},
}
Problem = tuple[str, str, int, int, int]  # slice, matrix, rows, columns, tokens


def configs(tokens: int, rows: int, columns: int, quick: bool) -> list[op.Config]:
    return matmuls.compared(op, op.Config(tokens, rows, columns), tactics(rows, (columns,), tokens), quick)


def cases(problems: list[Problem], quick: bool) -> Iterator[Case]:
    for slice_, matrix, rows, columns, tokens in problems:
        copies = copies_for(rows * columns * 2)
        w = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(copies)]
        a = torch.randn(tokens, columns, device="cuda").bfloat16()
        y = torch.empty(tokens, rows, device="cuda").bfloat16()
        variants = {"stock cublas": lambda i, a=a, w=w, y=y: torch.mm(a, w[i].T, out=y)}
        skinny = stock.linear(a, w[0])
        if skinny:
            variants["stock skinny"] = lambda i, a=a, w=w, skinny=skinny: skinny(a, w[i])
        for config in configs(tokens, rows, columns, quick):
            plan = op.plan(config, build.device_arch())
            variants[matmuls.name(config.tactic)] = lambda i, plan=plan, a=a, w=w, y=y: op.run(plan, a, w[i], y)
        moved = rows * columns * 2 + tokens * (rows + columns) * 2
        label = {"slice": slice_, "matrix": matrix, "batch": tokens, "rows": rows, "columns": columns}
        yield Case(label, moved, variants, copies, "stock skinny" if skinny else "stock cublas")
        del w, variants


if __name__ == "__main__":
    parser = matmuls.options("projection", MATRICES)
    parser.add_argument("--matrices", default="in_proj,mla_in,o_proj", help="of in_proj, mla_in, o_proj, q_b, by commas")
    options = parser.parse_args()
    problems = [
        (slice_, matrix, *MATRICES[slice_][matrix], tokens)
        for slice_ in options.slices.split(",")
        for matrix in options.matrices.split(",")
        for tokens in matmuls.batches(options)
    ]
    every = [c for *_, rows, columns, t in problems for c in configs(t, rows, columns, options.quick)]
    matmuls.run("projection", options, every, op.spec, cases(problems, options.quick), ("rows", "columns"))
