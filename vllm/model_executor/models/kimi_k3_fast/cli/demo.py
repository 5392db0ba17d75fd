"""The demo: a tiny checkpoint, a real server, three requests through the `openai` client, and the guard's account of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from . import report
from .server import Server

QUESTION = "What makes decoding slow?"
KEYS = ("layer", "experts", "gated")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "layer": {"enum": ["kda", "mla"]},
        "experts": {"type": "integer", "minimum": 1, "maximum": 16},
        "gated": {"type": "boolean"},
    },
    "required": list(KEYS),
    "additionalProperties": False,
}

# A random model never tires of white space, which JSON allows anywhere: the grammar leaves it out.
COMPACT_JSON = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')

# The caches of forty requests of full length. vLLM's default would take a share of the machine, its least is a GiB.
SMALL_CACHE = ("--num-gpu-blocks-override", "2048")


def run(console: Console, directory: Path, port: int | None, keep: bool) -> None:
    """Write the checkpoint if it is not there, serve it, ask, print; then stop, or wait for Ctrl-C with `keep`."""
    model = directory / "tiny-k3"
    if not (model / "config.json").exists():
        from ..model.checkpoint import write_tiny

        with console.status("writing a tiny Kimi K3 with random weights"):
            write_tiny(model)
    console.print(f"checkpoint: {model} (random weights: the words mean nothing, the machinery is real)", highlight=False)
    begun = time.monotonic()
    with console.status("starting vllm serve") as status:
        server = Server(
            model,
            ["--served-model-name", "tiny-k3", "--max-model-len", "2048", *SMALL_CACHE, *COMPACT_JSON],
            log=directory / "server.log",
            port=port,
            waiting=lambda seconds, line: status.update(f"starting vllm serve, {seconds:.0f} s: {line[:100]}"),
        )
        server.__enter__()
    try:
        console.print(f"server: {server.url} after {time.monotonic() - begun:.0f} s, log {server.log}", highlight=False)
        ask(console, server.url)
        console.print(report.tables(report.fetch(server.url)))
        console.print(f"server memory: {server.memory_bytes() / 2**30:.2f} GiB", highlight=False)
        if keep:
            _wait(console, server)
    finally:
        with console.status("stopping the server"):
            server.stop()
    console.print("stopped")


def ask(console: Console, url: str) -> None:
    """A plain, a streaming and a JSON-schema request. Raises if an answer does not come, or does not keep to the schema."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    common: Any = {
        "model": "tiny-k3",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "seed": 1,
    }
    plain = client.chat.completions.create(**common)
    _show(console, "plain", plain.choices[0].message.content)
    pieces = []
    for chunk in client.chat.completions.create(**common, stream=True):
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    _show(console, f"streamed in {len(pieces)} pieces", "".join(pieces))
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    structured = client.chat.completions.create(**{**common, "max_tokens": 200}, response_format=form)
    answer = json.loads(structured.choices[0].message.content or "")
    if set(answer) != set(KEYS):
        raise ValueError(f"expected the keys {KEYS}, found {answer}")
    _show(console, "by JSON schema", json.dumps(answer))


def _show(console: Console, kind: str, text: str | None) -> None:
    console.print(f"{kind}: {text!r}", markup=False, highlight=False)


def _wait(console: Console, server: Server) -> None:
    console.print(f"serving tiny-k3 at {server.url}/v1; report: k3fast report {server.url}; Ctrl-C stops", highlight=False)
    try:
        assert server.process is not None
        server.process.wait()
    except KeyboardInterrupt:
        console.print()
