"""Checked graphs on the CPU: the caches of two kinds of layers in one pool, and functions in the place of graphs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.fast import cuda_shadow
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Caches
from vllm.model_executor.models.kimi_k3_fast.guard import GraphKey, Guard, Policy
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

SLOTS, BLOCK, PAGE = 6, 16, 8192  # bytes of a page: a state [2, 16, 16] fp32 and a conv state [3, 64] bf16, or 16 latent rows
STATE_SLOTS, LATENT_PAGES = (1, 2), (3, 4)


class Pool:
    """Four real rows of a graph for six: two requests, each with a state slot and a latent page, run twice side by side."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        raw = torch.zeros(SLOTS * PAGE, dtype=torch.uint8)
        floats, halves = raw.view(torch.float32), raw.view(torch.bfloat16)
        self.state = floats.as_strided((SLOTS, 2, 16, 16), (PAGE // 4, 256, 16, 1))
        self.conv = halves.as_strided((SLOTS, 3, 64), (PAGE // 2, 64, 1), 2048 // 2)
        self.latent = halves.as_strided((SLOTS, BLOCK, 128), (PAGE // 2, 128, 1))
        for slot in STATE_SLOTS:
            self.state[slot].normal_()
            self.conv[slot].normal_()
        for page in LATENT_PAGES:
            self.latent[page].normal_()
        self.hidden = torch.zeros(8, 32, dtype=torch.bfloat16)
        self.row = torch.randn(2, 128).bfloat16()

    def step(self, factor: float = 1.0) -> None:
        """What a decode step does: new states, one row of each page, hidden states of all rows; reads what it writes."""
        for slot in STATE_SLOTS:
            self.state[slot] = self.state[slot] * 0.9 * factor
            self.conv[slot] = self.conv[slot].roll(-1, 0) * factor
        for i, page in enumerate(LATENT_PAGES):
            self.latent[page, 5] = self.row[i] * factor
        self.hidden[:6] = (self.state[1].flatten()[:32] * factor).bfloat16()

    def watch(self, fast: Callable[[], None], **every: int) -> tuple[cuda_shadow.Checked, Guard]:
        guard = Guard(Policy(policy="report", **every))
        caches = Caches({"k": self.conv}, {"k": self.state}, {"m": self.latent})
        padding = torch.tensor([False] * 4 + [True] * 2)
        watch = cuda_shadow.Watch(guard, caches, lambda: self.hidden, padding)
        graphs = (SimpleNamespace(replay=fast), SimpleNamespace(replay=self.step))
        return cuda_shadow.Checked(watch, 6, "decode/6/cute", *graphs), guard


def found(guard: Guard) -> dict[str, int]:
    return guard.report()["violations"]["by_reason"]


def test_a_sound_step_passes_and_leaves_the_caches_of_one_step() -> None:
    pool, once = Pool(), Pool()
    graph, guard = pool.watch(pool.step, audit_every=1, shadow_every=1)
    graph.replay()
    once.step()
    assert found(guard) == {}
    assert torch.equal(pool.state, once.state) and torch.equal(pool.latent[3], once.latent[3])
    counters = guard.report()["counters"]
    assert (counters["audited_steps"], counters["shadow_steps"]) == (1, 1)
    assert 0 <= guard.report()["gauges"]["shadow_worst_ratio"] < 1


def test_only_every_nth_replay_is_checked() -> None:
    pool, calls = Pool(), []
    graph, guard = pool.watch(lambda: calls.append(pool.step()), audit_every=3)
    for _ in range(7):
        graph.replay()
    assert len(calls) == 7 and guard.report()["counters"]["audited_steps"] == 2


def test_an_audited_step_is_the_fast_one_and_a_shadowed_one_is_stock() -> None:
    for every, factor in ({"audit_every": 1}, 1.01), ({"shadow_every": 1}, 1.0):
        pool, wanted = Pool(), Pool()
        graph, _ = pool.watch(lambda pool=pool: pool.step(1.01), **every)
        graph.replay()
        wanted.step(factor)
        assert torch.equal(pool.state, wanted.state) and torch.equal(pool.hidden, wanted.hidden)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.state[5].fill_(1.0), "write_outside"),
        (lambda p: p.state[0].fill_(1.0), "null_block_written"),
        (lambda p: p.latent[3, 6].fill_(1.0), "write_outside"),
        (lambda p: p.conv[4, 0, 0].fill_(1.0), "write_outside"),
    ],
    ids=["a free slot", "the null block", "the next row", "another page"],
)
def test_a_write_that_stock_does_not_do_is_found(spoil: Callable, reason: str) -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), spoil(pool)), audit_every=1)
    graph.replay()
    assert set(found(guard)) == {reason}
    assert guard.report()["violations"]["last"][-1]["where"]["plan_key"] == "decode/6/cute"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.hidden[:4].mul_(1.5), "shadow_logits"),
        (lambda p: p.hidden[2].fill_(float("nan")), "shadow_logits"),
        (lambda p: p.state[2].mul_(1.5), "shadow_state"),
        (lambda p: p.latent[4, 5].neg_(), "shadow_state"),
        (lambda p: p.conv[1].copy_(p.conv[1].roll(1, 0)), "shadow_state"),
    ],
    ids=["all rows", "one row NaN", "a state", "a latent row", "a convolution state"],
)
def test_another_result_than_stocks_is_found(spoil: Callable, reason: str) -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), spoil(pool)), shadow_every=1)
    graph.replay()
    assert set(found(guard)) == {reason}


