"""Router, latent down and shared gate-up on a TP8 and a TP16 rank, and the choice of experts. Weights are cold; the router's
logits are warm.

python benchmarks/ops/moe_front.py --json OUT [--quick] [--slices tp8] [--batches 1,64] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import matmuls, stock
from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import COLUMNS
from benchmarks.timing import Case, copies_for
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

SHARED = {"tp8": 768, "tp16": 384}
EXPERTS, LATENT, TOP_K = 896, 3584, 16


def configs(tokens: int, shared: int, quick: bool) -> list[op.Config]:
    first = op.Config(tokens, COLUMNS, EXPERTS, LATENT, shared)
    return matmuls.compared(op, first, tactics(sum(first.rows), (COLUMNS,), tokens), quick, library=False)


def stock_front(s: dict[str, torch.Tensor]) -> Callable[[int], object]:
    """The launches of stock for the same work, one after the other: router, down, gate-up, SiTU."""
    parts = [(key, stock.linear(s["m"], s[key][0]) or (lambda a, w: a @ w.T)) for key in ("router", "down", "gate_up")]
    situ = stock.situ_and_mul()

    def run(i: int) -> None:
        *_, gate_up = (matmul(s["m"], s[key][i]) for key, matmul in parts)
        if situ is not None:
            situ(s["hidden"], gate_up, 4.0, 25.0)

    return run


def front(slices: list[str], batches: list[int], quick: bool) -> Iterator[Case]:
    for slice_ in slices:
        for tokens in batches:
            shared = SHARED[slice_]
            rows = (EXPERTS, LATENT, 2 * shared)
            moved = sum(rows) * COLUMNS * 2 + tokens * (COLUMNS * 2 + EXPERTS * 4 + LATENT * 2 + shared * 2)
            copies = copies_for(moved)
            s = {
                "m": torch.randn(tokens, COLUMNS, device="cuda").bfloat16(),
                "logits": torch.empty(tokens, EXPERTS, device="cuda"),
                "z": torch.empty(tokens, LATENT, device="cuda").bfloat16(),
                "hidden": torch.empty(tokens, shared, device="cuda").bfloat16(),
                **{
                    key: [torch.randn(n, COLUMNS, device="cuda").bfloat16() for _ in range(copies)]
                    for key, n in zip(("router", "down", "gate_up"), rows, strict=True)
                },
            }
            variants: dict[str, Callable[[int], object]] = {"stock (4 launches)": stock_front(s)}
            for config in configs(tokens, shared, quick):
                plan = op.plan(config, build.device_arch())
                variants[matmuls.name(config.tactic)] = lambda i, plan=plan, s=s: op.run(
                    plan, s["m"], s["router"][i], s["down"][i], s["gate_up"][i], s["logits"], s["z"], s["hidden"]
                )
            sizes = {"columns": COLUMNS, "latent": LATENT, "experts": EXPERTS, "shared": shared}
            yield Case({"slice": slice_, "batch": tokens, **sizes}, moved, variants, copies, "stock (4 launches)")
            del s, variants


def topk(batches: list[int]) -> Iterator[Case]:
    for tokens in batches:
        logits, bias = torch.randn(tokens, EXPERTS, device="cuda") * 2, torch.zeros(EXPERTS, device="cuda")
        ids, weights = torch.empty(tokens, TOP_K, device="cuda", dtype=torch.int32), torch.empty(tokens, TOP_K, device="cuda")
        integers = lambda n: torch.zeros(n, device="cuda", dtype=torch.int32)  # noqa: E731
        groups = op.Groups(*map(integers, (EXPERTS + 1, tokens * TOP_K, EXPERTS, 1, 1)))
        plan, listing = (op.topk_plan(op.TopkConfig(tokens, grouped=g), build.device_arch()) for g in (False, True))
        tensors = (logits, bias, integers(1) + tokens, ids, weights)
        variants: dict[str, Callable[[int], object]] = {
            "ours": lambda i, p=plan, x=tensors: op.run_topk(p, *x),
            "ours, pairs grouped": lambda i, p=listing, x=tensors, g=groups: op.run_topk(p, *x, g),
        }
        choose, sort = stock.topk(), stock.sort_pairs()
        if choose and sort:
            variants["stock"] = lambda i, f=choose, x=(logits, bias): f(*x, TOP_K)
            variants["stock, pairs sorted"] = lambda i, f=choose, g=sort, x=(logits, bias): g(f(*x, TOP_K)[1], EXPERTS)
        yield Case({"op": "topk, warm", "batch": tokens}, tokens * (EXPERTS * 4 + TOP_K * 8) + EXPERTS * 4, variants, 1, "stock")


def cases(slices: list[str], batches: list[int], quick: bool) -> Iterator[Case]:
    yield from topk(batches)
    yield from front(slices, batches, quick)


if __name__ == "__main__":
    options = matmuls.options("moe_front", SHARED).parse_args()
    slices, batches = options.slices.split(","), matmuls.batches(options)
    every = [c for n in slices for t in batches for c in configs(t, SHARED[n], options.quick)]
    arch = options.compile or build.device_arch()
    compile_all([op.topk_spec(op.TopkConfig(t, grouped=g)) for t in batches for g in (False, True)], arch)
    shape = ("columns", "latent", "experts", "shared")
    matmuls.run("moe_front", options, every, op.spec, cases(slices, batches, options.quick), shape)
