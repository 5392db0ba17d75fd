"""A thousand report requests while requests decode: every one is answered, none is lost, and nobody's tokens change."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import httpx
import pytest

REQUESTS = 1000


def body(seed: int) -> dict:
    prompt = f"K3 decodes {seed}"
    return {"model": "tiny-k3", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def test_a_thousand_reports_during_decode_lose_nothing(server) -> None:
    async def go() -> tuple[list, list, list]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as web:
            alone = await asyncio.gather(*(web.post("/v1/completions", json=body(i)) for i in range(4)))
            asked = [web.get(f"/k3fast/report?unknown={i}") for i in range(REQUESTS)]
            beside = [web.post("/v1/completions", json=body(i)) for i in range(4)]
            answers = await asyncio.gather(*beside, *asked)
            return alone, answers[:4], answers[4:]

    alone, beside, reports = asyncio.run(go())
    assert {answer.status_code for answer in (*alone, *beside, *reports)} == {200}
    texts = [[answer.json()["choices"][0]["text"] for answer in answers] for answers in (alone, beside)]
    assert texts[0] == texts[1]
    assert all(report.json()["schema"] == 1 for report in reports)


@pytest.mark.parametrize("path", ["/k3fast/report?%00", "/k3fast/report?rank=-1&rank=x", "/k3fast?x=<script>"])
def test_queries_nobody_knows_are_passed_over(server, path) -> None:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        assert answer.status == 200


def test_other_methods_are_refused(server) -> None:
    request = urllib.request.Request(server.url + "/k3fast/report", data=json.dumps({}).encode(), method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 405
