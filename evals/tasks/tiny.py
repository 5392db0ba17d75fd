"""The small twins' items, generated: the same code that made the training rows, from seeds that training never draws.

Nothing is fetched and nothing is stored; the gate compares a hash of the prompts with the recorded one, so that a change of the
generator cannot pass for a change of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

TRAIN = Path(__file__).parents[2] / "train"
SEED = 2**31 + 1  # training draws seeds below 2**31, its own evaluation 2**31


def _train_modules() -> tuple[Any, Any]:
    """train/'s generator and vocabulary; they are scripts' neighbours and import each other by bare names."""
    sys.path.insert(0, str(TRAIN))
    try:
        import tasks
        import vocabulary
    finally:
        sys.path.remove(str(TRAIN))
    return tasks, vocabulary


def _item(tasks: Any, tokenizer: Any, row: Any) -> dict[str, Any]:
    messages, answer = tasks.messages(row, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    return {"prompt": json.dumps(messages), "reply": answer, "prompt_tokens": row.answer[0]}


def retrieval(needles: int, items: Mapping[int, int], **_: Any) -> dict[str, Dataset]:
    """items: how many items of each prompt length (tokens, the reply included)."""
    tasks, vocabulary = _train_modules()
    tokenizer = vocabulary.build_tokenizer()
    rows = []
    for length, count in items.items():
        rng = np.random.default_rng((SEED, needles, int(length)))
        for _i in range(count):
            row = tasks.retrieval_row(rng, int(length), 1, needles)
            item = _item(tasks, tokenizer, row)
            prefix = row.meta["prefix"]
            rows.append(
                {
                    **item,
                    "answer": item["reply"],
                    "random_string_to_prepend": prefix,
                    "n_needles": needles,
                    "group": f"to {length} tokens",
                }
            )
    return {"test": Dataset.from_list(rows)}


def arithmetic(items: Mapping[int, int], **_: Any) -> dict[str, Dataset]:
    """items: how many chains of each number of steps."""
    tasks, vocabulary = _train_modules()
    tokenizer = vocabulary.build_tokenizer()
    rows = []
    for steps, count in items.items():
        rng = np.random.default_rng((SEED, 0, int(steps)))
        for _i in range(count):
            row = tasks.arithmetic_row(rng, int(steps))
            rows.append({**_item(tasks, tokenizer, row), "answer": str(row.meta["result"]), "group": f"{steps} steps"})
    return {"test": Dataset.from_list(rows)}
