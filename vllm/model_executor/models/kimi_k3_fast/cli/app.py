"""The command line itself: names, arguments and help texts. Each command imports its room when it is called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Kimi K3 at low latency on vLLM.")
checkpoint = typer.Typer(no_args_is_help=True, help="Write checkpoints in the released format.")
app.add_typer(checkpoint, name="checkpoint")

console = Console()
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def fail(message: str) -> NoReturn:
    """Say on stderr what went wrong and end with exit code 1."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


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
def patches() -> None:
    """The fork's changes to vLLM's shared code: target, state here, lines added, when to remove."""
    from . import doctor as room

    console.print(room.patch_table())


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
