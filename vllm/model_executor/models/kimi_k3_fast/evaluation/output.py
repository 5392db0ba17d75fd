"""What the gate writes: one JSON with everything, one Markdown table for people, and the record that becomes a baseline."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arm import Arm, Item, prompts_sha256
from .gate import Judgement, Verdict, coverage, deployment, mean, scores
from .suites import Suite

SCHEMA = 1


def task_summary(arm: Arm, suite: Suite) -> dict[str, dict[str, Any]]:
    """Per task: every metric's mean, items, seeds, replies at the token limit, failed requests, and the prompts' hash."""
    found: dict[str, dict[str, Any]] = {}
    for name in suite.tasks:
        items = arm.items.get(name, [])
        if items:
            found[name] = {
                "metrics": {metric: round(mean(scores(items, metric)), 6) for metric in items[0].scores},
                "by_group": _by_group(items, suite.tasks[name].metric),
                "items": len({i.item for i in items}),
                "seeds": sorted({i.seed for i in items}),
                "truncated": sum(i.finish == "length" for i in items),
                "failed": sum(bool(i.error) for i in items),
                "prompts_sha256": prompts_sha256(items),
            }
    return found


def _by_group(items: Sequence[Item], metric: str) -> dict[str, float]:
    """The judged metric's mean in each group of items."""
    groups = list(dict.fromkeys(i.group for i in items if i.group))
    return {group: round(mean(scores([i for i in items if i.group == group], metric)), 6) for group in groups}


def baseline_record(arm: Arm, suite: Suite) -> dict[str, Any]:
    """What `--record` stores: the judged score of every task and the prompts it belongs to."""
    tasks = {
        name: {
            "metric": suite.tasks[name].metric,
            "score": t["metrics"][suite.tasks[name].metric],
            "items": t["items"],
            "prompts_sha256": t["prompts_sha256"],
        }
        for name, t in task_summary(arm, suite).items()
    }
    return {"suite": suite.name, "arm": arm.label, "model": arm.model, "date": _date(arm.started), "tasks": tasks}


def gate_json(arm: Arm, against: Arm | None, suite: Suite, judgement: Judgement) -> dict[str, Any]:
    seen = coverage(arm)
    return {
        "schema": SCHEMA,
        "verdict": judgement.verdict.name.lower(),
        "suite": suite.name,
        "checks": [{"name": c.name, "verdict": c.verdict.name.lower(), "detail": c.detail} for c in judgement.checks],
        "paired": {name: test.to_json() for name, test in judgement.tests.items()},
        "arms": [_arm_json(a, suite) for a in (arm, against) if a is not None],
        "fast_share": None if seen is None or not seen.fast + seen.standard else round(seen.share, 6),
    }


def _arm_json(arm: Arm, suite: Suite) -> dict[str, Any]:
    return {
        "label": arm.label, "model": arm.model, "date": _date(arm.started), "seconds": arm.seconds, "deployment": deployment(arm),
        "speculation": arm.speculation, "tasks": task_summary(arm, suite),
    }  # fmt: skip


def gate_markdown(report: dict[str, Any], suite: Suite) -> str:
    """The table a person reads: scores by arm, then every check."""
    arms = report["arms"]
    head = ["task", "metric", *(a["label"] for a in arms), "items", "at limit", "failed"]
    lines = [f"# Suite {report['suite']}: {report['verdict']}", "", _row(head), _row(["---"] * len(head))]
    for name in suite.tasks:
        mine = [a["tasks"].get(name) for a in arms]
        first = next((m for m in mine if m), None)
        if first is None:
            continue
        for metric in first["metrics"]:
            judged = metric == suite.tasks[name].metric
            cells = [f"{m['metrics'][metric]:.4f}" if m else "none" for m in mine]
            counts = [" / ".join(str(m[key]) if m else "-" for m in mine) for key in ("items", "truncated", "failed")]
            lines.append(_row([name, f"**{metric}**" if judged else metric, *cells, *counts]))
            for group in first["by_group"] if judged else ():
                means = [f"{m['by_group'][group]:.4f}" if m and group in m["by_group"] else "none" for m in mine]
                lines.append(_row([f"{name}, {group}", metric, *means, "", "", ""]))
    share = report["fast_share"]
    lines += ["", f"Fast share of decode tokens: {'not known' if share is None else f'{share:.4f}'}.", ""]
    lines += [_row(["check", "verdict", "detail"]), _row(["---"] * 3)]
    lines += [_row([c["name"], c["verdict"], c["detail"].replace("|", "\\|").replace("\n", " ")]) for c in report["checks"]]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def write(arm: Arm, against: Arm | None, suite: Suite, judgement: Judgement, folder: Path) -> tuple[Verdict, str]:
    """`folder`/gate.json and gate.md. Returns the verdict and the table."""
    report = gate_json(arm, against, suite, judgement)
    table = gate_markdown(report, suite)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (folder / "gate.md").write_text(table)
    return judgement.verdict, table