def test_padded_rows_are_not_compared() -> None:
    pool = Pool()
    graph, guard = pool.watch(lambda: (pool.step(), pool.hidden[4:].fill_(9.0)), shadow_every=1)
    graph.replay()
    assert found(guard) == {}


def test_a_graph_of_another_width_is_found() -> None:
    """It leaves the last rows and their states as they were."""
    pool = Pool()

    def narrow() -> None:
        pool.state[1] = pool.state[1] * 0.9
        pool.hidden[:2] = pool.state[1].flatten()[:32].bfloat16()

    graph, guard = pool.watch(narrow, shadow_every=1)
    graph.replay()
    assert {"shadow_logits", "shadow_state"} <= set(found(guard))


class Mode(Enum):
    FULL = 1
    PIECEWISE = 2


def test_stock_graphs_are_captured_with_the_fast_path_looking_away() -> None:
    fast = SimpleNamespace(stage=lambda *batch: pytest.fail("the fast path staged stock's capture"), staged="something")
    manager = SimpleNamespace(graphs={"4": "fast"}, _capture_descs={Mode.FULL: ["4"], Mode.PIECEWISE: ["8"]})
    stage, seen = fast.stage, []

    def capture() -> None:
        fast.stage(1, 2, True)
        seen.extend(manager._capture_descs)
        manager.graphs["4"] = "stock"

    assert cuda_shadow.stock_graphs(manager, fast, capture) == {"4": "stock"}
    assert seen == [Mode.FULL] and set(manager._capture_descs) == set(Mode)
    assert manager.graphs == {"4": "fast"} and fast.stage is stage and fast.staged is None


class Descriptor(NamedTuple):
    num_tokens: int


def test_only_graphs_with_a_plan_are_put_under_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shadow, "_check_room", lambda *memory, **copies: None)
    pool, guard = Pool(), Guard(Policy(policy="report", audit_every=1))
    guard.planned(GraphKey("full", 6, 6, True), "decode/6/cute")
    guard.planned(GraphKey("full", 8, 8, True), (Refusal(Reason.STEP_TOO_MANY_TOKENS, "8 rows"),))
    fast, stock = SimpleNamespace(replay=pool.step), SimpleNamespace(replay=pool.step)
    six, eight = Descriptor(6), Descriptor(8)
    manager = SimpleNamespace(graphs={six: fast, eight: fast}, _capture_descs={}, hidden_states=pool.hidden)
    caches = Caches({"k": pool.conv}, {"k": pool.state}, {"m": pool.latent})
    path = SimpleNamespace(guard=guard, executor=SimpleNamespace(caches=caches), stage=None, staged=None)
    capture = lambda: manager.graphs.update({six: stock, eight: stock})  # noqa: E731
    cuda_shadow.watch(manager, path, capture, torch.zeros(8, dtype=torch.bool))
    assert isinstance(manager.graphs[six], cuda_shadow.Checked) and manager.graphs[eight] is fast
