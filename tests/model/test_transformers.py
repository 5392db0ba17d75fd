"""Kimi-Linear against transformers: the same files loaded by both, module by module and whole, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearForCausalLM,
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from vllm.model_executor.models.kimi_k3_fast.model import config as model_config
from vllm.model_executor.models.kimi_k3_fast.model import kda
from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import random_tensors, tiny_kimi_linear_config, write_released

# transformers fixes the epsilon of the two MLA latent norms at this; vLLM, and this fork by default, take rms_norm_eps.
TRANSFORMERS_LATENT_EPS = 1e-6
KDA_LAYER, MLA_LAYER = 0, 3
CONFIGS = {"full_rank_query": tiny_kimi_linear_config(), "low_rank_query": tiny_kimi_linear_config(q_lora_rank=48)}


@pytest.fixture(params=CONFIGS)
def both(
    request: pytest.FixtureRequest, parallel_groups: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Harness, Any]]:
    config = CONFIGS[request.param]
    tensors = random_tensors(config, seed=2, prefix="", a_log_form="4d")
    write_released(tmp_path, config, tensors)
    theirs = KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    monkeypatch.setattr(model_config, "MLA_LATENT_NORM_EPS", TRANSFORMERS_LATENT_EPS)
    yield Harness(config, tensors), theirs


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.no_grad()
def test_whole_model_logits(both: tuple[Harness, Any]) -> None:
    ours, theirs = both
    tokens = torch.randint(10, 260, (1, 150), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits[0]
    edges = [0, 70, 131, 145, *range(146, 151)]
    found = torch.cat([ours.step([(0, tokens[0, a:b].tolist())]) for a, b in pairwise(edges)])
    assert relative(found, expected) < 1e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@torch.no_grad()
def test_one_kda_layer(both: tuple[Harness, Any]) -> None:
    ours, theirs = both
    hidden = torch.randn(90, 128, generator=torch.Generator().manual_seed(1))
    expected = theirs.model.layers[KDA_LAYER].self_attn(hidden_states=hidden[None])[0]
    assert relative(ours.attention(KDA_LAYER, hidden), expected) < 1e-5


@torch.no_grad()
def test_one_mla_layer(both: tuple[Harness, Any]) -> None:
    ours, theirs = both
    hidden = torch.randn(90, 128, generator=torch.Generator().manual_seed(1))
    mask = torch.full((1, 1, 90, 90), float("-inf")).triu(1)
    expected = theirs.model.layers[MLA_LAYER].self_attn(hidden_states=hidden[None], attention_mask=mask)[0][0]
    assert relative(ours.attention(MLA_LAYER, hidden), expected) < 1e-5


def test_the_latent_epsilon_is_the_one_named_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["low_rank_query"]
    assert model_config.K3Config.from_hf(config).latent_norm_eps == config["rms_norm_eps"] == 1e-5
    monkeypatch.setattr(model_config, "MLA_LATENT_NORM_EPS", TRANSFORMERS_LATENT_EPS)
    assert model_config.K3Config.from_hf(config).latent_norm_eps == TRANSFORMERS_LATENT_EPS


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("oracle", [recurrent_kimi_delta_attention, chunk_kimi_delta_attention])
@pytest.mark.parametrize("strength", [0.1, 5.0])
def test_kda_forms(form: str, oracle: Any, strength: float) -> None:
    """Both forms against both of theirs, from a state that is not zero. Their state is [K, V], ours [V, K]."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(100, 2, 32, generator=generator) for _ in range(3))
    g = -strength * torch.rand(100, 2, 32, generator=generator)
    beta = torch.rand(100, 2, generator=generator)
    state = torch.randn(2, 32, 32, generator=generator)
    expected, last = oracle(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=state.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, ours = getattr(kda, form)(*kda.normalise(q, k), v, g, beta, state)
    assert relative(found, expected[0]) < 1e-5
    assert relative(ours, last[0].transpose(1, 2)) < 1e-5
