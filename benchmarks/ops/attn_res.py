"""AttnRes with the norm that follows: nine, five and two sources, clusters of different sizes and warps for a source, beside
stock. Sources are cold: a layer's weights pass through the cache between two uses.

    python benchmarks/ops/attn_res.py --json OUT [--tactics FILE] [--sources 9 2] [--batches 1 64] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock, winners
from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import BATCHES, COLUMNS
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import attn_res as op
from vllm.model_executor.models.kimi_k3_fast.ops import build

CUTS = ((4, 1), (4, 2), (4, 4), (7, 1), (7, 2), (7, 4))  # blocks of a cluster, warps of a block that share a source
ROWS = 64  # of the buffers, as served: the sources of a token lie 64 rows apart
SHAPE = ("sources", "columns", "tokens")


def configs(tokens: int, sources: int, arch: str) -> list[op.Config]:
    every = [op.Config(tokens, COLUMNS, sources - 1, True, closed=sources - 1, rows=ROWS, blocks=b, parts=p) for b, p in CUTS]
    return [config for config in every if op.unavailable_reason(config, arch) is None]


def name(blocks: int | None, parts: int | None) -> str:
    return f"cluster {blocks}, {parts} warps"


def cases(sources: list[int], batches: list[int]) -> Iterator[Case]:
    for prev in (count - 1 for count in sources):
        for tokens in batches:
            moved = tokens * COLUMNS * 2 * (prev + 1 + 1 + 2)  # sources and delta in, prefix and out
            copies = copies_for(moved, cap=1024)  # a row alone is small: hundreds of copies, or all of it stays in the L2 cache
            score, norm = torch.randn(COLUMNS, device="cuda"), torch.ones(COLUMNS, device="cuda").bfloat16()
            qk = score.bfloat16()
            blocks = torch.empty(copies, prev, ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16).normal_()
            flat = torch.empty(3, copies, ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16).normal_()
            sets = [(flat[0, i, :tokens], blocks[i], flat[1, i], flat[2, i, :tokens]) for i in range(copies)]
            variants: dict[str, Callable[[int], object]] = {}
            incumbent = stock.attn_res()
            if incumbent:

                def run(i: int, f=incumbent, sets=sets, norm=norm, qk=qk, prev=prev, tokens=tokens) -> object:
                    delta, blocks, prefix, _ = sets[i]
                    return f(prefix[:tokens], delta, blocks.transpose(0, 1)[:tokens], norm, qk, norm, prev, -1, 1e-5, 1e-5)

                variants["stock"] = run
            for config in configs(tokens, prev + 1, build.device_arch()):
                plan = op.plan(config, build.device_arch())
                variants[name(config.blocks, config.parts)] = lambda i, plan=plan, sets=sets, score=score, norm=norm: op.run(
                    plan, score, norm, *sets[i]
                )
            yield Case({"sources": prev + 1, "columns": COLUMNS, "tokens": tokens}, moved, variants, copies, "stock")
            del sets, variants, blocks, flat


if __name__ == "__main__":
    parser = arguments("attn_res")
    parser.add_argument("--sources", type=int, nargs="*", default=[9, 5, 2], help="closed blocks and the prefix")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--tactics", type=Path, help="write the fastest numbers of blocks to this table")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    arch = options.compile or build.device_arch()
    compile_all([op.spec(c) for t in options.batches for s in options.sources for c in configs(t, s, arch)], arch)
    if options.compile:
        sys.exit()
    timings = main("attn_res", cases(options.sources, options.batches), options)
    if options.tactics:
        winners.write(
            options.tactics, arch, timings, {name(b, p): {"blocks": b, "parts": p} for b, p in CUTS}, SHAPE, options.commit
        )
