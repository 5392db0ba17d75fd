"""The released wrapper's configuration (`model_type: kimi_k3`, the text model's inside) in BF16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import CONFIGS, Engine, greedy, set_policy, tokens
from reference import Reference

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import random_tensors

pytestmark = pytest.mark.engine

TOP = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def wrapped(text: dict[str, Any]) -> dict[str, Any]:
    vision = {"text_hidden_size": text["hidden_size"]}
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "vision_config": vision}
    return {**outer, **{key: text[key] for key in TOP}, "text_config": text}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = wrapped(CONFIGS["k3"])
    engine = Engine.start(tmp_path_factory.mktemp("wrapped"), config, dtype="bfloat16")
    yield engine
    engine.stop()


def test_text_is_served_in_bf16_on_both_paths(engine: Engine) -> None:
    """Greedy tokens miss the float64 model's about as often as the same equations with every operation rounded to BF16 do: the
    random model decides between nearly equal experts and tokens all the time. Steps are watched."""
    engine.call(set_policy, {"audit_every": 1, "shadow_every": 2})
    prompts = [tokens(n, 200 + n) for n in (1, 40, 127, 300)]
    outputs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(32), use_tqdm=False)
    rounded = Reference(CONFIGS["k3"], random_tensors(CONFIGS["k3"], seed=4), dtype=torch.bfloat16)
    missed = own = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        exact, blurred = (
            model.logits([*prompt, *generated[:-1]])[len(prompt) - 1 :].argmax(-1) for model in (engine.reference, rounded)
        )
        missed += int((torch.tensor(generated) != exact).sum())
        own += int((blurred != exact).sum())
    assert 0 < own < 96, "PyTorch's own error is the yardstick, and must be one"
    assert missed <= own, (missed, own)
    (report,) = engine.reports()
    facts = report["deployment"]["facts"]
    assert (facts["architecture"], facts["dtype"]) == ("KimiK3ForConditionalGeneration", "bfloat16")
    assert report["counters"]["audited_steps"] == sum(report["steps"][path]["steps"] for path in ("fast", "standard"))
    assert report["steps"]["fast"]["steps"] > 20
    assert report["counters"]["shadow_steps"] > 10
    assert report["violations"]["by_reason"] == {}, report["violations"]["last"][-3:]


def test_an_image_is_refused_with_a_reason(engine: Engine) -> None:
    image = {"prompt_token_ids": tokens(8, 1), "multi_modal_data": {"image": torch.zeros(3, 28, 28)}}
    with pytest.raises(Exception, match=r"(?i)image|multi-?modal"):
        engine.llm.generate([image], greedy(2), use_tqdm=False)
    assert engine.llm.generate([{"prompt_token_ids": tokens(8, 1)}], greedy(2), use_tqdm=False), "the engine is still there"
