"""The gate against servers that err in one way each, through real lm-eval tasks with the tiny suite's own items."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import Behaviour, serve

from vllm.model_executor.models.kimi_k3_fast.evaluation import arm as arms
from vllm.model_executor.models.kimi_k3_fast.evaluation import run, stats, suites

Judged = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(evals: Path) -> dict[str, tuple[str, int]]:
    """Right reply and prompt length by the prompt's last message (prefixes and starts make them distinct)."""
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(evals / "tasks"), include_defaults=False).load(["k3_tiny_mrcr_2", "k3_tiny_arith"])[
        "tasks"
    ]
    docs = [doc for task in tasks.values() for doc in task.test_docs()]
    return {json.loads(d["prompt"])[-1]["content"]: (d["reply"], d["prompt_tokens"]) for d in docs}


@pytest.fixture
def right(answers: dict[str, tuple[str, int]]) -> Behaviour:
    """A server that answers everything rightly, all on the fast path."""
    return Behaviour(
        answer=lambda messages: (answers[messages[-1]["content"]][0], "stop"),
        prompt_tokens=lambda messages: answers[messages[-1]["content"]][1],
    )


@pytest.fixture
def judged(evals: Path, tmp_path: Path) -> Callable[..., Judged]:
    """Run the gate against a behaviour; exit status and gate.json. A baseline of perfect scores is recorded first."""

    def judge(behaviour: Behaviour, name: str = "fast", **options: Any) -> Judged:
        options = {"require_fast": 0.99, **options}
        with serve(behaviour) as url:
            status, _ = run.gate(url, "tiny", tmp_path / name, evals=evals, **options)
        return status, json.loads((tmp_path / name / "gate.json").read_text())

    return judge


@pytest.fixture
def baseline(judged: Callable[..., Judged], right: Behaviour, evals: Path) -> None:
    if not (evals / "baselines" / "tiny.json").exists():
        status, _ = judged(dataclasses.replace(right, seen=[]), "recorded", record=True)
        assert status == 0


def failed(report: dict[str, Any], verdict: str = "fail") -> list[str]:
    return [check["name"] for check in report["checks"] if check["verdict"] == verdict]


def wrong_on(right: Behaviour, count: int, kind: str = "Prepend") -> Behaviour:
    """The same server, wrong on the first `count` prompts of a kind that it meets."""
    chosen: set[str] = set()

    def answer(messages: list[dict[str, Any]]) -> tuple[str | None, str | None]:
        question = messages[-1]["content"]
        if question.startswith(kind) and (question in chosen or len(chosen) < count):
            chosen.add(question)
            return "nothing", "stop"
        return right.answer(messages)

    return dataclasses.replace(right, answer=answer, seen=[])


def test_a_right_server_on_the_fast_path_passes(judged, baseline, right) -> None:
    status, report = judged(right)
    assert (status, report["verdict"], report["fast_share"]) == (0, "pass", 1.0)
    assert report["arms"][0]["tasks"]["k3_tiny_mrcr_2"]["metrics"]["mrcr_official"] == 1.0


def test_prompts_arrive_whole_as_the_chat_they_are(judged, baseline, right) -> None:
    """lm-eval's own client would slice a prompt to `max_length`, down to nothing with AIME's limits."""
    judged(right)
    assert len(right.seen) == 20
    chats = [r["messages"] for r in right.seen if r["messages"][-1]["content"].startswith("Prepend")]
    assert all(len(chat) > 5 and [m["role"] for m in chat[:2]] == ["user", "assistant"] for chat in chats)


def test_the_stop_sequences_do_not_depend_on_concurrency(judged, baseline, right, evals) -> None:
    """lm-eval's own client adds the end-of-sequence text to `stop` only without concurrency."""
    judged(right)
    one = dataclasses.replace(right, seen=[])
    path = evals / "suites" / "single.json"
    path.write_text((evals / "suites" / "tiny.json").read_text().replace('"wave": 4', '"wave": 1'))
    with serve(one) as url:
        run.gate(url, "single", path.parent / "single", require_fast=0.99, evals=evals)

    def sent(behaviour: Behaviour) -> list[tuple[Any, ...]]:
        return sorted(
            (r["messages"][-1]["content"], str(r.get("stop")), r["max_tokens"], r["temperature"]) for r in behaviour.seen
        )

    assert sent(one) == sent(right)


