"""The gate on the trained tiny checkpoint, served for real: it passes, sees each deliberate fault, and sees a silent fallback.

One server for the faults (`evals/faults/k3_faults.py`), one that is forced off the fast path. Items are few and short, but
where a fault spoils few replies the whole suite is asked. The recorded table is `evals/sensitivity.py`'s; CI holds it to the
checkpoint.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import k3_faults
import pytest
from rich.console import Console
from sensitivity import CONTROLS, WHOLE, weights_sha256
from small_suite import small_evals
from two_arms import SERVE

from vllm.model_executor.models.kimi_k3_fast.cli import demo
from vllm.model_executor.models.kimi_k3_fast.cli.server import Server
from vllm.model_executor.models.kimi_k3_fast.evaluation import arm as arms
from vllm.model_executor.models.kimi_k3_fast.evaluation import gate, output, suites

CHECKPOINT = suites.EVALS.parent / "checkpoints" / "k3-tiny"
BROKEN = [name for name in k3_faults.FAULTS if name not in CONTROLS]


def test_the_recorded_table_is_of_this_checkpoint_and_of_every_fault() -> None:
    table = json.loads((suites.EVALS / "sensitivity.json").read_text())
    assert table["weights_sha256"] == weights_sha256(CHECKPOINT), "run evals/sensitivity.py with --record"
    verdicts = {fault: row["verdict"] for fault, row in table["faults"].items()}
    assert verdicts == {fault: "pass" if fault in CONTROLS else "fail" for fault in k3_faults.FAULTS}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> suites.Suite:
    return suites.load("tiny", small_evals(tmp_path_factory.mktemp("evals"), {512: 8}, {4: 8}, wave=8))


def settings(**values: object) -> list[str]:
    return ["--max-model-len", "4096", "--additional-config", json.dumps({"kimi_k3_fast": values})]


@pytest.fixture(scope="module")
def with_fault(suite: suites.Suite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], arms.Arm]]:
    """Run the suite on the fault server with one fault on. The server's URL is the function's `url`."""
    folder = tmp_path_factory.mktemp("faults")
    control = folder / "fault"
    control.write_text("none")
    paths = os.pathsep.join(filter(None, (str(suites.EVALS / "faults"), os.environ.get("PYTHONPATH"))))
    environ = {"PYTHONPATH": paths, k3_faults.CONTROL: str(control)}
    with Server(
        CHECKPOINT, [*SERVE, *demo.COMPACT_JSON, *settings(mode="auto")], log=folder / "server.log", environ=environ
    ) as server:

        def run(fault: str, suite: suites.Suite = suite) -> arms.Arm:
            control.write_text(fault)
            return arms.run(server.url, suite, fault, folder / fault)

        run.url = server.url  # type: ignore[attr-defined]
        yield run


@pytest.fixture(scope="module")
def sound(with_fault: Callable[[str], arms.Arm]) -> arms.Arm:
    return with_fault("none")


def judge(arm: arms.Arm, reference: arms.Arm, suite: suites.Suite, require_fast: float | None) -> gate.Judgement:
    baseline = output.baseline_record(reference, suite)
    return gate.decide(arm, suite, baseline, require_fast=require_fast, against=reference)


@pytest.mark.engine
@pytest.mark.soak
def test_the_sound_server_passes_on_the_fast_path(sound: arms.Arm, suite: suites.Suite) -> None:
    judged = judge(sound, sound, suite, 0.95)
    assert judged.verdict is gate.Verdict.PASS, judged.checks
    assert all(gate.mean(gate.scores(items, suite.tasks[name].metric)) > 0.75 for name, items in sound.items.items())


@pytest.mark.engine
@pytest.mark.soak
def test_the_demo_s_answers_are_right(sound: arms.Arm, with_fault: Callable[[str], arms.Arm]) -> None:
    shown = io.StringIO()
    demo.ask(Console(file=shown, width=10_000), with_fault.url, trained=True)  # type: ignore[attr-defined]
    assert (shown.getvalue().count("(right)"), shown.getvalue().count("(wrong)")) == (2, 0), shown.getvalue()


@pytest.mark.engine
@pytest.mark.soak
def test_preemption_alone_costs_nothing(sound: arms.Arm, with_fault: Callable[[str], arms.Arm], suite: suites.Suite) -> None:
    assert judge(with_fault("preemption"), sound, suite, None).verdict is gate.Verdict.PASS


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.parametrize("fault", BROKEN)
def test_the_gate_sees_the_fault(fault: str, sound: arms.Arm, with_fault: Callable[..., arms.Arm], suite: suites.Suite) -> None:
    if fault in WHOLE:
        suite = suites.load("tiny")
        sound = with_fault("none", suite)
    judged = judge(with_fault(fault, suite), sound, suite, None)
    assert judged.verdict is gate.Verdict.FAIL
    failed = [check.name for check in judged.checks if check.verdict is gate.Verdict.FAIL]
    assert any(name.startswith(("score", "paired")) for name in failed), failed


@pytest.mark.engine
@pytest.mark.soak
def test_a_run_forced_to_fall_back_fails_the_coverage_check_alone(sound: arms.Arm, suite: suites.Suite, tmp_path: Path) -> None:
    with Server(CHECKPOINT, [*SERVE, *settings(mode="auto", max_tokens=1)], log=tmp_path / "server.log") as server:
        arm = arms.run(server.url, suite, "fallback", tmp_path)
    judged = judge(arm, sound, suite, 0.95)
    failed = [check for check in judged.checks if check.verdict is gate.Verdict.FAIL]
    assert [check.name for check in failed] == ["fast share"]
    assert "step_too_many_tokens" in failed[0].detail
