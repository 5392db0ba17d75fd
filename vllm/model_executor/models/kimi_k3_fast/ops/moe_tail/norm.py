"""Device half of RMSNorm as a launch of its own, in front of the library's products."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.norm import inverse_rms, scaled
from ..device.ptx import store_global
from ..device.reduce import block_sum
from ..device.vectors import Words, dot_words, load_words
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents

MOST_THREADS = 512


def threads(columns: int) -> int:
    """Whole warps, a thread for each 16 bytes of a row as far as there may be so many."""
    return min(MOST_THREADS, -(-columns // 256) * 32)


@cute.kernel
def _rms_norm(norm: Static, x: Dynamic, y: Output, config: cutlass.Constexpr):
    """y = bf(x rsqrt(mean(x^2) + eps) norm), a token for each block, which holds it in registers."""
    release_dependents()
    count, pieces = threads(config.columns), config.columns // 8
    thread, _, _ = cute.arch.thread_idx()
    t, _, _ = cute.arch.block_idx()
    sums = cute.make_tensor(SmemAllocator().allocate_array(Float32, count // 32), cute.make_layout(count // 32))
    inside = [thread + i * count < pieces for i in range(-(-pieces // count))]
    places = [Int32(select_(held, Int32(thread + i * count), Int32(0))) * 8 for i, held in enumerate(inside)]
    weights = [load_words(norm.early().iterator + place) for place in places]
    token = dependency_wait()
    row, target = (tensor.after(token).iterator + t * config.columns for tensor in (x, y))
    values = [load_words(row + place) for place in places]
    squares = [select_(held, dot_words(x, x, Float32(0.0)), Float32(0.0)) for x, held in zip(values, inside, strict=True)]
    total = Float32(sum(squares[1:], squares[0]))
    factor = inverse_rms(block_sum(total, sums, count // 32), config.columns, config.eps)
    for i in cutlass.range_constexpr(len(places)):
        store_global(target + places[i], _scaled(values[i], weights[i], factor), inside[i])


def _scaled(words: Words, weights: Words, factor: Any) -> Words:
    """bf(x factor w) of eight columns."""
    first, second, third, fourth = (scaled(x, w, factor) for x, w in zip(words, weights, strict=True))
    return first, second, third, fourth


def bf16_rms_norm(config: Any, norm: Static, x: Dynamic, y: Output, stream: object) -> None:
    _rms_norm(norm, x, y, config).launch(
        grid=[config.tokens, 1, 1],
        block=[threads(config.columns), 1, 1],
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
