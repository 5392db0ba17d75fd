"""The CPU platform's options for MLA models are undone for this model, and only for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Harness
from vllm.platforms import current_platform

from vllm.model_executor.models.kimi_k3_fast.model import platform
from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import random_tensors, tiny_config

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU platform's options")


def deployment(architecture: str | None, block_size: int | None = None) -> Any:
    return SimpleNamespace(
        additional_config={},
        model_config=None if architecture is None else SimpleNamespace(architecture=architecture),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=192),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, block_size=block_size or 0, user_specified_block_size=block_size is not None
        ),
    )


def options(config: Any) -> tuple[bool, bool, int, int]:
    scheduler, cache = config.scheduler_config, config.cache_config
    return scheduler.enable_chunked_prefill, cache.enable_prefix_caching, scheduler.max_num_batched_tokens, cache.block_size


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`check_and_update_config` of a platform that does to every model what stock does to MLA models, wrapped twice."""

    @classmethod  # type: ignore[misc]
    def switches_off(cls: type, config: Any) -> None:
        config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = False
        config.scheduler_config.max_num_batched_tokens, config.cache_config.block_size = 9999, 16

    @classmethod  # type: ignore[misc]
    def widens(cls: type, config: Any, backend: type) -> None:
        config.cache_config.block_size = max(config.cache_config.block_size, 128)

    monkeypatch.setattr(type(current_platform), "check_and_update_config", switches_off)
    monkeypatch.setattr(type(current_platform), "_align_hybrid_block_size", widens)
    assert platform.restore_chunking()
    wrapped = type(current_platform).check_and_update_config
    assert platform.restore_chunking() and type(current_platform).check_and_update_config == wrapped
    return wrapped


@pytest.mark.parametrize("architecture", platform.ARCHITECTURES)
def test_this_model_keeps_its_options(check: Any, architecture: str) -> None:
    config, chosen = deployment(architecture), deployment(architecture, block_size=256)
    check(config)
    check(chosen)
    assert options(config) == (True, True, 192, 128), "a block size nobody chose is the platform's affair, if it holds a state"
    assert options(chosen) == (True, True, 192, 256)
    changed = {name: (before, after) for name, before, after, _ in chosen.additional_config[platform.MUTATIONS]}
    assert changed["cache_config.enable_prefix_caching"] == ("False", "True"), "what is changed behind the user is reported"
    assert len(changed) == 4 and len(config.additional_config[platform.MUTATIONS]) == 4


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", None])
def test_other_models_are_left_to_the_platform(check: Any, architecture: str | None) -> None:
    config = deployment(architecture, block_size=256)
    check(config)
    assert options(config) == (False, False, 9999, 16) and not config.additional_config


def turn_back(runner: Any, grammar_output: Any) -> str:
    """What stock does with the generators: draw from each, then turn those of unfinished prompts back."""
    generators = runner.input_batch.generators
    for generator in generators.values():
        torch.rand(3, generator=generator)
    for row in np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]:
        if (generator := generators.get(int(row))) is not None:
            generator.set_offset(generator.get_offset() - 4)
    return "sampled"


def runner(architecture: str) -> Any:
    seeded = {row: torch.Generator().manual_seed(row) for row in (0, 1)}
    return SimpleNamespace(
        execute_model_state=(),
        vllm_config=deployment(architecture),
        input_batch=SimpleNamespace(num_reqs=3, generators=seeded),
        discard_request_mask=SimpleNamespace(np=np.array([True, False, True, True])),
    )


def test_a_seeded_request_survives_the_chunks_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(CPUModelRunner, "sample_tokens", turn_back)
    config = deployment(platform.ARCHITECTURES[0])
    platform.spare_generators(config)
    platform.spare_generators(config)
    assert len(config.additional_config[platform.MUTATIONS]) == 1
    ours, other = runner(platform.ARCHITECTURES[0]), runner("LlamaForCausalLM")
    assert CPUModelRunner.sample_tokens(ours, None) == "sampled"
    unfinished, finished = (ours.input_batch.generators[row] for row in (0, 1))
    assert torch.equal(unfinished.get_state(), torch.Generator().manual_seed(0).get_state()), "an unseen draw was counted"
    assert not torch.equal(finished.get_state(), torch.Generator().manual_seed(1).get_state())
    with pytest.raises(RuntimeError, match="does not use offset"):
        CPUModelRunner.sample_tokens(other, None)


def test_what_the_standard_path_does_not_serve_is_refused(parallel_groups: None) -> None:
    config = tiny_config()
    engine = Harness(config, random_tensors(config))
    engine.vllm_config.cache_config.cache_dtype = "fp8"
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of auto, bfloat16 on the standard path, found 'fp8'"):
        engine.metadata([(0, [1])])
    engine.vllm_config.cache_config.cache_dtype = "auto"
    engine.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    with pytest.raises(ValueError, match="expects no speculative_config, and found one"):
        engine.metadata([(0, [1])])
