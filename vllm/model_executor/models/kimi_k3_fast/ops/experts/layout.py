"""Where things lie in shared memory, in bytes. Both halves use it: the host to size stages, the device to address them. No
imports.

A lane of the matrix unit reads 16 bytes of a weight row, one scale group; the four lanes of a row read 64 in line, and eight
lanes, two neighbouring rows of a tile, make one access. Two rows that lie 64 bytes apart modulo 128 share no bank. In w2 a row of
192 bytes has that by itself; in w13 gate and up rows alternate in a tile, and the up rows are placed 64 bytes off.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 232448  # bytes a block may have on all three architectures
TILE = 16  # rows of a tensor-core tile
GROUP = 32  # columns that share a scale
ROUND = 4 * GROUP  # columns that a warp multiplies at a time: a group for each lane of a row


def align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def beside(size: int) -> int:
    """The first place behind `size` bytes that is 64 modulo 128."""
    return size + (64 - size) % 128


@dataclass(frozen=True)
class First:
    """w13. A stage: 8 gate rows, the 8 up rows that belong to them, the scales of both. Each of the four is one copy."""

    hidden: int
    slots: int  # token rows that a team keeps
    split: int  # warps of a team: they share the columns
    teams: int

    @property
    def row(self) -> int:
        return self.hidden // 2

    @property
    def scale_row(self) -> int:
        return self.hidden // GROUP

    @property
    def up(self) -> int:
        return beside(8 * self.row)

    @property
    def scales(self) -> int:
        return align(self.up + 8 * self.row, 128)

    @property
    def up_scales(self) -> int:
        return self.scales + beside(8 * self.scale_row)

    @property
    def stage(self) -> int:
        return align(self.up_scales + 8 * self.scale_row, 128)

    @property
    def token(self) -> int:
        return 2 * self.hidden

    @property
    def sums(self) -> int:
        """Of a team: two sets of a warp's 16 rows for two tokens."""
        return 2 * self.split * 128

    @property
    def fixed(self) -> int:
        """All but the stages: token rows with a factor for each warp's part, sums, zeros, barriers."""
        return self.teams * (self.slots * (self.token + 4 * self.split) + self.sums) + 1024

    def stages(self, wanted: int, taken: int = 0) -> int:
        """As many as fit beside what is taken."""
        return min(wanted, (SHARED - self.fixed - taken) // self.stage)


@dataclass(frozen=True)
class Second:
    """w2. A stage: `height` rows of one expert, their scales, the hidden rows of up to `slots` of its tokens."""

    width: int
    height: int
    slots: int

    @property
    def row(self) -> int:
        return self.width // 2

    @property
    def scale_row(self) -> int:
        return self.width // GROUP

    @property
    def scales(self) -> int:
        return align(self.height * self.row, 16)

    @property
    def tokens(self) -> int:
        """Behind the scales, which may start up to 15 bytes late and are read a round at a time."""
        return align(self.scales + self.height * self.scale_row + 16 + 4, 128)

    @property
    def token(self) -> int:
        return 2 * self.width

    @property
    def stage(self) -> int:
        return align(self.tokens + self.slots * self.token, 128)

    def fixed(self, warps: int, rows: int, entries: int, pairs: int) -> int:
        """All but the stages: every warp's sums, the table of entries, pairs and their weights, zeros, barriers."""
        return warps * rows * self.height * 4 + entries * 12 + pairs * 8 + 2048

    def depth(self, wanted: int, warps: int, rows: int, entries: int, pairs: int, taken: int = 0) -> int:
        """Stages of a warp beside what is taken; 0 where not one fits."""
        return max(0, min(wanted, (SHARED - taken - self.fixed(warps, rows, entries, pairs)) // (warps * self.stage)))