def test_every_repeat_has_a_seed_of_its_own(right, evals, tmp_path) -> None:
    """lm-eval's `repeats` sends one seed for all and scores the first reply only."""
    suite = json.loads((evals / "suites" / "tiny.json").read_text())
    suite["tasks"] = {"k3_tiny_arith": {**suite["tasks"]["k3_tiny_arith"], "seeds": [1, 2, 3]}}
    (evals / "suites" / "seeds.json").write_text(json.dumps(suite))
    seeds = iter(range(10**6))

    def answer(messages: list[dict[str, Any]]) -> tuple[str | None, str | None]:
        return (right.answer(messages)[0] if next(seeds) < 10 else "nothing", "stop")  # the first seed's run alone is right

    behaviour = dataclasses.replace(right, answer=answer, seen=[])
    with serve(behaviour) as url:
        run.gate(url, "seeds", tmp_path, require_fast=0.99, evals=evals)
    assert sorted(r["seed"] for r in behaviour.seen) == [1] * 10 + [2] * 10 + [3] * 10
    report = json.loads((tmp_path / "gate.json").read_text())
    assert report["arms"][0]["tasks"]["k3_tiny_arith"]["metrics"]["aime_integer"] == pytest.approx(1 / 3, abs=1e-5)


def test_equal_seeds_are_refused(evals) -> None:
    text = (evals / "suites" / "tiny.json").read_text().replace("[1]", "[1, 1]")
    (evals / "suites" / "twice.json").write_text(text)
    with pytest.raises(suites.SuiteError, match="distinct seeds"):
        suites.load("twice", evals)


def test_a_failed_request_fails_the_gate_and_the_results_are_written(judged, baseline, right) -> None:
    """lm-eval's own client raises and writes nothing; here the other items keep their scores."""
    unlucky: list[str] = []

    def fails(messages: list[dict[str, Any]]) -> bool:
        unlucky.append(messages[-1]["content"]) if not unlucky else None
        return messages[-1]["content"] == unlucky[0]

    status, report = judged(dataclasses.replace(right, fails=fails))
    assert status == 1 and "requests" in failed(report)
    assert sum(t["failed"] for t in report["arms"][0]["tasks"].values()) == 1
    assert sum(t["items"] for t in report["arms"][0]["tasks"].values()) == 20


def test_a_prompt_that_reaches_the_model_cut_fails(judged, baseline, right) -> None:
    tokens = right.prompt_tokens
    status, report = judged(dataclasses.replace(right, prompt_tokens=lambda m: min(tokens(m), 100)))
    assert status == 1 and failed(report) == ["prompts whole"]


@pytest.mark.parametrize("finish", [None, "abort", "error"])
def test_a_reply_without_a_known_finish_fails(judged, baseline, right, finish) -> None:
    status, report = judged(dataclasses.replace(right, answer=lambda m: (right.answer(m)[0], finish)))
    assert status == 1 and failed(report) == ["finish reasons"]


def test_truncated_replies_are_counted_from_the_server_s_word(judged, baseline, right) -> None:
    """The text is right, only the finish reason tells: guessing from the text would count none."""
    cut = dataclasses.replace(right, answer=lambda m: (right.answer(m)[0], "length"))
    status, report = judged(cut)
    assert status == 1 and set(failed(report)) == {"truncated k3_tiny_mrcr_2", "truncated k3_tiny_arith"}
    assert report["arms"][0]["tasks"]["k3_tiny_arith"]["truncated"] == 10


def test_null_content_scores_as_empty(judged, baseline, right) -> None:
    status, report = judged(dataclasses.replace(right, answer=lambda m: (None, "stop")))
    assert status == 1 and report["arms"][0]["tasks"]["k3_tiny_mrcr_2"]["metrics"]["mrcr_official"] == 0.0


def test_a_right_score_on_the_standard_path_fails_the_coverage_check_alone(judged, baseline, right) -> None:
    status, report = judged(dataclasses.replace(right, fast_share=0.0))
    assert status == 1 and failed(report) == ["fast share"]
    assert "step_too_many_tokens" in next(c["detail"] for c in report["checks"] if c["name"] == "fast share")
    assert judged(dataclasses.replace(right, fast_share=0.98))[0] == 1
    assert judged(dataclasses.replace(right, fast_share=0.98), require_fast=0.9)[0] == 0


@pytest.mark.parametrize("change", [{"report": False}, {"restarts": True}])
def test_without_one_guard_s_two_reports_nothing_can_be_told(judged, baseline, right, change) -> None:
    status, report = judged(dataclasses.replace(right, **change))
    assert status == 2 and failed(report, "unknown") == ["fast share"] and not failed(report)


