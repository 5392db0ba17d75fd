"""What the patched lines call, without an engine: the finite check, its mapping to requests, ownership, ending requests."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast import guard
from vllm.model_executor.models.kimi_k3_fast.patches import hooks

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    monkeypatch.setattr(guard, "_guard", guard.Guard())
    for name, value in (
        ("ran", {}),
        ("_outbox", []),
        ("_owner_of", {}),
        ("process", {}),
        ("_owner", ""),
        ("_unheard_steps", 0),
        ("check", lambda: None),
    ):
        monkeypatch.setattr(hooks, name, value)
    guard.current().watching = True
    return guard.current()


def blocks(*ids: int):
    return [SimpleNamespace(block_id=i, is_null=i == 0) for i in ids]


def test_a_row_is_bad_when_no_token_can_be_drawn_from_it():
    logits = torch.tensor([[1.0, -INF], [-INF, -INF], [NAN, 1.0], [INF, 1.0], [0.0, 2.0]])
    assert hooks.rows_not_finite(logits).tolist() == [0, 1, 1, 1, 0]
    assert hooks.rows_not_finite(logits.bfloat16()).tolist() == [0, 1, 1, 1, 0]


def test_rows_of_drafts_count_for_their_request():
    logits = torch.zeros(6, 4)
    logits[4, 1] = NAN  # a draft row of c
    drafts = {"a": [5, 6], "c": [7]}
    bad = hooks.begin_check(logits, ["a", "b", "c"], drafts, False, None)
    assert hooks.end_check(bad, ["a", "b", "c"], {}) == {"a": 0, "b": 0, "c": 1}
    with_ends = hooks.per_request(hooks.rows_not_finite(logits), torch.tensor([0, 3, 4, 6], dtype=torch.int32))
    assert with_ends.tolist() == [0, 0, 1]


def test_when_nobody_watches_vllms_own_values_pass_through(watching):
    watching.watching = False
    logits = torch.full((1, 2), NAN)
    assert hooks.begin_check(logits, ["a"], {}, False, None) is None
    assert hooks.end_check(None, ["a"], {"a": 3}) == {"a": 3}
    output = SimpleNamespace(num_nans_in_logits={"a": 2})
    hooks.mark(output, False)
    assert hooks.must_end(output, "a") is None, "vLLM's own counting of NaNs ends nothing"
    hooks.blocks_allocated(blocks(1))
    step = SimpleNamespace()
    hooks.scheduled(step)
    assert vars(step) == {}


def test_marks_end_exactly_the_marked_requests_and_are_counted(watching):
    output = SimpleNamespace(num_nans_in_logits={"a": 0, "b": 1})
    watching.fail_request("c", guard.core.Reason.STEP_TOO_MANY_TOKENS)
    hooks.mark(output, False)
    ended = {request: hooks.must_end(output, request) for request in "abcd"}
    assert ended == {"a": None, "b": "non_finite", "c": "step_too_many_tokens", "d": None}
    report = watching.report()
    assert report["violations"]["by_reason"] == {"non_finite": 1}
    assert report["violations"]["last"][0]["where"]["request"] == "b"


def test_ownership_rides_on_the_step_that_follows_it(watching):
    hooks.owner("a")
    hooks.blocks_allocated(blocks(4, 5))
    hooks.owner("b")
    hooks.blocks_shared(blocks(0, 4))
    hooks.blocks_freed(blocks(5), blocks())
    first, second = SimpleNamespace(), SimpleNamespace()
    hooks.scheduled(first)
    hooks.scheduled(second)
    hooks.step_received(first)
    hooks.step_received(second)
    assert watching.ledger.writer == {4: "a"}
    assert watching.report()["counters"] == {"slots_allocated": 2, "slots_shared": 1, "slots_freed": 1}


def test_every_block_a_bad_request_filled_is_forgotten_freed_ones_too():
    hooks.owner("bad")
    hooks.blocks_allocated(blocks(1, 2, 3))
    hooks.blocks_freed(blocks(1, 2))
    hooks.owner("other")
    hooks.blocks_allocated(blocks(2))
    evicted = []
    manager = SimpleNamespace(get_block_ids=lambda request: ([0, 9, 3],), evict_blocks=evicted.append)
    hooks.forget_blocks(manager, "bad")
    assert evicted == [{1, 3, 9}], "not the null block, and not what another request has overwritten"


def test_state_may_be_copied_to_ones_own_slot_only(watching):
    hooks.owner("a")
    hooks.blocks_allocated(blocks(4))
    step = SimpleNamespace()
    hooks.scheduled(step)
    hooks.step_received(step)
    hooks.state_copied("a", 3, 4)
    assert watching.report()["counters"]["slots_copied"] == 1
    assert watching.report()["violations"]["by_reason"] == {}
    hooks.state_copied("b", 3, 4)
    hooks.state_copied("a", 4, 0)
    found = watching.report()["violations"]
    assert found["by_reason"] == {"slot_not_owned": 1, "null_block_written": 1}
    assert found["last"][0]["where"] | {"step": 0} == {"step": 0, "slot": 4, "request": "b", "owner": "a"}


@pytest.mark.parametrize("how", ["says nothing", "says why"])
def test_an_engine_core_without_the_patch_is_seen_and_no_step_is_fast(watching, how):
    watching.deployment((), {"tp": "1"})
    watching.planned(guard.GraphKey("full", 1, 1, True), "decode/t1")
    said = {"patches": {"2": {"targets": {}, "ran": {}, "refusal": "scheduler.py: another function in its place"}}, "silent": []}
    words = {hooks._PROCESS: said} if how == "says why" else {}
    for _ in range(2 * hooks.UNHEARD):
        hooks.step_received(SimpleNamespace(total_num_scheduled_tokens=0))
    assert not watching.late_refusals, "a step without tokens needs no block"
    for _ in range(2 * hooks.UNHEARD):
        hooks.step_received(SimpleNamespace(total_num_scheduled_tokens=1, **words))
    report = watching.report()
    assert report["violations"]["by_reason"] == {"patch_not_run": 1}
    assert report["violations"]["last"][0]["where"] | {"step": 0} == {"step": 0, "patch": "2", "process": "engine core"}
    assert report["deployment"]["selected"] is False
    assert [refusal["reason"] for refusal in report["deployment"]["refusals"]] == ["patch_failed"]
    assert watching.quarantined("decode/t1"), "what a graph has baked in is retired"
    assert [refusal.reason.code for refusal in watching.late_refusals] == ["patch_failed"]


def test_an_engine_core_that_tells_of_blocks_is_heard(watching):
    hooks.owner("a")
    hooks.blocks_allocated(blocks(4))
    step = SimpleNamespace(total_num_scheduled_tokens=1)
    hooks.scheduled(step)
    hooks.step_received(step)
    for _ in range(2 * hooks.UNHEARD):
        hooks.step_received(SimpleNamespace(total_num_scheduled_tokens=1))
    assert watching.report()["violations"]["by_reason"] == {}


def test_the_engine_core_sends_its_patch_states_and_silent_patches(watching):
    state = {"targets": {}, "ran": {"scheduled": True}, "refusal": ""}
    hooks.process.update(patches={"2": state}, silent=[("3", "never ran")])
    step = SimpleNamespace(total_num_scheduled_tokens=1)
    hooks.scheduled(step)
    hooks.step_received(step)
    report = watching.report()
    assert report["patches"]["engine core 2"]["ran"] == {"scheduled": True}
    assert report["violations"]["by_reason"] == {"patch_not_run": 1}
    assert hooks.process == {}


def test_a_batch_opens_a_step_with_real_and_padded_rows(watching):
    hooks.batch_dispatched("NONE", (3, 4), (3, None), True, ["a", "b", "c"])
    assert watching._open == guard.BatchFacts("none", 3, 4, 3, 3, True, ("a", "b", "c"))


@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("drafts", [{}, {"a": [5, 6], "c": [7]}])
def test_the_finite_check_never_waits_for_the_gpu(asynchronous, drafts):
    ids = ["a", "b", "c"]
    logits = torch.zeros(3 + sum(map(len, drafts.values())), 1000, device="cuda", dtype=torch.bfloat16)
    logits[-1, 7] = NAN
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bad = hooks.begin_check(logits, ids, drafts, asynchronous, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert bad.is_cuda is asynchronous
    assert hooks.end_check(bad, ids, {}) == {"a": 0, "b": 0, "c": 1}
