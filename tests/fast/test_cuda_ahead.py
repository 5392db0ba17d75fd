"""What is compiled ahead is what a server asks for: the same kernels, from the config alone and from stock's loaded model."""

from __future__ import annotations

import cuda_fakes as fakes
import pytest

from vllm.model_executor.models.kimi_k3_fast.fast import cuda_ahead
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Executor
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import view_model
from vllm.model_executor.models.kimi_k3_fast.ops import experts

ARCH = "sm_90a"
CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": fakes.VOCAB,
    "hidden_size": fakes.D,
    "num_hidden_layers": len(fakes.KINDS),
    "num_attention_heads": fakes.HEADS,
    "num_key_value_heads": fakes.HEADS,
    "intermediate_size": fakes.DENSE,
    "hidden_act": "situ",
    "activation_situ_beta": fakes.BETA,
    "activation_situ_linear_beta": fakes.LINEAR_BETA,
    "rms_norm_eps": fakes.EPS,
    "attn_res_block_size": fakes.CLOSES,
    "max_position_embeddings": 4096,
    "q_lora_rank": fakes.Q_RANK,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [i + 1 for i, kind in enumerate(fakes.KINDS) if kind == "kda"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(fakes.KINDS) if kind == "mla"],
        "num_heads": fakes.HEADS,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": fakes.LOWER,
    },
    "num_experts": fakes.EXPERTS,
    "num_experts_per_token": fakes.TOP_K,
    "moe_intermediate_size": fakes.WIDTH,
    "num_shared_experts": fakes.SHARED // fakes.WIDTH,
    "routed_expert_hidden_size": fakes.LATENT,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}


@pytest.mark.parametrize(
    ("ranks", "mailbox", "layout", "posted"),
    [(1, False, None, 0), (2, False, None, 0), (2, True, None, 0), (2, True, None, 8), (2, False, experts.RAW, 0)],
)
def test_the_config_names_the_kernels_of_the_loaded_model(monkeypatch, ranks, mailbox, layout, posted):
    """Also of the experts' layout: stock's on Hopper, unless the server is told to take another backend."""
    monkeypatch.setattr(cuda_ahead, "block_size", lambda heads: fakes.BLOCK_SIZE)
    model, kept = fakes.stock(fakes.weights(), 0, ranks, packs=layout is None)
    monkeypatch.setattr(cuda_ahead, "LEAST_WIDTH", 1)  # the fakes are narrower than what stock would pad
    group = {"mailbox": mailbox, "device": "cpu", "posted": posted}
    served = Executor(view_model(model, kept), fakes.caches, {"layers.2": 2}, ARCH, ranks, **group)
    ahead = cuda_ahead.specs(CONFIG, ARCH, ranks, 2 * fakes.BLOCK_SIZE, [1, 16], mailbox, layout, posted)
    assert set(ahead) == set(served.specs([1, 16])) and len(ahead) == len(set(ahead))


@pytest.mark.parametrize(("heads", "tokens"), [(12, 768), (6, 384)])
def test_blocks_are_as_large_as_vllm_makes_them(heads, tokens):
    """As seen in vLLM 0.32.0 with one rank of TP8 and of TP16."""
    assert cuda_ahead.block_size(heads) == tokens


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="expected a configuration with AttnRes"):
        cuda_ahead.specs({**CONFIG, "attn_res_block_size": None}, ARCH, 1, 4096)
