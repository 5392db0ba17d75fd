"""The report endpoint under hostile use, the summary, and the series: on an app as vLLM builds it, with a fake engine
client."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, Guard, Path, api, metrics
from vllm.model_executor.models.kimi_k3_fast.guard.summary import agree, status, summarise
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

MANY = (Refusal(Reason.STEP_TOO_MANY_TOKENS, "80"),)
PREFILL = (Refusal(Reason.STEP_PREFILL),)


def guard_with(fast: int = 0, fallback: int = 0, prompt: int = 0, rank: str = "rank0") -> Guard:
    guard = Guard(rank=rank)
    guard.deployment((), {})
    kinds = ((Path.FAST, (), 1, fast), (Path.STANDARD, MANY, 1, fallback), (Path.STANDARD, PREFILL, 0, prompt))
    for path, refusals, decode, count in kinds:
        for _ in range(count):
            guard.open_step(BatchFacts("none", 1, 1, 1, 1, True, ("a",)))
            guard.close_step(path, refusals, "decode/t1" if path is Path.FAST else None, 1, 1, decode, 0)
    return guard


class Engine:
    """Answers the report call like vLLM's client does; counts the calls."""

    def __init__(self, *guards: Guard, delay: float = 0.0) -> None:
        self.guards, self.delay, self.calls = guards, delay, 0

    async def collective_rpc(self, method: str):
        assert method == api.METHOD
        self.calls += 1
        await asyncio.sleep(self.delay)
        return [json.dumps(guard.report()) for guard in self.guards]


async def client_for(engine: Engine | None):
    app = FastAPI()
    endpoints = api.Endpoints(lambda: {"patches": {}})
    endpoints.attach_router(app)
    if engine is not None:
        app.state.k3fast_reports = api.ReportCache(lambda: engine.collective_rpc(api.METHOD))
    return app, httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")


def test_before_the_engine_is_ready_the_answer_is_a_clear_503():
    async def go():
        _, client = await client_for(None)
        answer = await client.get("/k3fast/report")
        assert answer.status_code == 503
        assert "not ready" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert (await client.get("/k3fast")).status_code == 200, "the page itself needs no engine"

    asyncio.run(go())


def test_a_thousand_requests_at_once_cost_one_call():
    async def go():
        engine = Engine(guard_with(fast=3), delay=0.05)
        _, client = await client_for(engine)
        answers = await asyncio.gather(*(client.get("/k3fast/report") for _ in range(1000)))
        assert {answer.status_code for answer in answers} == {200}
        assert engine.calls == 1

    asyncio.run(go())


def test_requests_that_give_up_do_not_break_the_call_of_the_others():
    async def go():
        engine = Engine(guard_with(fast=1), delay=0.05)
        cache = api.ReportCache(lambda: engine.collective_rpc(api.METHOD))
        first, second = asyncio.ensure_future(cache.get()), asyncio.ensure_future(cache.get())
        await asyncio.sleep(0.01)
        first.cancel()
        assert (await second)["schema"] == 1
        assert engine.calls == 1

    asyncio.run(go())


def test_an_engine_that_does_not_answer_is_said_to_be_so():
    async def go():
        engine = Engine(guard_with(), delay=60)
        app, client = await client_for(engine)
        app.state.k3fast_reports = api.ReportCache(lambda: engine.collective_rpc(api.METHOD), timeout=0.05)
        answer = await client.get("/k3fast/report")
        assert answer.status_code == 503
        assert "no report within" in answer.json()["error"]["message"]

    asyncio.run(go())


@pytest.mark.parametrize("query", ["?x=1", "?rank=" + "9" * 3000, "?%00=%ff", "?ranks[]=1&ranks[]=2"])
def test_unknown_query_parameters_change_nothing(query):
    async def go():
        _, client = await client_for(Engine(guard_with(fast=2)))
        answer = await client.get(f"/k3fast/report{query}")
        assert answer.status_code == 200
        assert answer.json()["ranks"][0]["steps"]["fast"]["steps"] == 2

    asyncio.run(go())


def test_only_get_is_answered():
    async def go():
        _, client = await client_for(Engine(guard_with()))
        assert (await client.post("/k3fast/report", json={})).status_code == 405

    asyncio.run(go())


def test_a_worker_behind_any_executors_wrapper_answers_for_its_rank(monkeypatch):
    """Every executor calls workers by the method's name: multiprocessing on the wrapper's worker, Ray's by `execute_method`."""
    import vllm.plugins
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    monkeypatch.delattr(WorkerBase, api.METHOD, raising=False)
    monkeypatch.setattr(vllm.plugins, "load_endpoint_plugins", vllm.plugins.load_endpoint_plugins)
    api.install(lambda: json.dumps(guard_with(fast=2, rank="rank3").report()))
    wrapper = WorkerWrapperBase(rpc_rank=3)
    wrapper.worker = WorkerBase.__new__(WorkerBase)
    report = json.loads(run_method(wrapper, api.METHOD, (), {}))
    assert (report["rank"], report["steps"]["fast"]["steps"]) == ("rank3", 2)


def violated() -> Guard:
    guard = guard_with(fast=5)
    guard.violation(Reason.WRITE_OUTSIDE, {"slot": 3})
    return guard


def refused() -> Guard:
    guard = guard_with(fallback=5)
    guard.deployment(MANY, {})
    return guard


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (guard_with(), "idle"),
        (guard_with(fast=1000, fallback=1, prompt=1000), "healthy"),
        (guard_with(fast=50, fallback=10), "falling back"),
        (refused(), "refused"),
        (violated(), "violation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_status_is_the_worst_that_holds(guard, expected):
    assert status([guard.report()]) == expected
    if expected in ("refused", "violation"):
        assert status([guard_with(fast=1000).report(), guard.report()]) == expected, "one rank is enough"


def test_ranks_with_different_decisions_at_the_same_step_are_seen():
    same, other = guard_with(fast=4), guard_with(fast=3, fallback=1)
    assert agree([same.report(), guard_with(fast=4).report()])
    assert not agree([same.report(), other.report()])
    assert status([same.report(), other.report()]) == "violation"


def test_the_series_say_what_the_report_says():
    guard = guard_with(fast=7, fallback=2)
    guard.violation(Reason.SHADOW_STATE, {})
    report = summarise([guard.report()])
    registry = CollectorRegistry()
    registry.register(metrics.ReportCollector(lambda: report))
    text = generate_latest(registry).decode()
    assert 'k3fast_steps_total{path="fast",rank="rank0"} 7.0' in text
    assert 'k3fast_fallback_steps_total{rank="rank0"} 2.0' in text
    assert 'k3fast_standard_reasons_total{rank="rank0",reason="step_too_many_tokens"} 2.0' in text
    assert 'k3fast_violations_total{rank="rank0",reason="shadow_state"} 1.0' in text


def test_before_the_first_report_there_are_no_series_and_no_error():
    registry = CollectorRegistry()
    registry.register(metrics.ReportCollector(lambda: None))
    assert generate_latest(registry) == b""


def test_every_series_is_documented_with_bounded_labels():
    for name, (kind, labels, text) in metrics.SERIES.items():
        assert name.startswith("k3fast_") and kind in ("counter", "gauge") and text.endswith(".")
        assert set(labels) <= {"rank", "path", "reason", "name"}
    assert {name for name, *_ in metrics.samples(violated().report())} <= set(metrics.SERIES)
