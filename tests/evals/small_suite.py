"""Copies of evals/ whose tiny suite has two tasks with few, short items."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vllm.model_executor.models.kimi_k3_fast.evaluation import suites

TASKS = {"k3_tiny_mrcr_2": "mrcr_official", "k3_tiny_arith": "aime_integer"}


def small_evals(folder: Path, retrieval: dict[int, int], arithmetic: dict[int, int], wave: int) -> Path:
    """A copy of evals/ below `folder` with a `tiny` suite of two tasks, of so many items per length and per number of steps."""
    for kind in ("tasks", "suites"):
        (folder / kind).mkdir()
    for file in (suites.EVALS / "tasks").iterdir():
        if file.name.startswith("k3_tiny") or file.name == "tiny.py":
            text = file.read_text().replace("Path(__file__).parents[2]", f"Path({str(suites.EVALS.parent)!r})")
            text = re.sub(r"items: \{.*\}", f"items: {arithmetic if 'arith' in file.name else retrieval}", text)
            # A broken reply runs into the limit: 41 tokens a step and the box are what a right one needs.
            text = text.replace("max_gen_toks: 512", f"max_gen_toks: {41 * max(arithmetic) + 16}")
            (folder / "tasks" / file.name).write_text(text)
    rest = {"tolerance": 0.05, "seeds": [1], "max_truncated": 0.05, "wave": wave}
    tasks = {name: {"metric": metric, **rest} for name, metric in TASKS.items()}
    (folder / "suites" / "tiny.json").write_text(json.dumps({"alpha": 0.05, "tasks": tasks}))
    return folder
