"""vLLM engines of tiny models with the float64 model beside them, and what the tests do inside their workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

BLOCK = 128  # tokens of a cache block: the smallest that vLLM allows a hybrid model
BUDGET = 192  # tokens of a step: a longer prompt comes in chunks
BLOCKS = 40
GENERATED = 24
CONFIGS = {"k3": tiny_config(), "kimi_linear": tiny_kimi_linear_config()}


@dataclass(repr=False)  # an LLM asks its workers for its repr, which a failing test must not
class Engine:
    """A running engine, in processes of its own as a server's is. `environment` holds until `stop`."""

    llm: Any
    reference: Reference
    environment: pytest.MonkeyPatch
    expected: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # the reference's choice after each token of a text

    @classmethod
    def start(cls, folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        from vllm import LLM

        tensors = random_tensors(config, seed=4)
        write_released(folder, config, tensors)
        defaults = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": BLOCKS}
        environment = pytest.MonkeyPatch()
        environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests send functions to the workers
        try:
            llm = LLM(
                str(folder),
                max_num_batched_tokens=BUDGET,
                disable_log_stats=False,
                additional_config={"kimi_k3_fast": {"events": {"path": str(folder / "events.jsonl")}, **(settings or {})}},
                **{**defaults, **options},
            )
        except BaseException:
            environment.undo()
            raise
        return cls(llm, Reference(config.get("text_config", config), tensors), environment)

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.environment.undo()

    def run(self, prompts: Sequence[Sequence[int]], count: int = GENERATED) -> list[Any]:
        """Generate greedily for all prompts at once, and hold every token to the reference."""
        inputs = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = self.llm.generate(inputs, greedy(count), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(prompt, output.outputs[0].token_ids, count)
        return outputs

    def check(self, prompt: Sequence[int], generated: Sequence[int], count: int = GENERATED) -> None:
        assert len(generated) == count
        text = (*prompt, *generated[:-1])
        if text not in self.expected:  # both paths are asked the same
            self.expected[text] = self.reference.logits(text).argmax(-1).tolist()
        assert list(generated) == self.expected[text][len(prompt) - 1 :], f"prompt of {len(prompt)} tokens"

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    def reports(self) -> list[dict[str, Any]]:
        """Each rank's report."""
        return [json.loads(text) for text in self.llm.collective_rpc("k3fast_report")]

    def call(self, function: Any, *args: Any) -> list[Any]:
        """Run `function(worker, *args)` in every worker."""
        return self.llm.collective_rpc(function, args=args)


def greedy(count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(10, 260, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- in the workers --------------------------------------------------------------------------------------------------------------
def take_path(worker: Any, path: str) -> None:
    """From then on decode steps are standard, or as planned ("fast")."""
    from vllm.model_executor.models.kimi_k3_fast.reasons import Reason, Refusal

    fast = worker.model_runner.model.fast
    fast.refusals = () if path == "fast" else (Refusal(Reason.MODE_OFF, "a test"),)


def set_policy(worker: Any, fields: Mapping[str, Any]) -> None:
    from vllm.model_executor.models.kimi_k3_fast import guard

    guard.current().policy = replace(guard.current().policy, **fields)


def retire(worker: Any, keys: Sequence[str]) -> None:
    """Exactly these plans are retired from then on."""
    from vllm.model_executor.models.kimi_k3_fast import guard

    guard.current()._quarantine = set(keys)


def spoil_attention(worker: Any, factor: float) -> None:
    """From then on every MLA layer of this process' fast path is off by `factor`; 1.0 repairs it. Recorded steps are dropped."""
    from vllm.model_executor.models.kimi_k3_fast.fast.executor import Executor
    from vllm.model_executor.models.kimi_k3_fast.fast.views import Mla

    true = getattr(Executor, "k3_true_attention", Executor._attention)

    def attention(self: Any, view: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        update = true(self, view, x, step)
        if isinstance(view, Mla) and factor != 1.0:
            self.forms.do(lambda: update.mul_(factor))
        return update

    Executor.k3_true_attention, Executor._attention = true, attention
    executor = worker and worker.model_runner.model.fast._executor  # none before the first step
    if executor is not None:
        executor._tapes.clear()


def decide_alone(worker: Any, rank: int) -> None:
    """That rank's next plan gets another name, once."""
    from vllm.model_executor.models.kimi_k3_fast import guard
    from vllm.model_executor.models.kimi_k3_fast.fast.plan import Plan

    fast = worker.model_runner.model.fast
    true = fast._decide

    def decide(key: Any) -> Any:
        decided = true(key)
        if worker.rank == rank and isinstance(decided, Plan) and differed(worker) < 0:
            fast.k3_differed = guard.current().step
            return replace(decided, key=f"{decided.key}/alone")
        return decided

    fast._decide = decide


def differed(worker: Any) -> int:
    """The step in which `decide_alone` took effect; -1 in ranks where it did not."""
    return getattr(worker.model_runner.model.fast, "k3_differed", -1)


def check_one_decides_alone(engine: Engine) -> None:
    """Two ranks, with `agree_every` 8, have agreed so far; then rank 1 once decides alone, and both find it, with the step."""
    ranks = engine.reports()
    assert [report["rank"] for report in ranks] == ["rank0", "rank1"]
    assert ranks[0]["decisions"] == ranks[1]["decisions"]
    for report in ranks:
        assert report["counters"]["agreement_checks"] >= report["decisions"]["step"] // 8 > 0
        assert report["violations"]["by_reason"] == {}
    engine.call(decide_alone, 1)
    engine.run([tokens(5, 70)])
    step = max(engine.call(differed))
    for report in engine.reports():
        assert report["violations"]["by_reason"] == {"ranks_disagree": 1}
        where = report["violations"]["last"][0]["where"]
        assert (where["first_step"], where["exact"], where["ranks"]) == (step, True, [1])
