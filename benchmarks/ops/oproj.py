"""Output projection, sum over ranks and prefix update: one launch beside cuBLAS, an all-reduce and an addition. Weights are cold.

python benchmarks/ops/oproj.py --json OUT [--ranks N] [--quick] [--slices tp8] [--batches 1,64] [--compile ARCH]

Without `--ranks` it measures the product and the update of one rank alone (the sum over ranks left out, for both). With it, N
processes on N GPUs hold the shares of a TP-N deployment whose ranks have the columns of TP8 (so the bytes of one rank are TP8's),
and rank 0 reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import matmuls, ranks
from benchmarks.timing import Case, copies_for
from vllm.model_executor.models.kimi_k3_fast.comm import Mailbox
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import oproj as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

ROWS = 7168
COLUMNS = {"tp8": 1536, "tp16": 768, "tp1": 12288}
BATCHES = matmuls.BATCHES


def name(config: op.Config) -> str:
    shots = "" if config.world == 1 else f"{2 if config.two_shot else 1}-shot "
    return shots + matmuls.name(config.chosen)


def configs(tokens: int, columns: int, world: int, quick: bool) -> list[op.Config]:
    """With ranks: both numbers of shots with the tactic that is served. Alone: several tactics, most at batch 1 and 8."""
    if world == 1:
        return matmuls.compared(op, op.Config(tokens, ROWS, columns), tactics(ROWS, (columns,), tokens), quick)
    every = [op.Config(tokens, ROWS, columns, world, shots=shots) for shots in (1, 2)]
    return [config for config in every if op.unavailable_reason(config, "sm_90a") is None]


def custom_all_reduce(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """vLLM's own kernel for small all-reduces, where this process can make one."""
    try:
        import torch.distributed as dist
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        made = CustomAllreduce(group=dist.group.WORLD, device=device)
        return None if made.disabled else lambda x: made.all_reduce(x, registered=False)
    except Exception as error:  # vLLM is not installed whole, or refuses these devices
        print(f"stock custom all-reduce is not here: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def plain(reduce: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor, w: list[torch.Tensor], prefix: torch.Tensor) -> Any:
    """The standard path's three steps over weight copy i."""
    y = torch.empty(a.shape[0], ROWS, device=a.device, dtype=a.dtype)

    def run(i: int) -> None:
        torch.mm(a, w[i].T, out=y)
        prefix.add_(reduce(y))

    return run


def cases(world: int, rank: int, slices: list[str], batches: list[int], quick: bool) -> Iterator[Case]:
    device = torch.device("cuda", rank)
    reducers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"stock cublas + add": lambda y: y}
    box = None
    if world > 1:
        import torch.distributed as dist

        box = Mailbox(dist.group.WORLD, max(c.words for t in batches for c in configs(t, COLUMNS["tp8"], world, quick)), device)
        nccl = dist.new_group(backend="nccl")
        reducers = {"stock cublas + nccl + add": lambda y: (dist.all_reduce(y, group=nccl), y)[1]}
        custom = custom_all_reduce(device)
        if custom:
            reducers["stock cublas + all-reduce + add"] = custom
    for slice_ in ["tp8"] if world > 1 else slices:
        for tokens in batches:
            columns = COLUMNS[slice_]
            copies = copies_for(ROWS * columns * 2)
            w = [torch.randn(ROWS, columns, device=device).bfloat16() for _ in range(copies)]
            a = torch.randn(tokens, columns, device=device).bfloat16()
            prefix = torch.zeros(tokens, ROWS, device=device).bfloat16()
            variants = {label: plain(reduce, a, w, prefix) for label, reduce in reducers.items()}
            baseline = list(variants)[-1]
            for config in configs(tokens, columns, world, quick):
                plan = op.plan(config, build.device_arch())
                variants[name(config)] = lambda i, plan=plan, a=a, w=w, p=prefix: op.run(plan, a, w[i], p, box)
            moved = (ROWS * columns + tokens * (2 * ROWS + columns)) * 2
            label = {"slice": slice_, "ranks": world, "batch": tokens, "rows": ROWS, "columns": columns}
            yield Case(label, moved, variants, copies, baseline)
    if box:
        box.health().check()


if __name__ == "__main__":
    parser = matmuls.options("oproj", COLUMNS)
    parser.add_argument("--ranks", type=int, default=1, help="processes, one for each GPU, that sum over mailboxes")
    options = parser.parse_args()
    slices, batches = options.slices.split(",") if options.ranks == 1 else ["tp8"], matmuls.batches(options)
    every = [c for n in slices for t in batches for c in configs(t, COLUMNS[n], options.ranks, options.quick)]
    if options.ranks == 1:
        measured = cases(1, 0, slices, batches, options.quick)
        matmuls.run("oproj", options, every, op.spec, measured, ("rows", "columns"))
        sys.exit()
    specs = [spec for config in every if (spec := op.spec(config))]
    ranks.run("oproj", specs, partial(cases, slices=slices, batches=batches, quick=options.quick), options)
