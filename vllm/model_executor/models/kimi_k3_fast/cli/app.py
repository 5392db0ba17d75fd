"""The command line itself: names, arguments and help texts. Each command imports its room when it is called."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Kimi K3 at low latency on vLLM.")
checkpoint = typer.Typer(no_args_is_help=True, help="Write checkpoints in the released format.")
kernels = typer.Typer(no_args_is_help=True, help="The CuTe kernels: what there is, compile ahead of time, check.")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(kernels, name="kernels")

console = Console()
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def fail(message: str) -> NoReturn:
    """Say on stderr what went wrong and end with exit code 1."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


def table_of(*columns: str) -> Table:
    """An empty table with these columns."""
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@contextlib.contextmanager
def or_fail() -> Iterator[None]:
    """Turn a room's refusal of what it was asked into a message and exit code 1."""
    try:
        yield
    except (ValueError, ImportError) as error:
        fail(f"{type(error).__name__}: {error}")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint; without one the verdict is for Kimi K3 on this machine.")
    ] = None,
    serve_args: Annotated[list[str] | None, typer.Argument(help="`vllm serve` arguments of the deployment, after `--`.")] = None,
    deep: Annotated[
        bool, typer.Option(help="Fetch the wheel vllm==0.32.0 (some 330 MB) and compare vLLM's files with it.")
    ] = False,
    wheel: Annotated[Path | None, typer.Option(help="A wheel already at hand, for --deep.")] = None,
) -> None:
    """Versions, plug-in state, and what the fork would decide here, with every reason."""
    from . import doctor as room

    healthy = room.examine(console, model, serve_args or [])
    if deep or wheel:
        healthy &= room.compare_base(console, wheel)
    raise typer.Exit(0 if healthy else 1)


@checkpoint.command("tiny")
def checkpoint_tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write; must not hold another checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """A small random model with every feature of Kimi K3, its tokenizer and chat template, ready to be served."""
    from ..model.checkpoint import write_tiny

    if directory.exists() and any(directory.iterdir()):
        fail(f"expected an empty or new directory, found {directory} with files in it: choose another, or remove it")
    write_tiny(directory, seed)
    size = sum(file.stat().st_size for file in directory.iterdir())
    console.print(f"wrote {directory}, {size / 2**20:.1f} MiB; serve it with: k3fast serve {directory}", highlight=False)


@app.command(context_settings=PASSED_ON)
def serve(ctx: typer.Context) -> None:
    """`vllm serve` with the same arguments, after the check that this is the vLLM release the fork was written for."""
    from ..base import check_base
    from .server import vllm_command

    if (refusal := check_base()) is not None:
        fail(str(refusal))
    command = [*vllm_command(), "serve", *ctx.args]
    os.execv(command[0], command)


@app.command()
def report(
    url: Annotated[str, typer.Argument(help="A running server, for instance http://127.0.0.1:8000")],
    watch: Annotated[bool, typer.Option(help="Keep the table up to date until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as the server gives it.")] = False,
) -> None:
    """Which path served the steps of a running server, why, and what the guard found."""
    from . import report as room

    try:
        if as_json:
            console.print_json(json.dumps(room.fetch(url)))
        elif watch:
            room.watch(console, url)
        else:
            console.print(room.tables(room.fetch(url)))
    except room.NoReport as error:
        fail(str(error))


@app.command()
def patches(
    url: Annotated[str | None, typer.Argument(help="A running server: the patches' state in each of its processes.")] = None,
) -> None:
    """The fork's changes to vLLM's shared code: target, state here, lines added, when to remove."""
    from . import doctor, report

    try:
        console.print(report.patches(report.fetch(url)) if url else doctor.patch_table())
    except report.NoReport as error:
        fail(str(error))


@app.command("replay-step")
def replay_step(
    files: Annotated[list[Path], typer.Argument(help="A step that the shadow check saved: one file, or one of each rank.")],
) -> None:
    """Load the model of a saved step, run the step again on both paths, and compare. Exit status 1 where they differ."""
    try:
        from ..fast import replay

        results = replay.replay(files)
    except (ValueError, ImportError, OSError) as error:
        fail(str(error))
    table = table_of("tensor", "bar", "fast - standard, now", "then", "standard, now - then", "")
    for rank, result in enumerate(results):
        of_rank = f"rank{rank} " if len(results) > 1 else ""
        for now, then, same in zip(result.again, result.saved, result.reproduced, strict=True):
            verdict = "within" if now.within and same.within else "past the bar"
            table.add_row(of_rank + now.name, f"{now.bar:.1e}", *(f"{d.distance:.1e}" for d in (now, then, same)), verdict)
    console.print(table)
    if not all(same.within for result in results for same in result.reproduced):
        console.print("The standard path gives other numbers than it did: other weights, another version, or corrupted memory.")
    raise typer.Exit(0 if all(result.within for result in results) else 1)


