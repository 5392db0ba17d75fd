"""The items of the tasks for a real Kimi K3: chosen rows of public data sets at a pinned revision, each compared with its hash.

The pins (`evals/pins/*.json`, written by `evals/pin.py`) name revision, bins, rows and hashes: a number without them cannot be
made again, since neither data set numbers its rows nor are the bins columns of it. K3FAST_EVAL_DATA may name a folder that
holds the files (`mrcr/2needle/*.parquet`, `aime25/*.parquet`) where no hub is within reach.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

PINS = Path(__file__).parents[1] / "pins"
LOCAL = "K3FAST_EVAL_DATA"
AIME_REQUEST = "\n\nReason step by step, and put the final answer, an integer from 0 to 999, in \\boxed{}."


class NotPinned(ValueError):
    """The rows are not pinned, or the data are not those that were; the message says what to do."""


def read_pins(name: str) -> dict[str, Any]:
    """`pins/name.json`. Raises NotPinned while it names no revision."""
    path = PINS / f"{name}.json"
    pins = json.loads(path.read_text())
    if not pins["revision"] or not pins["rows"]:
        raise NotPinned(
            f"{path.name}: expected a revision and rows, found none: run `python evals/pin.py {name} --revision COMMIT`"
        )
    return pins


def source(name: str, dataset: str, pattern: str, revision: str) -> Dataset:
    """All rows of the files that match `pattern`, files in order of their names."""
    folder = os.environ.get(LOCAL)
    if folder:
        files = sorted(str(file) for file in (Path(folder) / name).glob(pattern))
        if not files:
            raise NotPinned(f"{LOCAL}: expected {name}/{pattern} below {folder}, found no file")
        return load_dataset("parquet", data_files={"test": files}, split="test")
    return load_dataset(dataset, data_files={"test": pattern}, revision=revision, split="test")


def row_sha256(row: dict[str, Any], fields: list[str]) -> str:
    """The hash of what the model sees and what it is scored against."""
    return hashlib.sha256(json.dumps([row[f] for f in fields], ensure_ascii=True).encode()).hexdigest()


def chosen(rows: Dataset, pins: list[dict[str, Any]], fields: list[str]) -> list[dict[str, Any]]:
    """The pinned rows in order. Raises NotPinned for a row that is missing or another one."""
    found = []
    for pin in pins:
        row = rows[pin["row"]] if pin["row"] < len(rows) else None
        if row is None or row_sha256(row, fields) != pin["sha256"]:
            raise NotPinned(f"row {pin['row']}: expected the pinned one, found another: the data are of another revision")
        found.append(row)
    return found


def mrcr(needles: int, longest: int, **_: Any) -> dict[str, Dataset]:
    """The pinned rows with `needles` needles, of all bins up to `longest` tokens (o200k_base, prompt and answer)."""
    pins = read_pins("mrcr")
    rows = source("mrcr", pins["dataset"], f"{needles}needle/*.parquet", pins["revision"])
    items = []
    for upper, part in sorted(pins["rows"][str(needles)].items(), key=lambda bin_: int(bin_[0])):
        if int(upper) <= longest:
            items += [{**row, "group": f"to {upper}"} for row in chosen(rows, part, pins["fields"])]
    return {"test": Dataset.from_list(items)}


def aime25(**_: Any) -> dict[str, Dataset]:
    """The thirty problems, each with the request for a box."""
    pins = read_pins("aime25")
    rows = chosen(source("aime25", pins["dataset"], "*.parquet", pins["revision"]), pins["rows"], pins["fields"])
    return {"test": Dataset.from_list([{"prompt": r["problem"] + AIME_REQUEST, "answer": str(r["answer"])} for r in rows])}
