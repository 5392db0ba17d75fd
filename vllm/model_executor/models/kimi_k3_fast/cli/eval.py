"""`k3fast eval`: run a suite against a running server, judge it, and exit with the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

COULD_NOT_TELL = 2


def evaluate(
    url: Annotated[str, typer.Argument(help="A running server, for instance http://127.0.0.1:8000")],
    suite: Annotated[str, typer.Option(help="tiny (the trained tiny checkpoint, offline) or full (Kimi K3).")] = "tiny",
    require_fast: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of decode tokens on the fast path.")] = 0.99,
    against: Annotated[Path | None, typer.Option(help="arm.json of the other arm, or its folder: compare item by item.")] = None,
    reference: Annotated[bool, typer.Option(help="This is the other arm: judge its scores, not its path.")] = False,
    record: Annotated[bool, typer.Option(help="Store this run's scores as the suite's baseline, if nothing failed.")] = False,
    out: Annotated[Path, typer.Option(help="Where arm.json, requests.jsonl, gate.json and gate.md go.")] = Path(".eval"),
    evals: Annotated[Path | None, typer.Option(help="The folder of suites and tasks; by default the checkout's evals/.")] = None,
) -> None:
    """Score a running server and prove which path did it. Exit status: 0 passed, 1 failed, 2 could not tell."""
    console = Console()
    try:
        from ..evaluation import run
    except ModuleNotFoundError as error:
        Console(stderr=True).print(f"{error}: install the evaluation harness (requirements/eval.txt)", style="red", markup=False)
        raise typer.Exit(COULD_NOT_TELL) from None
    try:
        status, table = run.gate(
            url, suite, out, require_fast=None if reference else require_fast, against=against, record=record, evals=evals
        )
    except run.CouldNotTell as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(COULD_NOT_TELL) from None
    console.print(Markdown(table) if console.is_terminal else table, markup=False)
    raise typer.Exit(status)
