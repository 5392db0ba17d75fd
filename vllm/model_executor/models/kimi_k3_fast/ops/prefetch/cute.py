"""Device half of `prefetch`: each thread asks for every n-th of the wanted rows, a row at a time."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from ..device.ptx import prefetch_bytes
from ..order import Static, dependency_wait, release_dependents


@cute.kernel
def _prefetch(w: Static, config: cutlass.Constexpr):
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    number = thread * config.blocks + block  # neighbours in memory are asked for by different SMs
    for wanted in cutlass.range(number, config.wanted, config.blocks * config.threads, unroll=1):
        row = wanted // config.first * config.every + wanted % config.first
        start = cute.assume(Int64(row) * config.columns, divby=8)
        prefetch_bytes(w.early().iterator + start, config.columns * 2, row < config.rows)
    dependency_wait()  # whoever waits for this launch waits for those before it


def bf16_prefetch(config: Any, w: Static, stream: object) -> None:
    _prefetch(w, config).launch(
        grid=[config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=config.inline,
    )
