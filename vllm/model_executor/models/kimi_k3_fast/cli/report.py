"""`GET /k3fast/report` of a running server, as tables."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..reasons import Reason

ROUTE = "/k3fast/report"
WATCH_SECONDS = 1.0
CORE = "engine core "  # before the names of the patches that a worker heard of
MEANINGS = {reason.code: reason.meaning for reason in Reason}


class NoReport(RuntimeError):
    """The server gives no report; the message says why and what to do."""


def fetch(url: str) -> dict[str, Any]:
    """The server's report. Raises NoReport."""
    address = url.rstrip("/") + ROUTE
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise NoReport(
            f"{address} answered {error.code}: expected a server with the fork's plug-in loaded (`k3fast doctor`)"
        ) from None
    except (urllib.error.URLError, OSError, json.JSONDecodeError) as error:
        raise NoReport(f"no report from {address}: {error}") from None


def tables(report: dict[str, Any]) -> Group:
    """The status, then for each rank its verdict, steps by path, standard steps by reason, and findings."""
    return Group(f"status: {report['status']}", *(part for rank in report["ranks"] for part in _rank(rank)))


def _rank(rank: dict[str, Any]) -> list[Table]:
    parts = [_verdict(rank), _steps(rank)]
    if rank["steps"]["by_reason"]:
        parts.append(_reasons(rank))
    if rank["violations"]["by_reason"] or rank["quarantined"]:
        parts.append(_violations(rank))
    return parts


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False, min_width=72)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _verdict(rank: dict[str, Any]) -> Table:
    deployment = rank["deployment"]
    selected = {True: "fast path selected", False: "fast path refused", None: "no verdict yet"}[deployment["selected"]]
    table = _table(f"{rank['rank']}: {selected}", "what", "detail")
    for refusal in deployment["refusals"]:
        table.add_row(refusal["reason"], refusal["detail"] or MEANINGS.get(refusal["reason"], ""))
    for change in deployment["mutations"]:
        table.add_row(f"changed {change['name']}", f"{change['before']} -> {change['after']}: {change['why']}")
    for name, patch in rank["patches"].items():
        table.add_row(f"patch {name}", _installed(patch))
    return table


def _installed(patch: dict[str, Any]) -> str:
    states = sorted(set(patch["targets"].values()))
    return ", ".join(states) + (f": {patch['refusal']}" if patch.get("refusal") else "")


def patches(report: dict[str, Any]) -> Table:
    """The patches in every process of a server: their state, and apart from it which of their hooks have run."""
    table = _table("patches, by process", "process", "patch", "installed", "has run")
    processes = {"API server": report["api_server"].get("patches", {})}
    for rank in report["ranks"]:
        core = {name.removeprefix(CORE): state for name, state in rank["patches"].items() if name.startswith(CORE)}
        processes.setdefault("engine core", core)
        processes[f"worker {rank['rank']}"] = {name: s for name, s in rank["patches"].items() if not name.startswith(CORE)}
    for process, states in processes.items():
        for name, patch in sorted(states.items()):
            ran = [hook for hook, count in patch["ran"].items() if count]
            table.add_row(process, name, _installed(patch), ", ".join(ran) or "-")
    return table


def _steps(rank: dict[str, Any]) -> Table:
    steps = rank["steps"]
    total = sum(steps[path]["steps"] for path in ("fast", "standard")) or 1
    table = _table(
        "steps", "path", "steps", "share", "tokens", "decode tokens", numbers=("steps", "share", "tokens", "decode tokens")
    )
    for path in ("fast", "standard"):
        row = steps[path]
        table.add_row(path, str(row["steps"]), f"{row['steps'] / total:.1%}", str(row["tokens"]), str(row["decode_tokens"]))
    return table


def _reasons(rank: dict[str, Any]) -> Table:
    table = _table("standard steps by reason", "reason", "steps", "meaning", numbers=("steps",))
    for code, count in sorted(rank["steps"]["by_reason"].items(), key=lambda item: -item[1]):
        table.add_row(code, str(count), MEANINGS.get(code, ""))
    return table


def _violations(rank: dict[str, Any]) -> Table:
    table = _table("violations", "reason", "count", "meaning", numbers=("count",))
    for code, count in sorted(rank["violations"]["by_reason"].items(), key=lambda item: -item[1]):
        table.add_row(code, str(count), MEANINGS.get(code, ""))
    for key, code in rank["quarantined"].items():
        table.add_row("quarantined", "", f"{key} ({code})")
    return table


def watch(console: Console, url: str) -> None:
    """Redraw the tables about once a second until interrupted. Raises NoReport when the server stops answering."""
    try:
        with Live(tables(fetch(url)), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(tables(fetch(url)), refresh=True)
    except KeyboardInterrupt:
        return
