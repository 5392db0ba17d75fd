"""The report as a fold over events.

Everything that the report counts enters `Totals` through `apply(event)`, in the live process and when an event file is read
back: the same numbers follow from the file alone. An event is a JSON object with `kind` and `t` (seconds since the epoch).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any

from ..reasons import Reason

SCHEMA = 1
HISTORY_SECONDS = 10
HISTORY_LENGTH = 360
KEPT_VIOLATIONS = 100
PROMPT = Reason.STEP_PREFILL.code  # the one reason that is no fallback: prompts always run on the standard path
COUNTS = ("steps", "requests", "tokens", "decode_tokens", "padded_rows")
_STATES = ("start", "deployment", "details", "graphs", "quarantined", "patches", "decisions")
PLAIN = (*_STATES, "violations", "counters", "gauges")  # totals that are JSON as they stand


class Totals:
    """Counters of one rank since its start."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.deployment: dict[str, Any] = {"selected": None, "refusals": [], "facts": {}, "mutations": []}
        self.rows: dict[tuple, list[int]] = {}  # (path, plan key, mode, spec width, reasons) -> COUNTS
        self.details: dict[str, str] = {}  # reason code -> last detail
        self.graphs: dict[str, dict[str, Any]] = {}
        self.violations: dict[str, int] = {}
        self.last_violations: deque[dict[str, Any]] = deque(maxlen=KEPT_VIOLATIONS)
        self.quarantined: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.gauges: dict[str, float] = {}
        self.patches: dict[str, dict[str, Any]] = {}
        self.decisions: dict[str, Any] = {}  # step, hash and last comparison of `agreement`
        self.history: deque[list[float]] = deque(maxlen=HISTORY_LENGTH)  # [bucket start, fast, prompt, fallback steps]

    def apply(self, event: dict[str, Any]) -> None:
        """Fold one event in. Unknown kinds raise KeyError: a file of a newer schema is not half-read."""
        getattr(self, f"_on_{event['kind']}", self._unknown)(event)

    def _unknown(self, event: dict[str, Any]) -> None:
        raise KeyError(f"event kind: expected one this version writes (schema {SCHEMA}), found {event['kind']!r}")

    def _on_start(self, event: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # a new process starts from nothing
        self.start = {k: v for k, v in event.items() if k not in ("kind", "t")}

    def _on_deployment(self, event: dict[str, Any]) -> None:
        self.deployment = {k: event[k] for k in ("selected", "refusals", "facts", "mutations")}

    def _on_planned(self, event: dict[str, Any]) -> None:
        self.graphs[event["graph"]] = {"plan_key": event["plan_key"], "reasons": event["reasons"]}

    def _on_steps(self, event: dict[str, Any]) -> None:
        bucket = event["t"] // HISTORY_SECONDS * HISTORY_SECONDS
        if not self.history or self.history[-1][0] != bucket:
            self.history.append([bucket, 0, 0, 0])
        for path, plan_key, mode, width, reasons, *counts in event["rows"]:
            row = self.rows.setdefault((path, plan_key, mode, width, tuple(reasons)), [0] * len(COUNTS))
            for i, count in enumerate(counts):
                row[i] += count
            self.history[-1][1 if path == "fast" else 2 if PROMPT in reasons else 3] += counts[0]
        self.details.update(event.get("details", {}))

    def _on_violation(self, event: dict[str, Any]) -> None:
        reason = event["reason"]
        self.violations[reason] = self.violations.get(reason, 0) + event.get("count", 1)
        if "where" in event:
            self.last_violations.append({k: event[k] for k in ("t", "reason", "where", "detail")})

    def _on_quarantine(self, event: dict[str, Any]) -> None:
        self.quarantined[event["plan_key"]] = event["reason"]

    def _on_counters(self, event: dict[str, Any]) -> None:
        for name, delta in event["add"].items():
            self.counters[name] = self.counters.get(name, 0) + delta
        for name, value in event.get("max", {}).items():
            self.gauges[name] = max(self.gauges.get(name, value), value)

    def _on_patches(self, event: dict[str, Any]) -> None:
        for name, state in event["patches"].items():
            self.patches.setdefault(name, {}).update(state)

    def _on_decisions(self, event: dict[str, Any]) -> None:
        self.decisions = event["state"]

    def _on_carry(self, event: dict[str, Any]) -> None:
        """Everything before this line: at the head of a rotated file, and after lines that were lost."""
        self.__init__()  # type: ignore[misc]
        for key in PLAIN:
            setattr(self, key, event["totals"][key])
        self.rows = {(*row[:4], tuple(row[4])): row[5:] for row in event["totals"]["rows"]}
        self.last_violations.extend(event["totals"]["last_violations"])
        self.history.extend(event["totals"]["history"])

    def carry(self) -> dict[str, Any]:
        """The totals as one JSON object, from which `_on_carry` restores them."""
        state: dict[str, Any] = {key: getattr(self, key) for key in PLAIN}
        state["rows"] = [[*key[:4], list(key[4]), *counts] for key, counts in self.rows.items()]
        state["last_violations"] = list(self.last_violations)
        state["history"] = [list(bucket) for bucket in self.history]
        return json.loads(json.dumps(state))

    def report(self) -> dict[str, Any]:
        """The public form. `steps.by_reason` counts a step once under each of its reasons; `steps.fallback` the standard steps
        without prompt tokens."""
        by_path: dict[str, dict[str, int]] = {p: dict.fromkeys(COUNTS, 0) for p in ("fast", "standard")}
        fallback = 0
        by_reason: dict[str, int] = {}
        by_mode: dict[str, int] = {}
        keys: dict[str, dict[str, Any]] = {}
        for (path, plan_key, mode, width, reasons), counts in self.rows.items():
            for name, count in zip(COUNTS, counts, strict=True):
                by_path[path][name] += count
            by_mode[mode] = by_mode.get(mode, 0) + counts[0]
            if path == "standard" and PROMPT not in reasons:
                fallback += counts[0]
            for reason in reasons:
                by_reason[reason] = by_reason.get(reason, 0) + counts[0]
            if plan_key:
                key = keys.setdefault(plan_key, {"fast": 0, "standard": 0, "tokens": 0, "padded_rows": 0, "spec_width": width})
                key[path] += counts[0]
                key["tokens"] += counts[2]
                key["padded_rows"] += counts[4]
        for plan_key, key in keys.items():
            key["quarantined"] = self.quarantined.get(plan_key, "")
        return {
            "schema": SCHEMA,
            **self.start,
            "deployment": self.deployment,
            "steps": {**by_path, "fallback": fallback, "by_reason": by_reason, "by_mode": by_mode, "details": dict(self.details)},
            "plan_keys": keys,
            "graphs": self.graphs,
            "violations": {"by_reason": dict(self.violations), "last": list(self.last_violations)},
            "quarantined": dict(self.quarantined),
            "counters": dict(self.counters),
            "gauges": dict(self.gauges),
            "patches": self.patches,
            "decisions": self.decisions,
            "history": {"seconds": HISTORY_SECONDS, "buckets": [list(bucket) for bucket in self.history]},
        }


def read_events(paths: Iterable[FilePath | str]) -> Iterable[dict[str, Any]]:
    """Events of one rank's files, oldest file first. A torn last line (a crash, a full disk) is passed over."""
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n") and line.strip():
                    yield json.loads(line)


def recompute(paths: Iterable[FilePath | str]) -> dict[str, Any]:
    """The report that one rank's event files (oldest first) add up to."""
    totals = Totals()
    for event in read_events(paths):
        totals.apply(event)
    return totals.report()
