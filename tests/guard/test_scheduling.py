"""Ten thousand random scheduling steps through vLLM's own scheduler and KV manager, audited; and requests that it must end."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from simulation import BLOCK, Simulation, make_config, make_scheduler

from vllm.model_executor.models.kimi_k3_fast import guard, patches
from vllm.model_executor.models.kimi_k3_fast.patches import hooks
from vllm.model_executor.models.kimi_k3_fast.reasons import Reason

EXAMPLES, STEPS = 20, 500


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import write_tiny

    assert patches.apply() == []
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    before = guard._guard
    yield make_config(folder)
    guard._guard = before


@pytest.fixture(autouse=True)
def nothing_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process call single hooks; the check that all of a process' hooks run must not count those."""
    monkeypatch.setattr(hooks, "ran", {})


@pytest.fixture
def simulate(config):
    def make(seed: int = 0, blocks: int = 64, **limits: int) -> Simulation:
        scheduler = make_scheduler(config, blocks, **limits)
        return Simulation(scheduler, blocks, random.Random(seed))

    return make


def test_ten_thousand_random_steps_without_a_violation(config):
    seen: dict[str, int] = {}
    steps = 0

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32), st.sampled_from((26, 40, 80)), st.integers(2, 8), st.sampled_from((17, 48, 130)))
    def run(seed: int, blocks: int, max_requests: int, budget: int) -> None:
        nonlocal steps
        simulation = Simulation(make_scheduler(config, blocks, max_requests, budget), blocks, random.Random(seed))
        report = simulation.run(STEPS)
        assert report["violations"]["by_reason"] == {}
        assert report["counters"]["audited_steps"] == report["steps"]["fast"]["steps"] + report["steps"]["standard"]["steps"]
        steps += STEPS
        for name, count in simulation.seen.items():
            seen[name] = seen.get(name, 0) + count

    run()
    assert steps >= 10_000
    assert all(seen[name] > 50 for name in ("hits", "preempted", "aborted", "finished", "chunks")), seen


def test_a_state_of_another_request_is_seen(simulate):
    """The simulation's worker swaps the slots of two requests once: ownership, not only the numbers, must show it."""
    simulation = simulate()
    for first in (1, 2):
        simulation.add([first] * 20, 30)
    for _ in range(3):
        simulation.step()
    one, two = simulation.requests.values()
    one.tables[0], two.tables[0] = two.tables[0], one.tables[0]
    simulation._verify = lambda running: None
    simulation.step()
    found = {v["reason"] for v in simulation.guard.report()["violations"]["last"]}
    assert found == {"slot_not_owned"} or found == set(), found
    for _ in range(8):
        simulation.step()
    assert "slot_not_owned" in simulation.guard.report()["violations"]["by_reason"]


def run_until(simulation: Simulation, name: str, limit: int = 60) -> Any:
    """Step until that request has ended; its last output."""
    for _ in range(limit):
        simulation.step()
        for output in simulation.outputs:
            if output.request_id == name and output.finish_reason is not None:
                return output
    raise AssertionError(f"{name} never ended")


def test_the_scheduler_ends_a_bad_request_forgets_its_blocks_and_spares_the_others(simulate):
    simulation = simulate()
    prompt = list(range(3 * BLOCK + 5))
    bad = simulation.add(prompt, 200)
    other = simulation.add([7] * (2 * BLOCK + 3), 30)
    for _ in range(2 * BLOCK):
        simulation.step()
    produced = len(simulation.scheduler.requests[bad].output_token_ids)
    simulation.bad = {bad}
    output = run_until(simulation, bad)
    assert (str(output.finish_reason), output.stop_reason) == ("error", "non_finite")
    assert output.new_token_ids == [] and produced > 0, "the bad token is not handed out"
    assert bad not in simulation.scheduler.requests
    assert simulation.guard.report()["violations"]["by_reason"] == {"non_finite": 1}
    simulation.bad = set()
    again = simulation.add(prompt, 3)
    for _ in range(2):
        simulation.step()
    assert simulation.seen["hits"] == 0, "no block of the bad request is reused"
    assert str(run_until(simulation, again).finish_reason) == "length"
    twice = simulation.add(prompt, 3)
    run_until(simulation, twice)
    assert simulation.seen["hits"] == 1, "a healthy request's blocks are"
    assert other not in simulation.scheduler.requests, "the other one ran to its own end"


def test_without_forgetting_the_bad_blocks_would_be_reused(simulate, monkeypatch):
    monkeypatch.setattr(hooks, "forget_blocks", lambda manager, request: None)
    with pytest.raises(AssertionError, match="no block of the bad request"):
        test_the_scheduler_ends_a_bad_request_forgets_its_blocks_and_spares_the_others(simulate)


def test_requests_that_mode_require_fails_are_ended_with_its_reason(simulate):
    simulation = simulate()
    name = simulation.add([5] * 20, 50)
    for _ in range(3):
        simulation.step()
    simulation.guard.fail_request(name, Reason.STEP_TOO_MANY_TOKENS)
    simulation.step()
    (output,) = [o for o in simulation.outputs if o.request_id == name]
    assert (str(output.finish_reason), output.stop_reason) == ("error", "step_too_many_tokens")
