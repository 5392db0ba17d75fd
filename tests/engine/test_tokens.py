"""Greedy tokens through vLLM's engine equal a recompute without caches, whatever the scheduler and the cache manager do.

fp32, so that a difference is a fault and not rounding. The engine runs in its own process, as a server's does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import (
    BLOCK,
    BUDGET,
    CONFIGS,
    GENERATED,
    Engine,
    check_one_decides_alone,
    greedy,
    set_policy,
    spoil_attention,
    take_path,
    tokens,
)

PATHS = [("k3", "fast"), ("k3", "standard"), ("kimi_linear", "standard")]
pytestmark = pytest.mark.engine


@pytest.fixture
def engine(family: Engine, path: str) -> Iterator[Engine]:
    """The engine with its decode steps on `path`, an empty prefix cache, and the word of the guard that it was that path."""
    if path == "fast" or family.reports()[0]["deployment"]["selected"]:
        family.call(take_path, path)
    family.llm.reset_prefix_cache()
    before = family.reports()[0]
    yield family
    after = family.reports()[0]
    assert (after["steps"]["fast"]["steps"] > before["steps"]["fast"]["steps"]) == (path == "fast")
    assert after["violations"]["by_reason"] == before["violations"]["by_reason"]


def both_paths(test: object) -> object:
    return pytest.mark.parametrize(("family", "path"), PATHS, indirect=["family"])(test)


@both_paths
def test_concurrent_requests_at_block_boundaries(engine: Engine) -> None:
    """Prompts that end just before, at and after a block, and generations that cross one."""
    engine.run([tokens(n, n) for n in (1, 2, BLOCK - GENERATED // 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)])


@both_paths
def test_chunked_prefill_beside_decoding(engine: Engine) -> None:
    engine.run([tokens(5, 1), tokens(600, 2), tokens(3 * BUDGET + 1, 3), tokens(40, 4)])


@both_paths
def test_prefix_cache_hits(engine: Engine) -> None:
    """The same prompt cold and warm, and one that leaves it inside a block."""
    prompt = tokens(4 * BLOCK + 10, 5)
    (cold,) = engine.run([prompt])
    (warm,) = engine.run([prompt])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 4 * BLOCK)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    outputs = engine.run([prompt[: 2 * BLOCK + 7] + tokens(50, 6), prompt + tokens(20, 7), prompt[: 4 * BLOCK]])
    assert all(output.num_cached_tokens > 0 for output in outputs[1:2])


@both_paths
def test_a_prefix_that_is_shared_as_soon_as_it_is_there(engine: Engine) -> None:
    """A prompt in chunks, and another that goes on from the state at the end of its second block."""
    prefix, before = tokens(2 * BLOCK + 4, 80), engine.metric("vllm:prefix_cache_hits")
    engine.run([prefix + tokens(79, 81), prefix + tokens(53, 82)])
    assert engine.metric("vllm:prefix_cache_hits") - before == 2 * BLOCK


def test_a_state_that_is_larger_than_the_platforms_block(tmp_path: Path) -> None:
    """A block wider than vLLM's platform takes on any CPU: the scheduler, in a process of its own, has to know of it, or ends a
    prompt's chunks where no state is kept, and who shares the prefix goes on from a state of other tokens."""
    config = {**CONFIGS["k3"], "linear_attn_config": {**CONFIGS["k3"]["linear_attn_config"], "num_heads": 12}}
    engine = Engine.start(tmp_path / "wide", config)
    try:
        mutations = {m["name"]: m["after"] for m in engine.reports()[0]["deployment"]["mutations"]}
        block = int(mutations["cache_config.block_size"])
        assert block > BLOCK
        prefix = tokens(2 * block + 4, 80)
        engine.run([prefix + tokens(79, 81)])
        (shared,) = engine.run([prefix + tokens(53, 82)])
        assert shared.num_cached_tokens == 2 * block
    finally:
        engine.stop()


@both_paths
def test_preemption_and_resume(engine: Engine) -> None:
    """More long requests than the cache holds at once: some are preempted, recomputed, and must not notice."""
    before = engine.metric("vllm:num_preemptions")
    prompts = [tokens(2 * BLOCK + 100 + i, 20 + i) for i in range(8)]
    engine.run(prompts, count=60)
    assert engine.metric("vllm:num_preemptions") > before, "nothing was preempted: the test tests nothing"


@both_paths
def test_abort_in_mid_stream(engine: Engine) -> None:
    """Requests vanish while others run, and new ones take their slots."""
    core = engine.llm.llm_engine
    prompts = {str(i): tokens(90 + 30 * i, 40 + i) for i in range(6)}
    done: dict[str, list[int]] = {}

    def add(*names: str) -> None:
        for name in names:
            core.add_request(name, {"prompt_token_ids": prompts[name]}, greedy(GENERATED))

    def run(steps: int | None = None) -> None:
        while core.has_unfinished_requests() and steps != 0:
            for output in core.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            steps = None if steps is None else steps - 1

    add("0", "1", "2", "3")
    run(6)
    core.abort_request(["1", "2"])
    add("4", "5")
    run()
    assert sorted(done) == ["0", "3", "4", "5"]
    for name, generated in done.items():
        engine.check(prompts[name], generated)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP 2 gives the tokens of the reference, and so of TP 1: sharded heads, experts and vocabulary, replicated latents.

    The ranks prove over their own all-gather that they decided alike; one that once decides alone is found, with the step.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    engine = Engine.start(tmp_path, CONFIGS["k3"], {"agree_every": 8}, tensor_parallel_size=2)
    try:
        prompt = tokens(2 * BLOCK + 9, 60)
        engine.run([tokens(n, 60 + n) for n in (1, 3, BLOCK, 300)])
        engine.run([prompt])
        (warm,) = engine.run([prompt])
        assert warm.num_cached_tokens == 2 * BLOCK
        for report in engine.reports():
            assert report["steps"]["fast"]["steps"] > 2 * GENERATED
            assert 0 <= report["decisions"]["step"] - report["decisions"]["checked_step"] <= 8
        check_one_decides_alone(engine)
        engine.call(spoil_attention, 1.01)
        engine.call(set_policy, {"shadow_every": 1})
        engine.run([tokens(150, 71)], 3)
        saved = [report["violations"]["last"][-1]["where"]["saved"] for report in engine.reports()]
    finally:
        engine.stop()
    # Both ranks' parts of one step, and the operator repaired: the paths agree, and the standard one as it did in the engine.
    k3fast = [sys.executable, "-c", "from vllm.model_executor.models.kimi_k3_fast.cli import main; main()"]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([*k3fast, "replay-step", *reversed(saved)], capture_output=True, text=True, timeout=300, env=wide)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "past the bar" not in done.stdout
    assert "rank0 layers.0.state" in done.stdout and "rank1 layers.0.state" in done.stdout
