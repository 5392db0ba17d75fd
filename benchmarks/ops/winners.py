"""From timings to an op's `tactics.json`: of each case the fastest variant that is one of our tactics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.timing import Timing, provenance

Tactics = Mapping[str, dict[str, Any]]


def write(
    path: Path,
    arch: str,
    timings: list[Timing],
    tactics: Tactics | Callable[[dict[str, Any]], Tactics],
    shape: Sequence[str],
    commit: str | None,
) -> None:
    """`tactics`: variant name -> fields of the tactic, or what gives that for a case's label. `shape`: names in a label that make
    the shape of a row. Rows of other shapes or architectures that `path` already has are kept.
    """
    where = provenance(commit)
    source = {name: where[name] for name in ("gpu", "driver", "commit", "date")} | {"versions": where["versions"]}
    kept = json.loads(path.read_text()) if path.exists() else []
    fresh = []
    for label in {tuple(t.label.items()): t.label for t in timings}.values():
        case = [t for t in timings if t.label == label and not t.error]
        known = tactics(label) if callable(tactics) else tactics
        ours = [t for t in case if t.variant in known]
        if not ours:
            continue
        best, others = min(ours, key=lambda t: t.us), [t for t in case if t.variant.startswith("stock")]
        incumbent = min(others, key=lambda t: t.us) if others else None
        row = {"arch": arch, **{name: label[name] for name in shape}, "tactic": known[best.variant], "us": round(best.us, 3)}
        row |= {
            "incumbent": incumbent.variant if incumbent else None,
            "incumbent_us": round(incumbent.us, 3) if incumbent else None,
        }
        fresh.append(row | {"from": source})
    key = lambda row: (row["arch"], *(row[name] for name in shape))  # noqa: E731
    table = {key(row): row for row in [*kept, *fresh]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for _, row in sorted(table.items())) + "\n]\n")
