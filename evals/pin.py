"""Pin the public rows that the full suite uses: `python evals/pin.py {mrcr,aime25} --revision COMMIT`.

Needs the data (a hub, or the folder K3FAST_EVAL_DATA) and, for MRCR's bins, tiktoken's o200k_base. The choice is a shuffle with a
fixed seed inside each bin, so that anyone who pins the same revision gets the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "tasks"))
import full

NEEDLES = (2, 4, 8)
SEED = 20250925


def bin_of(tokens: int, bins: Iterable[tuple[int, int]]) -> int | None:
    """The upper end of the bin that holds `tokens`: (low, high], and the first one closed at both ends."""
    for index, (low, high) in enumerate(bins):
        if low < tokens <= high or (index == 0 and tokens == low):
            return high
    return None


def choose(
    rows: Iterable[dict[str, Any]], count: Callable[[str], int], bins: list[tuple[int, int]], per_bin: int, fields: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """`per_bin` rows of each bin, or all where it has fewer; `count` gives a text's tokens."""
    found: dict[int, list[dict[str, Any]]] = {high: [] for _, high in bins}
    for index, row in enumerate(rows):
        tokens = sum(count(m["content"]) for m in json.loads(row["prompt"])) + count(row["answer"])
        high = bin_of(tokens, bins)
        if high is not None:
            found[high].append({"row": index, "tokens": tokens, "sha256": full.row_sha256(row, fields)})
    for high, part in found.items():
        random.Random(SEED + high).shuffle(part)
    return {str(high): sorted(part[:per_bin], key=lambda p: p["row"]) for high, part in found.items() if part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("mrcr", "aime25"))
    parser.add_argument("--revision", required=True, help="commit of the data set")
    args = parser.parse_args()
    path = full.PINS / f"{args.name}.json"
    pins = json.loads(path.read_text())
    pins["revision"] = args.revision
    if args.name == "aime25":
        rows = full.source("aime25", pins["dataset"], "*.parquet", args.revision)
        pins["rows"] = [{"row": i, "sha256": full.row_sha256(row, pins["fields"])} for i, row in enumerate(rows)]
    else:
        import tiktoken

        encoder = tiktoken.get_encoding(pins["tokenizer"])
        bins = [(low, high) for low, high in pins["bins"]]
        pins["rows"] = {}
        for needles in NEEDLES:
            rows = full.source("mrcr", pins["dataset"], f"{needles}needle/*.parquet", args.revision)
            counted = choose(rows, lambda text: len(encoder.encode(text)), bins, pins["per_bin"], pins["fields"])
            pins["rows"][str(needles)] = counted
    path.write_text(json.dumps(pins, indent=1) + "\n")


if __name__ == "__main__":
    main()
