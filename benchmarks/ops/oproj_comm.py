"""The sum of a hidden state over ranks: mailboxes in one and two shots beside NCCL, PyTorch's symmetric memory and vLLM's kernel.

    python benchmarks/ops/oproj_comm.py --json OUT [--ranks 2] [--compile ARCH]

One process a GPU; graph replay; rank 0 reports. `moved` is the activation's size on one rank, so GB/s is a rate of useful bytes.
The data is warm: it was just written by the product before. `oproj.py --ranks` times the exchange inside the product's launch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops import ranks
from benchmarks.ops.oproj import BATCHES, ROWS, custom_all_reduce
from benchmarks.timing import Case, arguments
from vllm.model_executor.models.kimi_k3_fast.comm import Mailbox
from vllm.model_executor.models.kimi_k3_fast.ops import all_reduce as op
from vllm.model_executor.models.kimi_k3_fast.ops import build


def configs(tokens: int, world: int) -> list[op.Config]:
    every = [op.Config(tokens, ROWS, world, shots, threads=threads) for shots in (1, 2) for threads in (256, 512)]
    return [c for c in every if op.unavailable_reason(c, "sm_90a") is None]


def symmetric(x: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """PyTorch's one-shot and two-shot kernels over symmetric memory, where it has them."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    shared = memory.empty(x.shape, dtype=x.dtype, device=x.device)
    memory.rendezvous(shared, dist.group.WORLD)
    shared.zero_()
    name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    return {
        "torch symmetric one-shot": lambda i: ops.one_shot_all_reduce(shared, "sum", name),
        "torch symmetric two-shot": lambda i: ops.two_shot_all_reduce_(shared, "sum", name),
    }


def cases(world: int, rank: int) -> Iterator[Case]:
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    box = Mailbox(dist.group.WORLD, max(c.words for t in BATCHES for c in configs(t, world)), device)
    nccl = dist.new_group(backend="nccl")
    custom = custom_all_reduce(device)
    for tokens in BATCHES:
        x = torch.zeros(tokens, ROWS, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        variants: dict[str, Callable[[int], object]] = {"nccl": lambda i, x=x: dist.all_reduce(x, group=nccl)}
        try:
            variants |= symmetric(x)
        except Exception as error:  # another PyTorch, or memory that the devices cannot share
            print(f"torch symmetric memory is not here: {type(error).__name__}: {error}", file=sys.stderr)
        if custom:
            variants["stock custom all-reduce"] = lambda i, x=x: custom(x)
        for config in configs(tokens, world):
            plan = op.plan(config, build.device_arch())
            name = f"mailboxes {2 if config.two_shot else 1}-shot {config.blocks}x{config.threads}"
            variants[name] = lambda i, plan=plan, x=x, out=out: op.run(plan, x, out, box)
        label = {"ranks": world, "batch": tokens, "columns": ROWS}
        yield Case(label, x.numel() * 2, variants, 1, "stock custom all-reduce" if custom else "nccl")
        box.health().check()


if __name__ == "__main__":
    parser = arguments("oproj_comm")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one for each GPU")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    every = [op.spec(c) for t in BATCHES for c in configs(t, options.ranks)]
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    ranks.run("oproj_comm", every, cases, options)
