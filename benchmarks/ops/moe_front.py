"""Router, latent down and shared gate-up on a TP8 and a TP16 rank, and the choice of experts. Weights are cold; the router's
logits are warm.

python benchmarks/ops/moe_front.py --json OUT [--quick] [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import stock
from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import BATCHES, COLUMNS, name
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import moe_front as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

SHARED = {"tp8": 768, "tp16": 384}
EXPERTS, LATENT, TOP_K = 896, 3584, 16


def configs(tokens: int, shared: int, quick: bool) -> list[op.Config]:
    first = op.Config(tokens, COLUMNS, EXPERTS, LATENT, shared)
    others = [op.Config(tokens, COLUMNS, EXPERTS, LATENT, shared, tactic=t) for t in tactics(sum(first.rows), (COLUMNS,), tokens)]
    usable = [c for c in others if op.unavailable_reason(c, "sm_90a") is None and c.shape.tactic != first.shape.tactic]
    return [first, *usable[: 0 if quick else 11 if tokens in (1, 8) else 7]]


def stock_front(s: dict[str, torch.Tensor]) -> Callable[[int], object]:
    """The launches of stock for the same work, one after the other: router, down, gate-up, SiTU."""
    parts = [(key, stock.linear(s["m"], s[key][0]) or (lambda a, w: a @ w.T)) for key in ("router", "down", "gate_up")]
    situ = stock.situ_and_mul()

    def run(i: int) -> None:
        *_, gate_up = (matmul(s["m"], s[key][i]) for key, matmul in parts)
        if situ is not None:
            situ(s["hidden"], gate_up, 4.0, 25.0)

    return run


def front(quick: bool) -> Iterator[Case]:
    for slice_, shared in SHARED.items():
        for tokens in BATCHES:
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
                variants[name(config.shape.tactic)] = lambda i, plan=plan, s=s: op.run(
                    plan, s["m"], s["router"][i], s["down"][i], s["gate_up"][i], s["logits"], s["z"], s["hidden"]
                )
            yield Case({"op": "front", "slice": slice_, "batch": tokens}, moved, variants, copies, "stock (4 launches)")
            del s, variants


def topk() -> Iterator[Case]:
    for tokens in BATCHES:
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
        incumbent = stock.topk()
        if incumbent:
            variants["stock"] = lambda i, g=incumbent, x=(logits, bias): g(*x, TOP_K)
        yield Case({"op": "topk, warm", "batch": tokens}, tokens * (EXPERTS * 4 + TOP_K * 8) + EXPERTS * 4, variants, 1, "stock")


def cases(quick: bool) -> Iterator[Case]:
    yield from topk()
    yield from front(quick)


if __name__ == "__main__":
    parser = arguments("moe_front")
    parser.add_argument("--quick", action="store_true", help="only the default tactic")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        specs = [op.topk_spec(op.TopkConfig(t, grouped=g)) for t in BATCHES for g in (False, True)]
        specs += [op.spec(c) for n in SHARED.values() for t in BATCHES for c in configs(t, n, options.quick)]
        compile_all(specs, options.compile)
    else:
        main("moe_front", cases(options.quick), options)
