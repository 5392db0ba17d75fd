"""What kernels of RMSNorm share that hold a row in registers."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32

from .vectors import pack_bf16, unpack_bf16


def inverse_rms(squares: Any, columns: int, eps: float) -> Float32:
    """rsqrt(mean(x^2) + eps) of a row, from the sum of its squares."""
    return cute.math.rsqrt(squares * Float32(1.0 / columns) + Float32(eps))


def scaled(word: Uint32, weight: Uint32, factor: Any) -> Uint32:
    """bf(x factor w) of two columns, in FP32 up to the rounding."""
    (even, odd), (left, right) = unpack_bf16(word), unpack_bf16(weight)
    return pack_bf16(even * factor * left, odd * factor * right)
