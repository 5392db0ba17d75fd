"""Where things lie in shared memory, in bytes. Both halves use it: the host to size stages, the device to address them. No
imports.

The matrix unit takes 16 weight rows; a lane reads 4 bytes of its row, the quad next to it 4 more rows on. Rows 16 bytes apart
modulo 128
put the 32 lanes of such a read into 32 different banks; token rows are read 16 bytes at a time and want 64 modulo 128.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 232448  # bytes a block may have on all three architectures
TILE = 16  # rows of a tensor-core tile
GROUP = 32  # columns that share a scale


def align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def pitch(row: int, wanted: int) -> int:
    """The smallest row pitch >= row that is `wanted` modulo 128."""
    return row + (wanted - row) % 128


@dataclass(frozen=True)
class First:
    """w13. A stage: 8 gate rows and the 8 up rows that belong to them, then their scales."""

    hidden: int
    rows: int  # token rows kept
    split: int  # warps that share the columns

    @property
    def row(self) -> int:
        return self.hidden // 2

    @property
    def pitch(self) -> int:
        return pitch(self.row, 16)

    @property
    def scale_row(self) -> int:
        return self.hidden // GROUP

    @property
    def scales(self) -> int:
        return TILE * self.pitch

    @property
    def stage(self) -> int:
        return align(self.scales + TILE * self.scale_row, 128)

    @property
    def token(self) -> int:
        return pitch(2 * self.hidden, 64)

    @property
    def fixed(self) -> int:
        """All but the stages: token rows, two sets of partial sums, one factor for each row, barriers."""
        return align(self.rows * self.token, 128) + 2 * self.split * 512 + 1024

    def stages(self, wanted: int) -> int:
        return min(wanted, (SHARED - self.fixed) // self.stage)


@dataclass(frozen=True)
class Second:
    """w2. A stage: `height` rows of one expert, their scales, the hidden rows of up to `slots` of its tokens."""

    width: int
    height: int
    slots: int
    padded: bool  # every row a copy of its own at a pitch without bank conflicts, or all rows in one copy

    @property
    def row(self) -> int:
        return self.width // 2

    @property
    def pitch(self) -> int:
        return pitch(self.row, 80) if self.padded else self.row

    @property
    def scale_row(self) -> int:
        return self.width // GROUP

    @property
    def scales(self) -> int:
        return align(self.height * self.pitch, 16)

    @property
    def tokens(self) -> int:
        return align(self.scales + self.height * self.scale_row + 16, 16)

    @property
    def token(self) -> int:
        return pitch(2 * self.width, 64)

    @property
    def stage(self) -> int:
        return align(self.tokens + self.slots * self.token, 128)

    def fixed(self, warps: int, rows: int, entries: int, pairs: int) -> int:
        """All but the stages: every warp's sums, the table of entries, pairs and their weights, barriers."""
        return warps * rows * self.height * 4 + entries * 12 + pairs * 8 + 2048

    def depth(self, wanted: int, warps: int, rows: int, entries: int, pairs: int) -> int:
        """Stages of a warp; 0 where not one fits."""
        return max(0, min(wanted, (SHARED - self.fixed(warps, rows, entries, pairs)) // (warps * self.stage)))
