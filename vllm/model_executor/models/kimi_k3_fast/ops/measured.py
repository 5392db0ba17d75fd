"""Measured tactics: for an architecture and a shape, the way to run an op that was fastest.

Each op that can run in several ways has a `tactics.json` beside it: rows with the shape, the tactic, its microseconds and the
incumbent's, and where the numbers come from. Its benchmark writes it (`--tactics FILE`); `plan` reads it. An op has a default for
what was not measured, so an empty table is no error.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .library import LEAST_TOKENS, LIBRARY, Library
from .skinny import TILE, Shape, Tactic, ceil_div, default_tactic, ring_tactic

MOST_ROW_WARPS = 7  # of a streamed block; twice as many warps, as two share its columns


@functools.cache
def rows(folder: Path) -> tuple[dict[str, Any], ...]:
    """The table of the op in `folder`."""
    return tuple(json.loads((folder / "tactics.json").read_text()))


def tactic(folder: Path, tokens: int, *, library: bool, **shape: int) -> Tactic | Library | None:
    """As `chosen`, for the ops that multiply; the library from LEAST_TOKENS on where nothing was measured. `library`: whether it
    can serve this case at all. Blackwell, where nothing was measured, has as much shared memory and takes what sm_90a takes.
    """
    found = chosen(folder, "sm_90a", {"tokens": tokens, **shape}, "tokens")
    if found is None:
        return LIBRARY if library and tokens >= LEAST_TOKENS else None
    if "call" not in found:
        return Tactic(**found)
    return Library(**found) if library else None


def unmeasured(rows: int, columns: tuple[int, ...], tokens: int, whole: int = 1) -> Tactic:
    """The kernel for a shape that has no row: up to 16 tokens the ring that was fastest at every shape of TP8 and TP16, where
    the matrix fills it; above, the default with fewer rows for a warp and more warps, which wait for each other less and keep
    their sums in registers. `whole`: rows of a group come in multiples of it.
    """
    if tokens <= 16 and rows >= 1024 and sum(columns) >= 512:
        ring = replace(ring_tactic(rows, columns, tokens, whole=whole), passing=True)
        shape = Shape(tokens, columns, ring)
        if ring.stages >= 2 and shape.problem() is None and shape.uncovered(rows) is None:
            return ring
    tactic = default_tactic(rows, columns, tokens)
    return narrow(tactic, ceil_div(rows, tactic.groups)) if tactic.stages else tactic


def narrow(tactic: Tactic, held: int) -> Tactic:
    """As few tiles a warp as groups of so many rows allow."""
    tiles = ceil_div(ceil_div(held, TILE), MOST_ROW_WARPS)
    return replace(tactic, tiles=tiles, row_warps=ceil_div(ceil_div(held, TILE), tiles))


def chosen(folder: Path, arch: str, shape: dict[str, int], batch: str) -> dict[str, Any] | None:
    """The tactic for a shape: measured at this size of `batch` or at the next larger one, all else equal. None: not measured."""
    others = {name: size for name, size in shape.items() if name != batch}
    fitting = [
        row
        for row in rows(folder)
        if row["arch"] == arch and row[batch] >= shape[batch] and all(row[name] == size for name, size in others.items())
    ]
    return min(fitting, key=lambda row: row[batch])["tactic"] if fitting else None
