"""Weights of the next matmul that a kernel asks into L2 when its own are under way, so that memory does not idle meanwhile.

No tensor changes: what was asked for in vain costs time alone. An op that can do it has an `Ahead` in its config, the matrices as
its kernel's last parameters, `next0` and so on, and takes them in `run` as `following`. `device/ahead.py` has the device half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .build import STATIC, Param
from .library import Library
from .skinny import Tactic

MOST_BYTES = 32 << 20  # of 50 MB of L2: the rest is for what runs meanwhile
MOST_MATRICES = 3


@dataclass(frozen=True)
class Ahead:
    """Columns [first, first + columns) of all rows of up to three BF16 matrices. rows: of each; pitch: elements from one row to
    the next, in all of them.
    """

    rows: tuple[int, ...]
    pitch: int
    first: int
    columns: int

    @property
    def width(self) -> int:
        """Columns that a matrix must have."""
        return self.first + self.columns

    @property
    def bytes(self) -> int:
        return sum(self.rows) * self.columns * 2

    def problem(self) -> str | None:
        """Why this cannot be asked for, or None."""
        if not (1 <= len(self.rows) <= MOST_MATRICES and min(self.rows) >= 1):
            return f"expected 1 to {MOST_MATRICES} following matrices with rows, found {self.rows}"
        if any(size % 8 for size in (self.pitch, self.first, self.columns)) or not 0 <= self.first < self.width <= self.pitch:
            return f"expected columns in whole 16 bytes and within the pitch, found {self}"
        if self.bytes > MOST_BYTES:
            return f"expected at most {MOST_BYTES} bytes, which L2 can keep, found {self.bytes}"
        return None


def problem(ahead: Ahead | None, tactic: Tactic | Library) -> str | None:
    """Why a matmul of this tactic cannot ask for it, or None."""
    if ahead is None:
        return None
    if not (isinstance(tactic, Tactic) and tactic.chunk):
        return f"expected a ring, whose fetching warps ask for the following matrices, found {tactic}"
    return ahead.problem()


def params(ahead: Ahead | None) -> tuple[Param, ...]:
    """A kernel's last parameters: what `arguments` gives."""
    if ahead is None:
        return ()
    strides = (ahead.pitch, 1)
    return tuple(Param(f"next{i}", "bf16", (rows, ahead.width), STATIC, strides) for i, rows in enumerate(ahead.rows))


def arguments(ahead: Ahead | None, following: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices as the kernel takes them, which checks their shapes. Raises ValueError where they are not as many."""
    if ahead is None or len(following) != len(ahead.rows):
        if ahead is None and not following:
            return []
        raise ValueError(f"expected the following matrices of {ahead}, found {len(following)}")
    return [matrix[:, : ahead.width] for matrix in following]
