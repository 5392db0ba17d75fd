"""Device half of SiTU as a launch of its own, behind the library's product of gate and up."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ..device.vectors import pack_bf16, unpack_bf16
from ..order import Dynamic, Output, dependency_wait, release_dependents
from .cute import situ

THREADS = 128


@cute.kernel
def _situ(gate_up: Dynamic, hidden: Output, config: cutlass.Constexpr):
    """Two neighbouring columns of one token for each thread."""
    release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    part, t, _ = cute.arch.block_idx()
    words = config.shared // 2  # pairs of columns
    column = part * THREADS + thread
    token = dependency_wait()
    both, target = _pairs(gate_up.after(token), 2 * words), _pairs(hidden.after(token), words)
    if column < words:
        target[t, column] = _activate(both[t, column], both[t, words + column], config)


def _activate(gates: Any, ups: Any, config: Any) -> Any:
    """Of two columns, each pair in one word."""
    (gate, next_gate), (up, next_up) = unpack_bf16(gates), unpack_bf16(ups)
    even, odd = (situ(g, u, config.beta, config.linear_beta) for g, u in ((gate, up), (next_gate, next_up)))
    return pack_bf16(even, odd)


def _pairs(tensor: Any, words: int) -> Any:
    """A matrix of bf16 as one of 32-bit words, `words` in a row."""
    layout = cute.make_layout((tensor.shape[0], words), stride=(words, 1))
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Uint32), layout)


def bf16_situ(config: Any, gate_up: Dynamic, hidden: Output, stream: object) -> None:
    grid = [-(-config.shared // 2 // THREADS), config.tokens, 1]
    _situ(gate_up, hidden, config).launch(
        grid=grid, block=[THREADS, 1, 1], preferred_smem_carveout=100, stream=stream, use_pdl=True
    )
