"""Device half of `prefetch`: each thread asks for every n-th of the wanted rows, a row at a time."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..device.ahead import ask
from ..order import Static, dependency_wait, release_dependents


@cute.kernel
def _prefetch(w: Static, config: cutlass.Constexpr):
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    ask(w.early(), config.wanted, config.row, 0, config.columns, thread, config.threads)
    dependency_wait()  # whoever waits for this launch waits for those before it


def bf16_prefetch(config: Any, w: Static, stream: object) -> None:
    _prefetch(w, config).launch(
        grid=[config.blocks, 1, 1],
        block=[config.threads, 1, 1],
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=config.inline,
    )
