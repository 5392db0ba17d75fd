"""A checkpoint rewritten for the GPU kernels is the same model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import for_gpu
import pytest
import torch

from vllm.model_executor.models.kimi_k3_fast.model.checkpoint import random_tensors, tiny_config, write_released
from vllm.model_executor.models.kimi_k3_fast.model.config import K3Config
from vllm.model_executor.models.kimi_k3_fast.ops import mla

sys.path.append(str(Path(__file__).parents[1] / "model"))
TRAINED = Path(__file__).parents[2] / "checkpoints/k3-tiny"


def test_the_widened_model_computes_the_same(tmp_path: Path) -> None:
    from reference import Reference

    config = tiny_config(q_lora_rank=64, num_hidden_layers=4)
    config["linear_attn_config"] = {**config["linear_attn_config"], "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    tensors = random_tensors(config, seed=3)
    write_released(tmp_path / "a", config, tensors)
    for_gpu.main(tmp_path / "a", tmp_path / "b")
    wide = json.loads((tmp_path / "b" / "config.json").read_text())
    assert K3Config.from_hf(wide).q_lora_rank == 256 and K3Config.from_hf(wide).mxfp4_experts
    widened = for_gpu.load_file(tmp_path / "b" / "model.safetensors")
    prompt = list(range(10, 30))
    before, after = Reference(config, tensors).logits(prompt), Reference(wide, widened).logits(prompt)
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-3 * before.std().item()), "apart by more than epsilon's weight"
    wrong = {n: (t * 1.01 if n.endswith("q_a_layernorm.weight") else t) for n, t in widened.items()}
    assert not torch.allclose(before, Reference(wide, wrong).logits(prompt), rtol=1e-3, atol=1e-3 * before.std().item())


def test_the_trained_checkpoint_fits_the_kernel_then() -> None:
    config = json.loads((TRAINED / "config.json").read_text())
    for found, fits in ((config, False), (for_gpu.config_for_gpu(config), True)):
        rows, heads = found["q_lora_rank"] + 576 + 512, found["num_attention_heads"]
        shape = mla.Config(heads, 1, rows, block_size=64, pages=64, q_rank=found["q_lora_rank"], norm_eps=1e-5, scale=0.07)
        assert (mla.unavailable_reason(shape, "sm_90a") is None) == fits
    with pytest.raises(ValueError, match="512"):
        for_gpu.config_for_gpu(for_gpu.config_for_gpu(config))