Arch = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these architectures, for instance sm_90a,sm_100a.",
        callback=lambda given: [arch.strip() for text in given or () for arch in text.split(",")],
    ),
]
Op = Annotated[str | None, typer.Option(help="Only the kernels of this operator.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes that compile at the same time.")]


@kernels.command("list")
def kernels_list(arch: Arch = None, op: Op = None) -> None:
    """Every kernel, and what the compiled ones occupy."""
    from ..ops import build, commands

    table = table_of("op", "kernel", "arch", "registers", "stack", "shared")
    with or_fail():
        for row in commands.list_kernels(arch or build.ARCHS, op):
            sizes = ("-" if size is None else str(size) for size in (row.registers, row.stack, row.shared))
            table.add_row(row.op, row.kernel, row.arch, *sizes)
    console.print(table)


@kernels.command("compile")
def kernels_compile(
    arch: Arch = None,
    op: Op = None,
    out: Annotated[Path | None, typer.Option(help="A folder to ship; by default the user's cache.")] = None,
    jobs: Jobs = 1,
) -> None:
    """Compile ahead of time what is not compiled yet. Needs no GPU."""
    from ..ops import build, commands

    with or_fail():
        for row in commands.compile_kernels(arch or build.ARCHS, out, op, jobs):
            console.print(f"{row.arch} {row.kernel}: {row.registers} registers, {row.shared} bytes shared", highlight=False)


@kernels.command("verify")
def kernels_verify(arch: Arch = None, op: Op = None, jobs: Jobs = 1) -> None:
    """Compile, then check each kernel's order of memory and its registers. Exit status 1 where one fails."""
    from ..ops import build, commands

    failed = 0
    with or_fail():
        for verdict in commands.verify_kernels(arch or build.ARCHS, op, jobs):
            failed += not verdict.passed
            console.print(f"{verdict.arch} {verdict.kernel}: {'passed' if verdict.passed else 'FAILED'}", highlight=False)
            for finding in verdict.findings:
                console.print(f"  {finding}", markup=False, highlight=False)
    raise typer.Exit(1 if failed else 0)


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where the checkpoint and the server's log go.")] = Path(".demo"),
    port: Annotated[int | None, typer.Option(help="The server's port; by default a free one.")] = None,
    keep: Annotated[bool, typer.Option(help="Keep the server running until interrupted.")] = False,
) -> None:
    """Serve a tiny Kimi K3, ask it three things through the OpenAI API, and show which path served every step."""
    from . import demo as room
    from .server import ServerFailed

    try:
        room.run(console, directory, port, keep)
    except ServerFailed as error:
        fail(str(error))


@app.command("eval")
def evaluate(
    url: Annotated[str, typer.Argument(help="A running server, for instance http://127.0.0.1:8000")],
    suite: Annotated[str, typer.Option(help="tiny (the trained tiny checkpoint, offline) or full (Kimi K3).")] = "tiny",
    require_fast: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of decode tokens on the fast path.")] = 0.99,
    against: Annotated[Path | None, typer.Option(help="arm.json of the other arm, or its folder: compare item by item.")] = None,
    reference: Annotated[bool, typer.Option(help="This is the other arm: judge its scores, not its path.")] = False,
    record: Annotated[bool, typer.Option(help="Store the scores as the suite's baseline, if nothing failed.")] = False,
    out: Annotated[Path, typer.Option(help="Where arm.json, requests.jsonl, gate.json and gate.md go.")] = Path(".eval"),
    evals: Annotated[Path | None, typer.Option(help="The folder of suites and tasks; by default the checkout's evals/.")] = None,
) -> None:
    """Score a running server and prove which path did it. Exit status: 0 passed, 1 failed, 2 could not tell."""
    from ..evaluation import run as room

    try:
        path = None if reference else require_fast
        status, table = room.gate(url, suite, out, require_fast=path, against=against, record=record, evals=evals)
    except room.CouldNotTell as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        status, table = room.COULD_NOT_TELL, ""
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)