def test_a_violation_fails(judged, baseline, right) -> None:
    status, report = judged(dataclasses.replace(right, violations={"write_outside": 1}))
    assert status == 1 and failed(report) == ["violations"]


@pytest.mark.parametrize(("method", "expected"), [("standard", 0), ("synthetic", 1), ("", 2)])
def test_acceptance_must_be_real(judged, baseline, right, method, expected) -> None:
    facts = {"speculation": "ngram", **({"rejection_sampling": method} if method else {})}

    class Metrics(str):  # drafts appear once the run has begun
        def encode(self, *args: Any) -> bytes:  # type: ignore[override]
            count = 100 if right.seen else 0
            return f'vllm:spec_decode_num_drafts_total{{engine="0"}} {count}.0\n'.encode()

    status, report = judged(dataclasses.replace(right, facts=facts, metrics=Metrics()))
    assert status == expected
    assert any(check["name"] == "acceptance real" for check in report["checks"])


def test_other_prompts_than_the_recorded_ones_cannot_be_told(judged, baseline, right, evals) -> None:
    path = evals / "baselines" / "tiny.json"
    stored = path.read_text()
    recorded = json.loads(stored)
    recorded["tasks"]["k3_tiny_arith"]["prompts_sha256"] = "0" * 64
    path.write_text(json.dumps(recorded))
    try:
        status, report = judged(right)
    finally:
        path.write_text(stored)
    assert status == 2 and failed(report, "unknown") == ["score k3_tiny_arith"]


# -- two arms ----------------------------------------
def test_one_lost_item_is_no_regression_and_five_are_one(judged, baseline, right, tmp_path) -> None:
    judged(dataclasses.replace(right, seen=[]), "standard", require_fast=None)
    for losses, regression in ((1, False), (4, False), (5, True)):
        _, report = judged(wrong_on(right, losses), f"lost{losses}", against=tmp_path / "standard")
        assert report["paired"]["paired all items"]["worse"] == losses
        assert ("paired all items" in failed(report)) is regression


def test_losses_and_gains_cancel(judged, right, tmp_path) -> None:
    judged(wrong_on(right, 5, "Work"), "standard", require_fast=None)
    _, report = judged(wrong_on(right, 5), against=tmp_path / "standard")
    assert report["paired"]["paired all items"] == {"items": 20, "worse": 5, "better": 5, "p": pytest.approx(0.623046875)}
    assert "paired all items" not in failed(report)


def test_arms_with_other_seeds_cannot_be_paired(judged, right, tmp_path) -> None:
    judged(dataclasses.replace(right, seen=[]), "standard", require_fast=None)
    path = tmp_path / "standard" / "arm.json"
    other = arms.Arm.read(path)
    for item in other.items["k3_tiny_arith"]:
        item.seed = 7
    other.write(path)
    status, report = judged(right, against=path)
    assert status == 2 and "paired k3_tiny_arith" in failed(report, "unknown")


def test_no_server_is_could_not_tell(evals, tmp_path) -> None:
    with pytest.raises(run.CouldNotTell, match="expected an answer"):
        run.gate("http://127.0.0.1:9", "tiny", tmp_path, require_fast=0.99, evals=evals)


def test_the_sign_test_is_exact() -> None:
    assert stats.binomial_tail(5, 5) == 1 / 32
    assert stats.binomial_tail(8, 10) == (45 + 10 + 1) / 1024
    assert stats.paired([1, 0, 1], [1, 1, 1]).p == 0.5
    assert stats.paired([1, 1], [1, 1]).p == 1.0
    assert stats.fewest_losses(0.05) == 5 and stats.fewest_losses(0.01) == 7
    with pytest.raises(ValueError, match="same items"):
        stats.paired([1], [1, 1])


def test_every_third_item_is_scored_with_its_own_reply(evals, right, tmp_path) -> None:
    """lm-eval numbers requests among the picked items and samples among all."""
    with serve(right) as url:
        arm = arms.run(url, suites.load("tiny", evals), "picked", tmp_path, every=3)
    assert not arm.lost and len(right.seen) == 8
    for items in arm.items.values():
        assert [i.item for i in items] == [0, 1, 2, 3] and {i.finish for i in items} == {"stop"}
    assert {i.scores["mrcr_official"] for i in arm.items["k3_tiny_mrcr_2"]} == {1.0}
    assert {i.scores["aime_integer"] for i in arm.items["k3_tiny_arith"]} == {1.0}
