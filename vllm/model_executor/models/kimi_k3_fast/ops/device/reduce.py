"""Sums and maxima over a warp and over a block. Orders are fixed, so equal inputs give equal bits on every run and every rank."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32


def warp_sum(value: Float32, lanes: int = 32) -> Float32:
    """Sum over groups of `lanes` neighbouring lanes (a power of two); every lane gets the result."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=lanes)


def warp_max(value: Float32, lanes: int = 32) -> Float32:
    """Maximum over groups of `lanes` neighbouring lanes (a power of two); every lane gets the result."""
    return cute.arch.warp_reduction_max(value, threads_in_group=lanes)


def block_sum(value: Float32, scratch: Any, warps: int) -> Float32:
    """Sum over all threads of a block of `warps` warps; every thread gets the result.

    `scratch`: shared FP32 tensor of `warps` elements that nothing else uses between the two barriers here and the next block-wide
    barrier.
    """
    thread, _, _ = cute.arch.thread_idx()
    value = warp_sum(value)
    scratch[thread // 32] = value  # every lane of a warp writes the same value
    cute.arch.sync_threads()
    total = scratch[0]
    for warp in range(1, warps):
        total = total + scratch[warp]
    cute.arch.sync_threads()
    return total
