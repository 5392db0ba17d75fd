"""Geometry of the skinny matmul: a few tokens against a large BF16 matrix that is read once, row by row, as fast as memory
gives it.

    y[t, n] = sum_k x[t, k] * w[n, k]          x [T, K], w [N, K] row-major, T <= 64

The matrix is the left operand of `mma.m16n8k16` (rows of w are its 16, tokens its 8), so a batch of 1 costs what a batch of 8
does. A lane takes 16 contiguous bytes of a row straight from global memory into registers, in the order the tensor core wants
(the order of k inside a product is free as long as both operands agree). Loads of weights wait for nobody: the first `depth` of
them are in flight before the dependency wait. From 17 tokens on, both operands are streamed through shared memory instead.

    grid    = groups x splits, the `splits` blocks of a group are one cluster
    group   = a contiguous share of the rows; shares differ by one row at most, so memory traffic is even
    split   = a contiguous share of the 64-column units of K; partial sums meet in distributed shared memory, in a fixed order
    block   = row_warps x k_warps warps; a warp owns `tiles` tiles of 16 rows and every k_warps-th unit

Pure Python: the host half plans with it, the device half traces with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

UNIT = 64  # columns: one 128-byte line of a row
TILE = 16  # rows of one tensor-core step
SMEM_LIMIT = 227 * 1024  # bytes a block may have on sm_90 and sm_100
REGISTER_FILE = 65536


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Tactic:
    """How the work is cut.

    `depth`: loads in flight for a lane, counted in (tile, unit) pairs of 64 bytes, rounded to whole steps of all tiles.
    `prefetch`: KiB of its weights, behind those loads, that a block asks into L2 before the dependency wait: memory works
    while small kernels in front do not use it. `resident`: blocks an SM must be able to hold, which bounds the registers;
    with two, the next kernel's blocks start while this one still runs. `stages`: 0, or both operands go through so many
    stages of shared memory, 64 columns each, because the activation of many tokens does not fit there as a whole; `depth` and
    `prefetch` then have no meaning.

    A ring (`device/ring.py`): `chunk` columns a stage, 0 for the other forms; `fetchers` warps that only copy, besides the
    others; `height` rows of the matrix in a stage, 0 for all rows of the tiles; `passing`: weights are the first to leave L2, so
    that code, states and activations stay; `pace`: clock cycles from 8 rows of a stage to the next 8 while the ring is first
    filled, so that small kernels in front do not wait for megabytes, 0 for all at once; `by_lanes`: tokens come in copies of 16
    bytes, a lane's each, as the engine of bulk copies takes as long for a token's row as for one of the matrix.
    """

    groups: int = 132
    splits: int = 1
    row_warps: int = 1
    k_warps: int = 8
    tiles: int = 3
    depth: int = 4
    prefetch: int = 0
    resident: int = 1
    stages: int = 0
    chunk: int = 0
    fetchers: int = 0
    height: int = 0
    passing: bool = False
    pace: int = 0
    by_lanes: bool = False

    @property
    def threads(self) -> int:
        return 32 * (self.row_warps * self.k_warps + self.fetchers)

    @property
    def rows(self) -> int:
        """Rows one block can hold."""
        return self.row_warps * self.tiles * TILE


@dataclass(frozen=True)
class Part:
    """One matrix along K, as one block sees it: `share` units of a split, `steps` of them for each warp (the last may be
    padding).
    """

    columns: int
    share: int
    steps: int

    @property
    def units(self) -> int:
        return self.columns // UNIT


@dataclass(frozen=True)
class Shape:
    """Tokens, the matrices that follow each other along K, and the tactic: what the device half needs to know."""

    tokens: int
    columns: tuple[int, ...]
    tactic: Tactic

    @property
    def parts(self) -> tuple[Part, ...]:
        shares = [ceil_div(c // UNIT, self.tactic.splits) for c in self.columns]
        return tuple(Part(c, s, ceil_div(s, self.tactic.k_warps)) for c, s in zip(self.columns, shares, strict=True))

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    @property
    def ahead(self) -> int:
        """Steps whose loads are in flight: a whole number, so that a loop's body goes once around the ring."""
        return max(1, self.tactic.depth // self.tactic.tiles)

    @property
    def padded_tokens(self) -> int:
        return ceil_div(self.tokens, 8) * 8

    @property
    def pitch(self) -> int:
        """bf16 elements between two tokens in shared memory: an odd multiple of 64 bytes, so that eight tokens' reads share no
        bank.
        """
        return self.steps * self.tactic.k_warps * UNIT + 32

    @property
    def partial_pitch(self) -> int:
        """fp32 elements between two tokens of a partial sum; 4 modulo 16 keeps a warp's stores on different banks."""
        return self.tactic.rows + 4

    @property
    def partial_floats(self) -> int:
        return self.padded_tokens * self.partial_pitch

    @property
    def chunk_units(self) -> int:
        """Units of 64 columns in a stage of a ring."""
        return self.tactic.chunk // UNIT

    @property
    def height(self) -> int:
        """Rows of the matrix in a stage of a ring."""
        return self.tactic.height or self.tactic.rows

    @property
    def span(self) -> int:
        """Rows of a group as a ring deals its outputs: even, so that two neighbouring threads have two neighbouring rows."""
        return ceil_div(self.height, 2) * 2

    @property
    def stage_pitch(self) -> int:
        """bf16 elements between two rows in a stage of a ring: an odd multiple of 64 bytes."""
        return self.tactic.chunk + UNIT // 2

    @property
    def stage_elements(self) -> int:
        """bf16 elements of a stage of a ring: rows of the matrix, the tokens, and one row for a norm weight."""
        return (self.height + self.tokens + (len(self.columns) > 1)) * self.stage_pitch

    @property
    def stage_rows(self) -> int:
        """Rows of 64 columns in a stage: of the matrix, of the activation, and one of a norm weight."""
        return self.tactic.rows + self.padded_tokens + 1

    @property
    def shared_floats(self) -> int:
        """4-byte words that hold the activation, or the stages, first and the warps' partial sums after it."""
        streamed = self.tactic.stages * self.stage_rows * UNIT // 2
        if self.tactic.chunk:
            streamed = self.tactic.stages * self.stage_elements // 2
        operands = streamed or ceil_div(self.tokens * self.pitch, 2)
        return max(operands, self.partial_floats * self.tactic.k_warps)

    @property
    def smem_bytes(self) -> int:
        return 4 * (self.shared_floats + 64 * self.tactic.k_warps) + 16 * self.tactic.stages + 1024

    def problem(self) -> str | None:
        """Why this shape cannot run with this tactic, or None."""
        if not 1 <= self.tokens <= 64:
            return f"expected 1 to 64 tokens, found {self.tokens}"
        bad = [c for c in self.columns if c % UNIT or c <= 0]
        if bad:
            return f"expected a number of input columns that is a multiple of {UNIT}, found {bad[0]}"
        if self.smem_bytes > SMEM_LIMIT:
            hint = "more splits hold less of the activation"
            return f"expected at most {SMEM_LIMIT} bytes of shared memory, found {self.smem_bytes} ({hint})"
        if self.tactic.chunk:
            t = self.tactic
            if t.chunk % UNIT or t.stages < 1 or t.fetchers < 1 or t.splits > 1 or self.height > t.rows:
                wanted = "a chunk of whole units, at least 1 stage and 1 fetching warp, no splits, rows within the tiles"
                return f"expected {wanted}; found {t}"
        elif self.tactic.stages and not (self.tactic.stages >= 2 and self.tactic.k_warps <= 2):
            return f"expected at least 2 stages and at most 2 warps for their columns, found {self.tactic}"
        if self.tactic.threads > 1024:
            return f"expected at most 1024 threads, found {self.tactic.threads}"
        return None

    def uncovered(self, rows: int, whole: int = 1) -> str | None:
        """Why the groups cannot hold `rows` rows, dealt so many together, or None."""
        held, most = whole * ceil_div(rows // whole, self.tactic.groups), self.tactic.height or self.tactic.rows
        return None if held <= most else f"expected at most {most} rows in a group, found {held}"


def ring_tactic(
    rows: int,
    columns: tuple[int, ...],
    tokens: int,
    sms: int = 132,
    chunk: int = 512,
    space: int = 168 * 1024,
    fetchers: int = 2,
    whole: int = 1,
) -> Tactic:
    """A ring of at most `space` bytes, a block for an SM. `whole`: rows of a group come in multiples of it."""
    groups = max(1, min(sms, ceil_div(rows, TILE)))
    height = ceil_div(ceil_div(rows, groups), whole) * whole
    held = ceil_div(height, TILE)
    row_warps = ceil_div(held, 4 if tokens <= 32 else 2)  # a warp's sums are registers
    tiles = ceil_div(held, row_warps)
    warps = 4 if tokens > 32 and len(columns) > 1 else 8  # so do a norm's squares of many tokens
    units = chunk // UNIT
    k_warps = max(k for k in range(1, max(1, warps // row_warps) + 1) if units % k == 0)  # none has a unit more than others
    tactic = Tactic(groups, 1, row_warps, k_warps, tiles, 0, 0, 1, 1, chunk, fetchers, height)
    stage = 2 * Shape(tokens, columns, tactic).stage_elements
    needed = sum(ceil_div(c // UNIT, chunk // UNIT) for c in columns)
    return replace(tactic, stages=max(1, min(space // stage, needed)))


def default_tactic(rows: int, columns: tuple[int, ...], tokens: int, sms: int = 132) -> Tactic:
    """A tactic that fits, by the rules that measurements support so far; choices of single shapes come from the op's
    tactics.json.
    """
    if tokens > 16:
        return streamed_tactic(rows, columns, tokens, sms)
    k, splits = sum(columns), 1
    while splits < 8 and (tokens * (k // splits) * 2 > 118 * 1024 or (tokens > 8 * splits and k // splits > 1024)):
        splits *= 2
    groups = max(1, min(sms // splits, ceil_div(rows, TILE)))
    held = ceil_div(ceil_div(rows, groups), TILE)  # tiles of a group
    tiles = min(held, 4 if tokens <= 8 or held > 24 else 3)
    row_warps = ceil_div(held, tiles)
    while row_warps > 12:
        groups, held = groups * 2, ceil_div(ceil_div(rows, groups * 2), TILE)
        row_warps = ceil_div(held, tiles)
    k_warps = max(1, 8 // row_warps)
    twice = row_warps * k_warps <= 8 and (tiles < 4 or len(columns) == 1)  # else addresses and loads exceed the registers
    return Tactic(groups, splits, row_warps, k_warps, tiles, depth=2 * tiles if twice else tiles)


def streamed_tactic(rows: int, columns: tuple[int, ...], tokens: int, sms: int = 132, splits: int = 2) -> Tactic:
    """Two blocks share a group's rows along K: each reads half of the activation only, which L2 would hardly deliver to all
    blocks in full. A cluster lives in one GPC, whose number of SMs is even but no multiple of 4: clusters of 4 cannot cover
    all SMs, and the group that is left over doubles the time (measured on H200).
    """
    while splits > 1 and min(columns) // UNIT < splits:
        splits //= 2
    groups = max(1, min((sms if splits <= 2 else sms - 12) // splits, ceil_div(rows, TILE)))
    while ceil_div(rows, groups) > 18 * TILE:
        groups *= 2
    held = ceil_div(ceil_div(rows, groups), TILE)
    tiles = min(held, 3)
    tactic = Tactic(groups, splits, ceil_div(held, tiles), 2, tiles, stages=8)
    while tactic.stages > 2 and Shape(tokens, columns, tactic).smem_bytes > SMEM_LIMIT:
        tactic = replace(tactic, stages=tactic.stages - 1)
    return tactic


def tactics(rows: int, columns: tuple[int, ...], tokens: int, sms: int = 132) -> list[Tactic]:
    """Tactics worth measuring: the default, rings, small blocks of one tile, then more or fewer warps along K, loads in flight,
    splits and waves of blocks.
    """
    first, kib = default_tactic(rows, columns, tokens, sms), 1024
    sizes = [(512, 168), (512, 212), (640, 212), (768, 212), (896, 212), (1024, 212)]
    if tokens > 16:
        sizes = [(256, 212), (512, 212)]
    rings = [replace(ring_tactic(rows, columns, tokens, sms, chunk, space * kib), passing=True) for chunk, space in sizes]
    rings += [replace(ring, by_lanes=True) for ring in rings if tokens >= 8]
    found = [first, *(t for t in rings if Shape(tokens, columns, t).problem() is None)]
    if first.stages:
        others = [streamed_tactic(rows, columns, tokens, cover, splits) for cover, splits in ((sms, 1), (sms, 4))]
        return list(dict.fromkeys([*found, *others]))
    found.append(Tactic(ceil_div(rows, TILE), k_warps=8, tiles=1, depth=4, resident=2))
    for splits in sorted({1, 2, first.splits, min(8, 2 * first.splits)}):
        for waves in (1, 2, 4):  # blocks for each SM
            groups = min(waves * sms // splits, ceil_div(rows, TILE))
            held = ceil_div(ceil_div(rows, groups), TILE)
            for tiles in range(1, min(held, 4) + 1):
                row_warps = ceil_div(held, tiles)
                for k_warps, steps in ((8, 1), (8, 2), (8, 4), (4, 2), (4, 4), (4, 8)):
                    found.append(Tactic(groups, splits, row_warps, k_warps, tiles, depth=steps * tiles))
    return [t for t in dict.fromkeys(found) if t.chunk or _sensible(Shape(tokens, columns, t), rows, first)]


def _sensible(shape: Shape, rows: int, first: Tactic) -> bool:
    """Fits, wastes no warp, and keeps the registers of loads, sums and addresses within a thread's share of the register file."""
    t = shape.tactic
    registers = 16 * shape.ahead * t.tiles + 4 * t.tiles * shape.padded_tokens // 8 + 4 * t.tiles + 40
    if t == first:
        return True
    fits = (
        shape.problem() is None and shape.uncovered(rows) is None and registers * t.threads <= REGISTER_FILE and registers <= 250
    )
    busy = 4 <= t.threads // 32 <= 16 and all(part.steps * t.k_warps <= part.share * 1.2 for part in shape.parts[:1])
    alone = shape.padded_tokens <= 8 or t.row_warps * t.k_warps >= 8
    return fits and busy and alone and (t.row_warps == 1 or shape.padded_tokens > 8)
