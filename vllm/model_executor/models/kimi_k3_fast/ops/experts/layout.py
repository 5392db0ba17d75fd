"""Where things lie in shared memory, in bytes. Both halves use it: the host to size stages, the device to address them. No
imports.

A lane of the matrix unit reads 16 bytes of a weight row, one scale group; the four lanes of a row read 64 in line, and eight
lanes, two neighbouring rows of a tile, make one access. Two rows that lie 64 bytes apart modulo 128 share no bank. In w2 a row of
192 bytes has that by itself; in w13 gate and up rows alternate in a tile, and the up rows are placed 64 bytes off.

Where pairs are grouped, a lane reads 4 bytes of its row instead, and eight rows of a tile make one access: rows 16 bytes apart
modulo 128 put the 32 lanes of such a read into 32 different banks. Token rows are read 16 bytes at a time and want 64 modulo 128.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 232448  # bytes a block may have on all three architectures
TILE = 16  # rows of a tensor-core tile
GROUP = 32  # columns that share a scale
SETS = 3  # items of w13, in stock's layout, whose parts are kept until they are added up
ROUND = 4 * GROUP  # columns that a warp multiplies at a time: a group for each lane of a row


ROW_UNIT, COLUMN_UNIT = 256, 128  # stock pads packed weights to multiples of these


def padded_rows(rows: int) -> int:
    """Rows of a packed matrix."""
    return align(rows, ROW_UNIT)


def padded_columns(columns: int) -> int:
    """Columns of a packed matrix."""
    return align(columns, COLUMN_UNIT)


def align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def pitch(row: int, wanted: int) -> int:
    """The smallest row pitch >= row that is `wanted` modulo 128."""
    return row + (wanted - row) % 128


def beside(size: int) -> int:
    """The first place behind `size` bytes that is 64 modulo 128."""
    return pitch(size, 64)


@dataclass(frozen=True)
class First:
    """w13 of pairs. A stage: 8 gate rows, the 8 up rows that belong to them, the scales of both. Each of the four is one copy."""

    hidden: int
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
        """Of a team: two sets of a warp's 16 rows."""
        return 2 * self.split * 64

    @property
    def fixed(self) -> int:
        """All but the stages: a token row for each team with a factor for each warp's part, sums, zeros, barriers."""
        return self.teams * (self.token + 4 * self.split + self.sums) + 1024

    def stages(self, wanted: int) -> int:
        """As many as fit."""
        return min(wanted, (SHARED - self.fixed) // self.stage)


@dataclass(frozen=True)
class Second:
    """w2 of pairs. A stage: `height` rows of one expert, their scales, the pair's hidden row."""

    width: int
    height: int

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
    def token(self) -> int:
        """Behind the scales, which may start up to 15 bytes late and are read a round at a time."""
        return align(self.scales + self.height * self.scale_row + 16 + 4, 128)

    @property
    def stage(self) -> int:
        return align(self.token + 2 * self.width, 128)

    def fixed(self, warps: int, rows: int, entries: int) -> int:
        """All but the stages: every warp's sums, the table of entries, zeros, barriers."""
        return warps * rows * self.height * 4 + entries * 8 + 2048

    def depth(self, wanted: int, warps: int, rows: int, entries: int) -> int:
        """Stages of a warp; 0 where not one fits."""
        return max(0, min(wanted, (SHARED - self.fixed(warps, rows, entries)) // (warps * self.stage)))


@dataclass(frozen=True)
class GroupedFirst:
    """w13 of groups. A stage: 8 gate rows and the 8 up rows that belong to them, then their scales."""

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
class GroupedSecond:
    """w2 of groups. A stage: `height` rows of one expert, their scales, the hidden rows of up to `slots` of its tokens."""

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


@dataclass(frozen=True)
class PackedFirst:
    """w13 from stock's layout. An item: the gate rows of a strip and the up rows that belong to them."""

    hidden: int
    width: int
    strip: int  # row groups of every 64 rows
    split: int  # warps: they share the columns
    flight: int  # steps in the ring that are under way
    grouped: bool

    @property
    def pieces(self) -> int:
        """Scale groups that an instruction takes."""
        return 8 // self.strip

    @property
    def tiles(self) -> int:
        """Items of an entry."""
        return self.width // 64 * self.pieces

    @property
    def steps(self) -> int:
        """Of a warp for an item, a scale group of every piece each."""
        return self.hidden // (GROUP * self.pieces * self.split)

    @property
    def slot(self) -> int:
        """A warp's step: gate and up codes of two chunks, 512 bytes each, and their scales, 256."""
        return 2 * (2 * 512 + 256)

    @property
    def ring(self) -> int:
        """Of a warp: one slot more than steps are under way, the one that is read."""
        return (self.flight + 1) * self.slot

    @property
    def sums(self) -> int:
        """Of a warp: gate and up, 8 rows of every row group, for as many tokens as are multiplied at a time."""
        return (self.strip if self.grouped else 1) * self.strip * 64

    @property
    def finishers(self) -> int:
        """Warps that add up an item, 32 outputs each."""
        return -(-(self.strip if self.grouped else 1) * self.strip * 8 // 32)

    def listed(self, entries: int, grid: int) -> int:
        """Places of the table: of groups the items of a block, at most; of pairs all of them, and the number of tokens."""
        return -(-entries * self.tiles // grid) if self.grouped else entries + 1

    def bytes(self, entries: int, grid: int, pairs: int) -> int:
        """Of shared memory, with 1 KiB for alignment."""
        table = 4 * self.listed(entries, grid)
        if self.grouped:  # and all pairs, all entries and their number
            table = 3 * table + 4 * (pairs + entries + 1)
        return self.split * (self.ring + self.steps * 512 + SETS * self.sums) + table + 1024


@dataclass(frozen=True)
class PackedSecond:
    """w2 from stock's layout. A block owns a strip."""

    width: int
    strip: int
    warps: int
    flight: int
    grouped: bool

    @property
    def pieces(self) -> int:
        return 8 // self.strip

    @property
    def height(self) -> int:
        """Rows of a block."""
        return 8 * self.strip

    def blocks(self, hidden: int) -> int:
        return hidden // self.height

    @property
    def steps(self) -> int:
        """Of a warp for an entry."""
        return self.width // (GROUP * self.pieces)

    @property
    def slot(self) -> int:
        """A warp's step: codes of two chunks and hidden values, 512 bytes each, and scales, 256."""
        return 3 * 512 + 256

    @property
    def ring(self) -> int:
        return (self.flight + 1) * self.slot

    def bytes(self, rows: int, entries: int, pairs: int) -> int:
        """Of shared memory, with 1 KiB for alignment."""
        table = 12 * entries + 8 * pairs if self.grouped else 8 * pairs + 4
        return self.warps * (self.ring + rows * self.height * 4) + table + 1024
