"""Counting, policy and `require`: what the guard says about the steps it is told of."""

import pytest

from vllm.model_executor.models.kimi_k3_fast.guard import BatchFacts, GraphKey, Guard, GuardStop, Path, Policy
from vllm.model_executor.models.kimi_k3_fast.guard.totals import recompute
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

PREFILL = (Refusal(Reason.STEP_PREFILL, "3 prompt tokens"),)
MANY = (Refusal(Reason.STEP_TOO_MANY_TOKENS, "expected at most 64, found 80"),)


def eager(tokens: int, *requests: str) -> BatchFacts:
    return BatchFacts("none", tokens, tokens, len(requests), len(requests), True, requests)


def replay(tokens: int, padded: int) -> BatchFacts:
    return BatchFacts("full", tokens, padded, tokens, padded, True, tuple(f"r{i}" for i in range(tokens)))


def test_steps_are_counted_by_path_reason_and_key():
    guard = Guard()
    for _ in range(3):
        guard.open_step(eager(2, "a", "b"))
        guard.close_step(Path.FAST, (), "decode/t2", 2, 2, 2, 0)
    guard.open_step(eager(7, "c"))
    guard.close_step(Path.STANDARD, (*PREFILL, *MANY), None, 1, 7, 0, 0)
    steps = guard.report()["steps"]
    assert steps["fast"] == {"steps": 3, "requests": 6, "tokens": 6, "decode_tokens": 6, "padded_rows": 0}
    assert steps["standard"] == {"steps": 1, "requests": 1, "tokens": 7, "decode_tokens": 0, "padded_rows": 0}
    assert steps["by_reason"] == {"step_prefill": 1, "step_too_many_tokens": 1}, "every reason is counted, not the first"
    assert guard.report()["plan_keys"]["decode/t2"]["fast"] == 3


def test_a_replayed_graph_closes_its_own_record_with_padded_rows():
    guard = Guard()
    guard.planned(GraphKey("full", 4, 4, True), "decode/t4")
    guard.planned(GraphKey("full", 8, 8, True), MANY)
    guard.open_step(replay(3, 4))
    guard.open_step(replay(8, 8))
    report = guard.report()
    assert report["steps"]["fast"]["padded_rows"] == 1
    assert report["steps"]["by_reason"] == {"step_too_many_tokens": 1}
    assert report["violations"]["by_reason"] == {}


def test_a_replayed_graph_nobody_planned_is_a_violation():
    guard = Guard()
    guard.open_step(replay(3, 4))
    assert guard.report()["violations"]["by_reason"] == {"graph_unplanned": 1}


def test_a_step_that_never_says_its_path_is_a_violation():
    guard = Guard()
    guard.open_step(eager(1, "a"))
    guard.open_step(eager(1, "a"))
    guard.close_step(Path.FAST, (), "k", 1, 1, 1, 0)
    assert guard.report()["violations"]["by_reason"] == {"step_unrecorded": 1}
    guard.open_step(eager(1, "a"))
    guard.abandon_step()
    guard.open_step(eager(1, "a"))
    assert guard.report()["violations"]["by_reason"] == {"step_unrecorded": 1}


def test_warm_up_forwards_are_not_steps_once_the_runner_opens_them():
    guard = Guard()
    guard.close_step(Path.STANDARD, PREFILL, None, 1, 1, 0, 0)
    guard.opens_expected = guard.watching = True
    guard.close_step(Path.STANDARD, PREFILL, None, 1, 1, 0, 0)
    report = guard.report()
    assert report["steps"]["standard"]["steps"] == 1
    assert report["counters"]["unscheduled_forwards"] == 1


def test_require_fails_the_requests_of_a_decode_step_that_fell_back():
    guard = Guard(Policy(mode="require"))
    guard.open_step(eager(2, "a", "b"))
    guard.close_step(Path.STANDARD, MANY, None, 2, 2, 2, 0)
    assert guard.take_failing() == {"a": Reason.STEP_TOO_MANY_TOKENS, "b": Reason.STEP_TOO_MANY_TOKENS}
    assert guard.take_failing() == {}, "each request is failed once"
    assert guard.report()["counters"]["require_failed_steps"] == 1


@pytest.mark.parametrize(
    ("policy", "refusals", "decode_tokens"),
    [
        (Policy(mode="auto"), MANY, 2),
        (Policy(mode="require", allow=("step_too_many_tokens",)), MANY, 2),
        (Policy(mode="require"), PREFILL, 1),
    ],
    ids=["auto", "allowed reason", "mixed step"],
)
def test_require_leaves_alone_what_it_should(policy, refusals, decode_tokens):
    guard = Guard(policy)
    guard.open_step(eager(2, "a", "b"))
    guard.close_step(Path.STANDARD, refusals, None, 2, 2, decode_tokens, 0)
    assert guard.take_failing() == {}


@pytest.mark.parametrize(("policy", "retired"), [("report", False), ("quarantine", True)])
def test_what_a_violation_does(policy, retired):
    guard = Guard(Policy(policy=policy))
    guard.violation(Reason.WRITE_OUTSIDE, {"plan_key": "decode/t1", "slot": 3})
    assert guard.quarantined("decode/t1") is retired
    assert guard.report()["quarantined"] == ({"decode/t1": "write_outside"} if retired else {})


def test_policy_stop_raises_what_the_engine_shows():
    guard = Guard(Policy(policy="stop"))
    with pytest.raises(GuardStop, match=r"write_outside.*policy `stop`"):
        guard.violation(Reason.WRITE_OUTSIDE, {"slot": 3})


def test_a_flood_of_violations_is_counted_not_listed():
    guard = Guard()
    for slot in range(1000):
        guard.violation(Reason.WRITE_OUTSIDE, {"slot": slot})
    report = guard.report()
    assert report["violations"]["by_reason"] == {"write_outside": 1000}
    assert len(report["violations"]["last"]) == 100


def test_the_report_follows_from_the_event_file(tmp_path):
    guard = Guard(Policy(events_path=str(tmp_path / "events.jsonl")))
    guard.deployment(MANY, {"tp": "1"})
    for tokens in (1, 2, 3):
        guard.open_step(eager(tokens, *"abc"[:tokens]))
        guard.close_step(Path.FAST, (), f"decode/t{tokens}", tokens, tokens, tokens, 0)
        guard.flush()
    guard.violation(Reason.SHADOW_STATE, {"plan_key": "decode/t2"})
    report = guard.report()
    assert guard.events.drain()
    del report["events"]
    assert report["decisions"]["step"] == 3
    assert recompute(guard.events.files()) == report


def test_a_rank_named_before_its_settings_reports_under_its_name() -> None:
    """As the workers of a tensor-parallel group do; no event file is wanted, so none is renewed."""
    watching = Guard()
    watching.rank = "rank1"
    watching.configure(Policy(mode="require"))
    found = watching.report()
    assert found["rank"] == "rank1" and found["policy"]["mode"] == "require"
