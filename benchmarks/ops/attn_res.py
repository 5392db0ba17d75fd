"""AttnRes with the norm that follows: nine and two sources, clusters of different sizes, beside stock. Sources are cold: a
layer's weights pass through the cache between two uses.

    python benchmarks/ops/attn_res.py --json OUT [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import BATCHES, COLUMNS
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import attn_res as op
from vllm.model_executor.models.kimi_k3_fast.ops import build

CLUSTERS = (2, 4, 7, 8)


def config(tokens: int, prev: int, blocks: int) -> op.Config:
    return op.Config(tokens, COLUMNS, prev, True, blocks=blocks)


def cases() -> Iterator[Case]:
    for prev in (8, 1):
        for tokens in BATCHES:
            moved = tokens * COLUMNS * 2 * (prev + 1 + 1 + 2)  # sources and delta in, prefix and out
            copies = copies_for(moved)
            score, norm = torch.randn(COLUMNS, device="cuda"), torch.ones(COLUMNS, device="cuda").bfloat16()
            qk = score.bfloat16()
            sets = []
            for _ in range(copies):
                prefix, delta, out = (torch.randn(64, COLUMNS, device="cuda").bfloat16() for _ in range(3))
                sets.append((delta[:tokens], torch.randn(8, 64, COLUMNS, device="cuda").bfloat16(), prefix, out[:tokens]))
            variants: dict[str, Callable[[int], object]] = {}
            incumbent = stock.attn_res()
            if incumbent:

                def run(i: int, f=incumbent, sets=sets, norm=norm, qk=qk, prev=prev, tokens=tokens) -> object:
                    delta, blocks, prefix, _ = sets[i]
                    return f(prefix[:tokens], delta, blocks.transpose(0, 1)[:tokens], norm, qk, norm, prev, -1, 1e-5, 1e-5)

                variants["stock"] = run
            for blocks in CLUSTERS:
                plan = op.plan(config(tokens, prev, blocks), build.device_arch())
                variants[f"cluster {blocks}"] = lambda i, plan=plan, sets=sets, score=score, norm=norm: op.run(
                    plan, score, norm, *sets[i]
                )
            yield Case({"sources": prev + 1, "batch": tokens}, moved, variants, copies, "stock")
            del sets, variants


if __name__ == "__main__":
    parser = arguments("attn_res")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        specs = [op.spec(config(t, prev, blocks)) for t in BATCHES for prev in (8, 1) for blocks in CLUSTERS]
        compile_all(specs, options.compile)
    else:
        main("attn_res", cases(), options)
