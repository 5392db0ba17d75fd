"""Greedy tokens through vLLM's engine equal a recompute without caches, whatever the scheduler and the cache manager do.

fp32, so that a difference is a fault and not rounding. The engine runs in its own process, as a server's does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import (
    random_tensors,
    tiny_config,
    tiny_kimi_linear_config,
    write_released,
)

pytestmark = pytest.mark.engine

BLOCK = 128  # tokens of a cache block: the smallest that vLLM allows a hybrid model
BUDGET = 192  # tokens of a step: a longer prompt comes in chunks
BLOCKS = 40
GENERATED = 24
CONFIGS = {"k3": tiny_config(), "kimi_linear": tiny_kimi_linear_config()}


@dataclass
class Engine:
    llm: Any
    reference: Reference

    def run(self, prompts: Sequence[Sequence[int]], count: int = GENERATED) -> list[Any]:
        """Generate greedily for all prompts at once, and hold every token to the reference."""
        inputs = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = self.llm.generate(inputs, greedy(count), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(prompt, output.outputs[0].token_ids, count)
        return outputs

    def check(self, prompt: Sequence[int], generated: Sequence[int], count: int = GENERATED) -> None:
        assert len(generated) == count
        logits = self.reference.logits([*prompt, *generated[:-1]])[len(prompt) - 1 :]
        assert list(generated) == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)


def greedy(count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def start(folder: Path, name: str, mode: str, **options: Any) -> Engine:
    from vllm import LLM

    tensors = random_tensors(CONFIGS[name], seed=4)
    write_released(folder, CONFIGS[name], tensors)
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=BLOCKS,
        disable_log_stats=False,
        additional_config={"kimi_k3_fast": {"mode": mode}},
        **options,
    )
    return Engine(llm, Reference(CONFIGS[name], tensors))


def stop(engine: Engine) -> None:
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module", params=["k3 off", "k3 auto", "kimi_linear auto"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("OMP_NUM_THREADS", "1")
        name, mode = request.param.split()
        engine = start(tmp_path_factory.mktemp("checkpoint"), name, mode)
        yield engine
        stop(engine)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(10, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_concurrent_requests_at_block_boundaries(engine: Engine) -> None:
    """Prompts that end just before, at and after a block, and generations that cross one."""
    engine.run([tokens(n, n) for n in (1, 2, BLOCK - GENERATED // 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)])


def test_chunked_prefill_beside_decoding(engine: Engine) -> None:
    engine.run([tokens(5, 1), tokens(600, 2), tokens(3 * BUDGET + 1, 3), tokens(40, 4)])


def test_prefix_cache_hits(engine: Engine) -> None:
    """The same prompt cold and warm, and one that leaves it inside a block."""
    prompt = tokens(4 * BLOCK + 10, 5)
    (cold,) = engine.run([prompt])
    (warm,) = engine.run([prompt])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 4 * BLOCK)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    outputs = engine.run([prompt[: 2 * BLOCK + 7] + tokens(50, 6), prompt + tokens(20, 7), prompt[: 4 * BLOCK]])
    assert all(output.num_cached_tokens > 0 for output in outputs[1:2])


def test_preemption_and_resume(engine: Engine) -> None:
    """More long requests than the cache holds at once: some are preempted, recomputed, and must not notice."""
    before = engine.metric("vllm:num_preemptions")
    prompts = [tokens(2 * BLOCK + 100 + i, 20 + i) for i in range(8)]
    engine.run(prompts, count=60)
    assert engine.metric("vllm:num_preemptions") > before, "nothing was preempted: the test tests nothing"


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
    """TP 2 gives the tokens of the reference, and so of TP 1: sharded heads, experts and vocabulary, replicated latents."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = start(tmp_path, "k3", "auto", tensor_parallel_size=2)
    try:
        prompt = tokens(2 * BLOCK + 9, 60)
        engine.run([tokens(n, 60 + n) for n in (1, 3, BLOCK, 300)])
        engine.run([prompt])
        (warm,) = engine.run([prompt])
        assert warm.num_cached_tokens == 2 * BLOCK
    finally:
        stop(engine)
