"""Concurrent clients on one server with audit and shadow: sampling, structured output, logprobs, shared prefixes, long prompts in
chunks, several answers at once, streams that are dropped, and less cache than they need. No violation, no wrong reply, nothing
left behind. `tests/gpu/test_load_cuda.py` plays it on GPUs, `tests/server/test_load.py` on CPUs.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asking import metric, report, wait_for

SEED = 5
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
TOKENS = range(10, 1000)
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
HELD_BY_THE_LAST = 16  # slots: they are told to be free with the next step, which does not come


@dataclass(frozen=True)
class Load:
    """What the clients ask for; all but `clients` in tokens.

    budget: of a step; a longer prompt comes in chunks. prompt, answer: most of a sampled request. dropped: of the answer whose
    reader goes away. known: chats with the only right answer, where the weights are trained.
    """

    model: str
    clients: int
    budget: int
    prompt: int
    answer: int
    dropped: int
    prefixes: Sequence[int]
    known: Sequence[tuple[Sequence[dict[str, str]], str]] = ()


@dataclass
class Clients:
    """Waves of requests of all kinds, each judged when it is answered. Within a wave all decode together once the prompts are in,
    so that decode-only steps lie between mixed ones."""

    web: Any
    load: Load
    seed: int = SEED
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    waves: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.prefixes = [self.tokens(count) for count in self.load.prefixes]

    @property
    def kinds(self) -> list[Any]:
        kinds = [self.sampled, self.structured, self.logprobs, self.prefixed, self.chunked, self.dropped, self.several]
        return [*kinds, self.known] if self.load.known else kinds

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(TOKENS, k=count)

    async def until(self, deadline: float, between: Callable[[], None] = lambda: None) -> None:
        """Whole waves, until one ends after the deadline or with a wrong reply. between: called after each."""
        while time.monotonic() < deadline and not self.wrong:
            chosen = [*self.kinds, *self.rng.choices(self.kinds, k=self.load.clients - len(self.kinds))]
            await asyncio.gather(*(self.judged(kind) for kind in chosen))
            self.waves += 1
            between()

    async def judged(self, kind: Any) -> None:
        name = kind.__name__
        try:
            await kind()
            self.done[name] += 1
        except Exception as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")

    async def ask(self, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
        """The choices of an answer; of a request that ignores the end, as many tokens as it asked for."""
        given = {
            "model": self.load.model,
            "temperature": 1.0,
            "max_tokens": self.rng.randrange(self.load.answer // 10, self.load.answer),
            "seed": self.rng.randrange(1 << 30),
        } | body
        answer = await self.web.post(f"/v1/{path}", json=given)
        assert answer.status_code == 200, answer.text[:500]
        found = answer.json()
        for choice in found["choices"]:
            assert choice["finish_reason"] in ("stop", "length"), choice
        if given.get("ignore_eos"):
            assert found["usage"]["completion_tokens"] == given["max_tokens"] * len(found["choices"]), found["usage"]
        return found["choices"]

    async def sampled(self) -> None:
        await self.ask(prompt=self.tokens(self.rng.randrange(1, self.load.prompt)), top_p=0.9, ignore_eos=True)

    async def structured(self) -> None:
        limit = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        # Words: behind tokens that end within a character, vLLM's detokenizer puts what is left of the prompt into the reply.
        (choice,) = await self.ask(prompt="Write a poem about horses", response_format=limit, max_tokens=120)
        if choice["finish_reason"] == "stop":
            found = json.loads(choice["text"])
            assert found["colour"] in COLOURS and isinstance(found["count"], int), found

    async def logprobs(self) -> None:
        (choice,) = await self.ask(prompt=self.tokens(60), logprobs=5, max_tokens=40, ignore_eos=True)
        rows = choice["logprobs"]
        assert len(rows["token_logprobs"]) == 40
        assert all(math.isfinite(value) and value <= 0 for value in rows["token_logprobs"]), rows["token_logprobs"]

    async def prefixed(self) -> None:
        """Two in turn: whatever else the cache must hold, the second begins as the first did a moment ago."""
        prefix = self.rng.choice(self.prefixes)
        prefix = prefix[: self.rng.randrange(len(prefix) // 2, len(prefix))]
        await self.ask(prompt=prefix + self.tokens(20))
        await self.ask(prompt=prefix + self.tokens(20))

    async def chunked(self) -> None:
        await self.ask(prompt=self.tokens(self.rng.randrange(self.load.budget + 1, 2 * self.load.budget)))

    async def dropped(self) -> None:
        body = {
            "model": self.load.model,
            "prompt": self.tokens(200),
            "max_tokens": self.load.dropped,
            "stream": True,
            "ignore_eos": True,
        }
        left = self.rng.randrange(1, 30)
        async with self.web.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                assert "choices" in json.loads(line.removeprefix("data:")), line
                left -= 1
                if not left:
                    return
        raise AssertionError(f"the stream ended {left} pieces before it was dropped")

    async def several(self) -> None:
        assert len(await self.ask(prompt=self.tokens(30), n=3, max_tokens=30)) == 3

    async def known(self) -> None:
        chat, wanted = self.rng.choice(self.load.known)
        (choice,) = await self.ask("chat/completions", messages=chat, temperature=0, max_tokens=160)
        found = choice["message"]["content"]
        assert found.endswith(wanted), f"expected {wanted!r} at the end, found {found!r}"


def play(url: str, load: Load, warm: float, seconds: float, memory: Callable[[], list[int]]) -> dict[str, Any]:
    """What the clients, the server's metrics and each rank's guard say of a load of so many seconds behind a shorter one, `warm`,
    in which is allocated what is allocated once.

    memory: MiB that the server holds now, in as many parts as the caller likes.
    """
    clients = asyncio.run(_load(url, load, warm, SEED + 1))
    held = [memory()]
    began = time.monotonic()
    if not clients.wrong:
        clients = asyncio.run(_load(url, load, seconds, SEED, lambda: held.append(memory())))
    found = {
        "seconds": round(time.monotonic() - began, 1),
        "clients": load.clients,
        "waves": clients.waves,
        "requests": dict(clients.done),
        "wrong": clients.wrong[:5],
    }
    wait_for("a cache that nobody holds a block of", 60, lambda: asyncio.run(_reset(url, load.model)))
    wait_for("gauges at 0", 30, lambda: not any(metric(url, name) for name in GAUGES))
    held.append(memory())
    time.sleep(1.5)  # a report is shown for a second
    ranks = report(url)["ranks"]
    return found | {
        "tensor_parallel": len(ranks),
        "preemptions": int(metric(url, "vllm:num_preemptions")),
        "prefix_hits": int(metric(url, "vllm:prefix_cache_hits")),
        "memory_mib": {"before_between_and_after_waves": held, "grown": grown(held)},
        "ranks": ranks,
    }


def judge(found: dict[str, Any], load: Load, grown_mib: int) -> None:
    """Hold what `play` found to what holds on every device. grown_mib: what each part of the memory may grow by."""
    assert not found["wrong"], found["wrong"]
    for rank in found["ranks"]:
        assert rank["violations"]["by_reason"] == {}, rank["violations"]["last"][-3:]
        counters = rank["counters"]
        assert counters["audited_steps"] > 5 and counters["shadow_steps"] > 2, counters
        assert rank["steps"]["fast"]["steps"] > 50, rank["steps"]
        assert rank["steps"]["fallback"] == 0, rank["steps"]["by_reason"]
        assert counters["slots_freed"] >= counters["slots_allocated"] - HELD_BY_THE_LAST, counters
    assert found["preemptions"] > 0 and found["prefix_hits"] > 0, "the load tests too little"
    assert set(found["requests"]) == {kind.__name__ for kind in Clients(None, load).kinds}, found["requests"]
    more = found["memory_mib"]["grown"]
    assert max(more) <= grown_mib, f"MiB more than before, part by part: {more}"


def grown(held: Sequence[Sequence[int]]) -> list[int]:
    """By how much the least that each part held in the last third of the time is above that of the first: what is freed goes back
    to the system now and then, and a leak lifts the least."""
    third = max(1, len(held) // 3)
    first, last = ([min(part) for part in zip(*some, strict=True)] for some in (held[:third], held[-third:]))
    return [after - before for before, after in zip(first, last, strict=True)]


async def _load(url: str, load: Load, seconds: float, seed: int, between: Callable[[], None] = lambda: None) -> Clients:
    import httpx

    # The server closes a connection that was idle for 5 s: one that is about to be is not used again.
    limits = httpx.Limits(max_connections=2 * load.clients, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as web:
        clients = Clients(web, load, seed)
        await clients.until(time.monotonic() + seconds, between)
        return clients


async def _reset(url: str, model: str) -> bool:
    """Empty the prefix cache, which vLLM refuses while anybody holds a block; then a step, with which the gauges move and the
    slots that were given up are told."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=60) as web:
        answer = await web.post("/reset_prefix_cache")
        assert answer.status_code == 200, answer.text
        done = answer.json()["success"]
        answer = await web.post("/v1/completions", json={"model": model, "prompt": [11, 12], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        return done
