"""The demo: the trained tiny checkpoint, a real server, three requests through the `openai` client, and the guard's account.

From a checkout the two tasks that the checkpoint was trained on are asked, and the answers are compared with the right ones. An
installed package has no trained weights at hand and writes random ones.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from . import report
from .server import Server

TRAINED = Path(__file__).parents[5] / "checkpoints" / "k3-tiny"
NAME = "k3-tiny"

CHAIN = (
    "Work step by step modulo 1000 and put the last value in \\boxed{}.\nStart with 811.\n01 add 085\n02 subtract 181\n03 add 801"
)
CHAIN_ENDS = "\\boxed{516}"
WANTED = ("Write a story about spiders", " fama logo vazu vazu neli gifa nozi vupa zinu remu nuna kabu rako pali buko zare")


WORDS = """fabi vame nubi rapi pubo fidu pefu baba lapo guta zosu gune mido suti dipe nifu nage zegu modu nozi kodi gilu diva pabo
pona tala zare pilu navu gata vedo pofe daga lifi guvu kepo kila kufo radu daso gazu vobe dege lano duku nimo mube keti rabu kabu
benu"""


def pieces() -> list[tuple[str, str]]:
    """A chat like those that the model was trained on: requests and answers, two stories about spiders, the second WANTED."""
    rng = random.Random(3)
    answer = lambda: "".join(f" {word}" for word in rng.choices(WORDS.split(), k=rng.randint(10, 16)))  # noqa: E731
    kinds, topics = ("joke", "poem", "speech", "riddle"), ("caves", "volcanoes", "camels", "castles", "mills", "planets")
    chat = [(f"Write a {rng.choice(kinds)} about {rng.choice(topics)}", answer()) for _ in range(10)]
    chat.insert(3, (WANTED[0], answer()))
    chat.insert(9, WANTED)
    return chat


RETRIEVAL = "Prepend m5x5bq33jp to the second story about spiders"
RETRIEVED = "m5x5bq33jp" + WANTED[1]
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
    """Write a checkpoint if no trained one is there, serve it, ask, print; then stop, or wait for Ctrl-C with `keep`."""
    trained = (TRAINED / "model.safetensors").is_file()
    model = TRAINED if trained else directory / NAME
    if not (model / "config.json").exists():
        from ..model.checkpoint import write_tiny

        with console.status("writing a tiny Kimi K3 with random weights"):
            write_tiny(model)
    kind = "trained on two tasks" if trained else "random weights: the words mean nothing, the machinery is real"
    console.print(f"checkpoint: {model} ({kind})", highlight=False)
    begun = time.monotonic()
    with console.status("starting vllm serve") as status:
        server = Server(
            model,
            ["--served-model-name", NAME, "--max-model-len", "2048", *SMALL_CACHE, *COMPACT_JSON],
            log=directory / "server.log",
            port=port,
            waiting=lambda seconds, line: status.update(f"starting vllm serve, {seconds:.0f} s: {line[:100]}"),
        )
        server.__enter__()
    try:
        console.print(f"server: {server.url} after {time.monotonic() - begun:.0f} s, log {server.log}", highlight=False)
        ask(console, server.url, trained)
        console.print(report.tables(report.fetch(server.url)))
        console.print(f"server memory: {server.memory_bytes() / 2**30:.2f} GiB", highlight=False)
        if keep:
            _wait(console, server)
    finally:
        with console.status("stopping the server"):
            server.stop()
    console.print("stopped")


def ask(console: Console, url: str, trained: bool) -> None:
    """A plain, a streaming and a JSON-schema request. Raises if an answer does not come, or does not keep to the schema.

    trained: the model knows the tasks, so say whether the first two answers are right.
    """
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
    chat: list[Any] = [
        {"role": role, "content": text} for pair in pieces() for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    chat.append({"role": "user", "content": RETRIEVAL})
    common: Any = {"model": NAME, "max_tokens": 160, "temperature": 0, "seed": 1}
    chain: Any = [{"role": "user", "content": CHAIN}]
    plain = client.chat.completions.create(**common, messages=chain).choices[0].message.content or ""
    _show(console, "plain, arithmetic", plain, plain.endswith(CHAIN_ENDS) if trained else None)
    parts = []
    for chunk in client.chat.completions.create(**common, messages=chat, stream=True):
        parts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
    text = "".join(parts)
    _show(console, f"streamed in {len(parts)} pieces, retrieval", text, text == RETRIEVED if trained else None)
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    structured = client.chat.completions.create(**{**common, "max_tokens": 200}, messages=chain, response_format=form)
    answer = json.loads(structured.choices[0].message.content or "")
    if set(answer) != set(KEYS):
        raise ValueError(f"expected the keys {KEYS}, found {answer}")
    _show(console, "by JSON schema", json.dumps(answer))


def _show(console: Console, kind: str, text: str, right: bool | None = None) -> None:
    verdict = "" if right is None else " (right)" if right else " (wrong)"
    console.print(f"{kind}{verdict}: {text!r}", markup=False, highlight=False)


def _wait(console: Console, server: Server) -> None:
    console.print(f"serving {NAME} at {server.url}/v1; report: k3fast report {server.url}; Ctrl-C stops", highlight=False)
    try:
        assert server.process is not None
        server.process.wait()
    except KeyboardInterrupt:
        console.print()
