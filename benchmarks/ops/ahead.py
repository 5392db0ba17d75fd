"""Compile a benchmark's kernels ahead of its run, on all cores: device time is for measuring."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm.model_executor.models.kimi_k3_fast.ops import build


def compile_all(specs: Iterable[build.KernelSpec], arch: str) -> None:
    """Compile every kernel that the store lacks; says how many were new. K3FAST_JOBS limits the processes (default: one for
    each core).
    """
    missing = [s for s in specs if build.store.find(arch, f"{s.name}-{build.content_hash(s, arch)}") is None]
    jobs = int(os.environ.get("K3FAST_JOBS", os.cpu_count() or 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(missing))), mp_context=context) as pool:
        for _ in pool.map(build.ensure, missing, [arch] * len(missing)):
            pass
    print(f"compiled {len(missing)} kernels for {arch}")
