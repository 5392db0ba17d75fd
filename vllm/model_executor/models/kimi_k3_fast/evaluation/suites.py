"""What a suite is: its tasks, how each is judged, and the scores recorded for it. All of it is data under `evals/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVALS = Path(__file__).parents[5] / "evals"


class SuiteError(ValueError):
    """The suite cannot be run: the message says what was expected and found."""


@dataclass(frozen=True)
class Task:
    """metric: the score that is judged; all metrics are reported. tolerance: how far its mean may lie below the recorded one.

    seeds: one run each, averaged (avg@k). max_truncated: share of replies that may end at the token limit. wave: requests sent
    together; part of the task, since other waves make other batches.
    """

    metric: str
    tolerance: float
    seeds: tuple[int, ...]
    max_truncated: float
    wave: int


@dataclass(frozen=True)
class Suite:
    """alpha: level of the paired test over all items."""

    name: str
    tasks: Mapping[str, Task]
    alpha: float
    folder: Path

    @property
    def baseline(self) -> Path:
        return self.folder / "baselines" / f"{self.name}.json"


def load(name: str, folder: Path = EVALS) -> Suite:
    """The suite `folder`/suites/`name`.json. Raises SuiteError."""
    path = folder / "suites" / f"{name}.json"
    if not path.is_file():
        raise SuiteError(f"expected a suite at {path}, found none: run from a checkout, or name its evals/ folder with --evals")
    text = json.loads(path.read_text())
    try:
        tasks = {
            task: Task(t["metric"], float(t["tolerance"]), tuple(t["seeds"]), float(t["max_truncated"]), int(t["wave"]))
            for task, t in text["tasks"].items()
        }
        suite = Suite(name, tasks, float(text["alpha"]), folder)
    except (KeyError, TypeError) as error:
        raise SuiteError(
            f"{path}: expected tasks, alpha and per task metric, tolerance, seeds, max_truncated, wave: {error}"
        ) from None
    for task, t in tasks.items():
        if not t.seeds or len(set(t.seeds)) != len(t.seeds):
            raise SuiteError(f"{path}: {task}.seeds: expected distinct seeds, found {list(t.seeds)}: equal ones repeat a reply")
    return suite


def read_baseline(suite: Suite) -> dict[str, Any] | None:
    """What was recorded for the suite, by task: score, items, prompts_sha256; None when nothing was."""
    return json.loads(suite.baseline.read_text()) if suite.baseline.is_file() else None
