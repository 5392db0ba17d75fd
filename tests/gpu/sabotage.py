"""A plug-in of vLLM that lets a test reach into the workers of a running server, over its development route `/collective_rpc`."""

from __future__ import annotations

import os
from typing import Any


def k3_pid(worker: Any) -> str:
    """The worker's process."""
    return str(os.getpid())


def k3_memory(worker: Any) -> str:
    """MiB that tensors hold on the worker's GPU, without what PyTorch keeps for the next ones."""
    import torch

    return str(torch.cuda.memory_allocated() >> 20)


def k3_lose_peer(worker: Any, rank: str) -> None:
    """What a kernel does whose wait for this rank has run out: say so in every rank's mailbox."""
    import twin_graphs

    twin_graphs.fast_of(worker)._box.report_lost(int(rank))


def register() -> None:
    """vLLM's plug-in entry. Safe to call twice."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in (k3_pid, k3_memory, k3_lose_peer):
        setattr(WorkerBase, method.__name__, method)
