"""64 concurrent clients on one server with audit and shadow: sampling, structured output, logprobs, shared prefixes, long prompts
in chunks, streams that are dropped, and less cache than they need. No violation, no wrong reply, nothing left behind.

Twenty seconds here; the evidence is of ten minutes:

    K3FAST_LOAD_SECONDS=600 K3FAST_LOAD_RESULT=benchmarks/results/h200/load_64_clients.json pytest tests/gpu/test_load_cuda.py
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from slices import BUDGET, NAME, gpu_memory, metric, report, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SECONDS = float(os.environ.get("K3FAST_LOAD_SECONDS", "20"))
RESULT = os.environ.get("K3FAST_LOAD_RESULT", "")
CLIENTS = 64
SEED = 5
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


class Clients:
    """Waves of 64 requests of all kinds, each judged when it is answered. Within a wave all decode together once the prompts are
    in, so that decode-only steps lie between mixed ones."""

    def __init__(self, web: Any) -> None:
        self.web, self.rng = web, random.Random(SEED)
        self.prefixes = [self.tokens(n) for n in (900, 1500, 2400)]
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 1000) for _ in range(count)]

    async def until(self, deadline: float) -> None:
        kinds = [self.sampled, self.structured, self.logprobs, self.prefixed, self.chunked, self.dropped, self.several]
        while time.monotonic() < deadline and not self.wrong:
            chosen = [*kinds, *self.rng.choices(kinds, k=CLIENTS - len(kinds))]
            await asyncio.gather(*(self.judged(kind) for kind in chosen))

    async def judged(self, kind: Any) -> None:
        name = kind.__name__
        try:
            await kind()
            self.done[name] += 1
        except Exception as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")

    async def ask(self, **body: Any) -> list[dict[str, Any]]:
        given = {
            "model": NAME,
            "temperature": 1.0,
            "max_tokens": self.rng.randrange(20, 200),
            "seed": self.rng.randrange(1 << 30),
        }
        answer = await self.web.post("/v1/completions", json={**given, **body})
        assert answer.status_code == 200, answer.text[:500]
        choices = answer.json()["choices"]
        for choice in choices:
            assert choice["finish_reason"] in ("stop", "length"), choice
        return choices

    async def sampled(self) -> None:
        await self.ask(prompt=self.tokens(self.rng.randrange(1, 600)), top_p=0.9, ignore_eos=True)

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
        prefix = self.rng.choice(self.prefixes)
        await self.ask(prompt=prefix[: self.rng.randrange(len(prefix) // 2, len(prefix))] + self.tokens(20))

    async def chunked(self) -> None:
        await self.ask(prompt=self.tokens(self.rng.randrange(BUDGET + 1, 2 * BUDGET)))

    async def dropped(self) -> None:
        body = {"model": NAME, "prompt": self.tokens(200), "max_tokens": 2000, "stream": True, "ignore_eos": True}
        async with self.web.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen > self.rng.randrange(1, 30):
                    return

    async def several(self) -> None:
        assert len(await self.ask(prompt=self.tokens(30), n=3, max_tokens=30)) == 3


def test_64_clients_with_audit_and_shadow(load_server: Any) -> None:
    """A checked step copies the caches and runs three times: one of the two in eight leaves the server a server."""
    httpx = pytest.importorskip("httpx")
    url = load_server.url

    async def load(seconds: float) -> Clients:
        limits = httpx.Limits(max_connections=2 * CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as web:
            clients = Clients(web)
            await clients.until(time.monotonic() + seconds)
            return clients

    warm = asyncio.run(load(min(10.0, SECONDS / 2)))  # what is allocated once is allocated now
    assert not warm.wrong, warm.wrong[:5]
    memory = gpu_memory()
    clients = asyncio.run(load(SECONDS))
    assert not clients.wrong, clients.wrong[:5]
    wait_for("no request left", 60, lambda: metric(url, "vllm:num_requests_running") == 0)
    asyncio.run(reset(url))
    wait_for("an empty cache", 30, lambda: metric(url, "vllm:kv_cache_usage_perc") == 0)
    grown = [after - before for before, after in zip(memory, gpu_memory(), strict=True)]
    time.sleep(1.5)
    ranks = report(url)["ranks"]
    found = {
        "seconds": SECONDS,
        "clients": CLIENTS,
        "tensor_parallel": len(ranks),
        "requests": dict(clients.done),
        "preemptions": metric(url, "vllm:num_preemptions"),
        "prefix_hits": metric(url, "vllm:prefix_cache_hits"),
        "memory_grown_mib": grown,
        "ranks": ranks,
    }
    if RESULT:
        Path(RESULT).write_text(json.dumps(found, indent=1) + "\n")
    for rank in ranks:
        assert rank["violations"]["by_reason"] == {}, rank["violations"]["last"][-3:]
        counters = rank["counters"]
        assert counters["audited_steps"] > 5 and counters["shadow_steps"] > 2, counters
        assert rank["steps"]["fast"]["steps"] > 50, rank["steps"]
        assert rank["steps"]["fallback"] == 0, rank["steps"]["by_reason"]
        # The last request's slots are told with the next step, which does not come.
        assert counters["slots_freed"] >= counters["slots_allocated"] - 16, counters
    assert found["preemptions"] > 0 and found["prefix_hits"] > 0, "the load tests too little"
    assert min(found["requests"].values()) > 0 and len(found["requests"]) == 7
    assert max(grown) <= 256, f"MiB on each GPU more than before: {grown}"


async def reset(url: str) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=60) as web:
        assert (await web.post("/reset_prefix_cache")).status_code == 200
        # The gauge moves with a step, and the slots that the cache gave up are told with it.
        answer = await web.post("/v1/completions", json={"model": NAME, "prompt": [11, 12], "max_tokens": 2})
        assert answer.status_code == 200
