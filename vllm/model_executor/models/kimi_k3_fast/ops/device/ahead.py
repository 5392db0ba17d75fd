"""Device half of asking for weights: lanes of every block deal the rows of a matrix out, and ask for a window of each.

A request has no answer: nothing waits for it, and what it brings is read from L2 by a later kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from .ptx import prefetch_bytes


class Following:
    """The matrices of an `ops.ahead.Ahead` inside a kernel. matrices: `Static`, of its shapes."""

    def __init__(self, ahead: Any, matrices: Any) -> None:
        self.ahead, self.matrices = ahead, [matrix.early() for matrix in matrices]

    def ask(self, lane: Any, lanes: int) -> None:
        """By lane `lane` of the `lanes` of every block that ask."""
        for rows, matrix in zip(self.ahead.rows, self.matrices, strict=True):
            ask(matrix, rows, lambda row: row, self.ahead.first, self.ahead.columns, lane, lanes)


def make_following(ahead: Any, matrices: Any) -> Following | None:
    """None where there is no `Ahead`."""
    return None if ahead is None else Following(ahead, matrices)


@cute.jit
def ask(
    matrix: Any,
    count: cutlass.Constexpr,
    row_of: cutlass.Constexpr,
    first: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    lane: Any,
    lanes: cutlass.Constexpr,
):
    """Columns [first, first + columns), a multiple of 8, of the rows row_of(0) to row_of(count - 1) of a bf16 matrix into L2.
    Neighbouring rows are asked for by different SMs.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(lane * blocks + block, count, lanes * blocks, unroll=1):
        start = cute.assume(Int64(row_of(index)) * matrix.stride[0] + first, divby=8)
        prefetch_bytes(matrix.iterator + start, columns * 2)
