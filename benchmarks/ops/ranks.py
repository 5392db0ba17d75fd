"""Benchmarks of several ranks: one process a GPU, all measure at once, rank 0 reports."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, main
from vllm.model_executor.models.kimi_k3_fast.ops import build

Cases = Callable[[int, int], Iterable[Case]]


def _one_rank(rank: int, name: str, cases: Cases, folder: str, options: argparse.Namespace) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    with contextlib.ExitStack() as stack:
        if rank:
            options.json = None
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        main(name, cases(options.ranks, rank), options)
    dist.barrier()


def run(name: str, specs: Iterable[build.KernelSpec], cases: Cases, options: argparse.Namespace) -> None:
    """Compile the kernels, once for all ranks, and where that is not all that is asked for (`options.compile`) measure
    `cases(world, rank)` in `options.ranks` processes, whose default group is gloo. `cases` must be a function of a module, or a
    `partial` of one.
    """
    compile_all(specs, options.compile or build.device_arch())
    if not options.compile:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_one_rank, (name, cases, folder, options), nprocs=options.ranks)
