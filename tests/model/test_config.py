"""A configuration that cannot be served is refused with everything that is wrong with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import tiny_config, tiny_kimi_linear_config
from vllm.model_executor.models.kimi_k3_fast.model.config import ConfigError, K3Config


def changed(linear: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(tiny_config(**fields))
    config["linear_attn_config"] |= linear or {}
    return config


def test_both_families_are_read() -> None:
    k3 = K3Config.from_hf(tiny_config())
    assert (k3.attn_res_block, k3.num_attn_res_blocks, k3.latent_size, k3.mxfp4_experts) == (4, 3, 64, True)
    assert [k3.is_kda(i) for i in range(9)] == [True, True, True, False, True, True, True, False, False]
    assert [k3.is_moe(i) for i in range(9)] == [False] + [True] * 8
    linear = K3Config.from_hf(tiny_kimi_linear_config())
    assert (linear.attn_res_block, linear.latent_size, linear.q_lora_rank, linear.gate_lower_bound) == (None, None, None, None)
    assert not linear.mxfp4_experts and not linear.full_rank_gate and linear.hidden_act == "silu"


def test_a_wrapped_config_is_its_text_config() -> None:
    assert K3Config.from_hf({"model_type": "kimi_k3", "text_config": tiny_config()}) == K3Config.from_hf(tiny_config())


@pytest.mark.parametrize("bound", [0.0, 0.5, -5.01, float("nan"), "-5"])
def test_gate_lower_bound_outside_its_interval(bound: Any) -> None:
    with pytest.raises(ConfigError, match=r"gate_lower_bound: expected null, or a number in \[-5, 0\), found"):
        K3Config.from_hf(changed({"gate_lower_bound": bound}))


@pytest.mark.parametrize("bound", [-5.0, -5, -1e-3, None])
def test_gate_lower_bound_inside_its_interval(bound: Any) -> None:
    assert K3Config.from_hf(changed({"gate_lower_bound": bound})).gate_lower_bound == bound


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(mla_use_nope=False), "mla_use_nope: expected true, found False"),
        (changed({"kda_layers": [1, 2, 3, 4, 5, 6, 7]}), r"expected no layer in both, found \[4\]"),
        (changed({"kda_layers": [1, 2, 3, 6, 7]}), r"found 'layers in neither: \[5\]'"),
        (changed({"kda_layers": [1, 2, 3, 5, 6, 7, 10]}), r"expected layer numbers within 1..9, found \[10\]"),
        (changed({"kda_layers": None}), "kda_layers: expected a list of 1-based layer numbers, found None"),
        (changed(hidden_act="gelu"), "hidden_act: expected 'silu' or 'situ', found 'gelu'"),
        (changed(kv_lora_rank=None), "kv_lora_rank: expected an integer >= 1, found None"),
        (changed(hidden_size="128"), "hidden_size: expected an integer >= 1, found '128'"),
        (changed(rms_norm_eps=0), "rms_norm_eps: expected a positive number, found 0"),
        (changed(num_experts_per_token=17), "num_experts_per_token: expected at most num_experts = 16, found 17"),
        (changed(moe_router_activation_func="softmax"), "moe_router_activation_func: expected 'sigmoid', found 'softmax'"),
        (changed(num_expert_group=2), r"num_expert_group, topk_group: expected 1, 1, found \(2, 1\)"),
        (changed(tie_word_embeddings=True), "tie_word_embeddings: expected false, found True"),
        (changed(routed_expert_hidden_size=None), "latent_moe_use_norm: expected false without routed_expert_hidden_size"),
        (changed(routed_expert_hidden_size=48), "expert input size: expected a multiple of the MXFP4 group 32, found 48"),
        (changed(quantization_config={"quant_method": "fp8"}), "quantization_config: expected quant_method 'compressed-tensors'"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        K3Config.from_hf(config)


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(changed({"gate_lower_bound": -9}, mla_use_nope=False, hidden_act="relu", v_head_dim=0))
    text = str(caught.value)
    assert (
        all(word in text for word in ("gate_lower_bound", "mla_use_nope", "hidden_act", "v_head_dim")) and text.count("\n") == 4
    )


@pytest.mark.parametrize(
    ("size", "message"), [(3, "num_attention_heads: expected a multiple of the tensor-parallel size 3"), (4, "per rank")]
)
def test_tensor_parallel_sizes_that_do_not_divide(size: int, message: str) -> None:
    config = K3Config.from_hf(tiny_config())
    config.check_tensor_parallel(1)
    config.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match=message):
        config.check_tensor_parallel(size)
