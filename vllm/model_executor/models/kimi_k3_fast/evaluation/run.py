"""The gate from the outside: a URL and a suite in, files and an exit status out."""

from __future__ import annotations

import json
from pathlib import Path

from . import arm as arms
from . import gate as judging
from . import output, suites

COULD_NOT_TELL = judging.Verdict.UNKNOWN.value


class CouldNotTell(RuntimeError):
    """Nothing was judged: no server, no suite, no data, no lm-eval. The message says what was expected."""


def gate(
    url: str,
    suite_name: str,
    out: Path,
    *,
    require_fast: float | None,
    against: Path | None = None,
    record: bool = False,
    evals: Path | None = None,
) -> tuple[int, str]:
    """Run the suite, judge it, write `out`/{arm.json,requests.jsonl,gate.json,gate.md}. Returns exit status and table.

    Raises CouldNotTell.
    """
    try:
        suite = suites.load(suite_name, evals or suites.EVALS)
        other = None if against is None else arms.Arm.read(against / "arm.json" if against.is_dir() else against)
        label = "standard" if require_fast is None else "fast"
        arm = arms.run(url, suite, label, out)
    except (arms.NoServer, suites.SuiteError, OSError, ValueError, ImportError) as error:
        raise CouldNotTell(str(error)) from error
    return judge(arm, suite, out, require_fast=require_fast, against=other, record=record)


def judge(
    arm: arms.Arm,
    suite: suites.Suite,
    out: Path,
    *,
    require_fast: float | None,
    against: arms.Arm | None = None,
    record: bool = False,
) -> tuple[int, str]:
    """Judge an arm that has run. With `record` a run in which nothing failed becomes the suite's baseline first."""
    baseline = suites.read_baseline(suite)
    if record:
        trial = judging.decide(arm, suite, None, require_fast=require_fast, against=against)
        if trial.verdict is not judging.Verdict.FAIL:
            baseline = output.baseline_record(arm, suite)
            suite.baseline.parent.mkdir(parents=True, exist_ok=True)
            suite.baseline.write_text(json.dumps(baseline, indent=1) + "\n")
    judgement = judging.decide(arm, suite, baseline, require_fast=require_fast, against=against)
    verdict, table = output.write(arm, against, suite, judgement, out)
    return verdict.value, table
