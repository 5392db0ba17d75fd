"""Output projection, sum over ranks and prefix update: one launch beside cuBLAS, an all-reduce and an addition. Weights are cold.

python benchmarks/ops/oproj.py --json OUT [--ranks N] [--quick] [--compile ARCH]

Without `--ranks` it measures the product and the update of one rank alone (the sum over ranks left out, for both). With it, N
processes on N GPUs hold the shares of a TP-N deployment whose ranks have the columns of TP8 (so the bytes of one rank are TP8's),
and rank 0 reports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops.ahead import compile_all
from benchmarks.ops.projection import name as tactic_name
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.comm import Mailbox
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops import oproj as op
from vllm.model_executor.models.kimi_k3_fast.ops.skinny import tactics

ROWS = 7168
COLUMNS = {"tp8": 1536, "tp16": 768, "tp1": 12288}
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def name(config: op.Config) -> str:
    shots = "" if config.world == 1 else f"{2 if config.two_shot else 1}-shot "
    return shots + tactic_name(config.shape.tactic)


def configs(tokens: int, columns: int, world: int, quick: bool) -> list[op.Config]:
    """With ranks: both numbers of shots with the default tactic. Alone: several tactics, most at batch 1 and 8."""
    if world > 1:
        every = [op.Config(tokens, ROWS, columns, world, shots=shots) for shots in (1, 2)]
    else:
        found = tactics(ROWS, (columns,), tokens)
        wanted = 1 if quick else 12 if tokens in (1, 8) else 8
        every = [op.Config(tokens, ROWS, columns, tactic=tactic) for tactic in found[:wanted]]
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


def cases(world: int, rank: int, quick: bool) -> Iterator[Case]:
    device = torch.device("cuda", rank)
    reducers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"cublas + add": lambda y: y}
    box = None
    if world > 1:
        import torch.distributed as dist

        box = Mailbox(dist.group.WORLD, max(c.words for t in BATCHES for c in configs(t, COLUMNS["tp8"], world, quick)), device)
        nccl = dist.new_group(backend="nccl")
        reducers = {"cublas + nccl + add": lambda y: (dist.all_reduce(y, group=nccl), y)[1]}
        custom = custom_all_reduce(device)
        if custom:
            reducers["cublas + stock all-reduce + add"] = custom
    for slice_, columns in {"tp8": COLUMNS["tp8"]}.items() if world > 1 else COLUMNS.items():
        for tokens in BATCHES:
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
            yield Case({"slice": slice_, "ranks": world, "batch": tokens}, moved, variants, copies, baseline)
    if box:
        box.health().check()


def one_rank(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    with contextlib.ExitStack() as stack:
        if rank:  # rank 0 reports
            options.json = None
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        main("oproj", cases(world, rank, options.quick), options)
    dist.barrier()


if __name__ == "__main__":
    parser = arguments("oproj")
    parser.add_argument("--ranks", type=int, default=1, help="processes, one for each GPU, that sum over mailboxes")
    parser.add_argument("--quick", action="store_true", help="only the default tactic")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    shapes = [COLUMNS["tp8"]] if options.ranks > 1 else list(COLUMNS.values())
    every = [op.spec(c) for columns in shapes for t in BATCHES for c in configs(t, columns, options.ranks, options.quick)]
    compile_all(every, options.compile or build.device_arch())  # ranks shall not all compile the same
    if options.compile:
        sys.exit()
    if options.ranks == 1:
        main("oproj", cases(1, 0, options.quick), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(one_rank, (options.ranks, folder, options), nprocs=options.ranks)
