"""Stock vLLM's kernels for the work of the operators here, as far as this process can import them. None where it cannot: a
benchmark says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.models.kimi_k3_fast.ops import experts
    from vllm.model_executor.models.kimi_k3_fast.ops.experts.torch_form import Weights


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # vLLM's import fails in many ways where it is not installed whole
        print(f"stock {module}.{name} is not here: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def linear(a: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The CuTe skinny GEMM of vLLM where it takes this shape (up to 16 tokens)."""
    if a.shape[0] > 16:
        return None
    skinny = _find("vllm.model_executor.kernels.linear.cute_dsl.skinny_gemm", "shape_dynamic_skinny_gemm")
    if skinny is None:
        return None
    try:
        skinny(a, weight)
    except Exception as error:
        print(f"stock skinny GEMM refuses {tuple(a.shape)} x {tuple(weight.shape)}: {error}", file=sys.stderr)
        return None
    return skinny


def attn_res() -> Callable[..., torch.Tensor] | None:
    """(prefix, delta, blocks [T, NB, D], norm_weight, qk_weight, output_norm_weight, num_blocks, write, eps, output_eps) -> [T,
    D].
    """
    return _find("vllm.models.kimi_k3.nvidia.ops.attn_res", "attn_res")


def topk() -> Callable[[torch.Tensor, torch.Tensor, int], object] | None:
    """(logits, bias, k) -> weights and ids, by the kernel vLLM's router calls for one group of sigmoid scores."""
    grouped = _find("vllm._custom_ops", "grouped_topk")
    return None if grouped is None else lambda logits, bias, k: grouped(logits, 1, 1, k, True, 1.0, bias, 1)


def sort_pairs() -> Callable[[torch.Tensor, int], object] | None:
    """(ids, experts) -> each expert's pairs in line, in blocks of 16: what Humming's experts launch before their products."""
    align = _find("vllm.model_executor.layers.fused_moe.moe_align_block_size", "moe_align_block_size")
    return None if align is None else lambda ids, experts: align(ids, 16, experts, ignore_invalid_experts=True)


def humming_layer(config: experts.Config, weights: Weights) -> torch.nn.Module | None:
    """Stock's layer of routed experts, with a copy of these weights (checkpoint layout) as its MXFP4 method lays them out:
    parameters w13_weight, w13_weight_scale, w2_weight, w2_weight_scale. None where that method chooses other kernels than
    Humming's; raises where vLLM is not installed whole. Wants a current `VllmConfig`.
    """
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    layer, device = torch.nn.Module(), weights.w13.device
    layer.layer_name = "experts"
    layer.moe_config = moe.FusedMoEConfig(
        **dict.fromkeys(("num_experts", "num_local_experts", "num_logical_experts"), config.experts),
        experts_per_token=config.top_k,
        hidden_dim=config.hidden,
        intermediate_size=config.width,
        activation=MoEActivation.SITU,
        activation_situ_beta=config.beta,
        activation_situ_linear_beta=config.linear_beta,
        routing_method=moe.RoutingMethodType.Unspecified,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        device=device,
    )
    method = Mxfp4MoEMethod(layer.moe_config)
    if method.mxfp4_backend.name != "HUMMING":
        print(f"stock chooses {method.mxfp4_backend.name} for experts here, not Humming", file=sys.stderr)
        return None
    with device:
        method.create_weights(layer, config.experts, config.hidden, config.width, torch.bfloat16, weight_loader=None)
    for matrix, codes, scales in (("w13", weights.w13, weights.s13), ("w2", weights.w2, weights.s2)):
        getattr(layer, f"{matrix}_weight").data.copy_(codes)
        getattr(layer, f"{matrix}_weight_scale").data.copy_(scales)
    method._build_moe_kernel = lambda layer: None  # only the weights are wanted
    method.process_weights_after_loading(layer)
    return layer


def situ_and_mul() -> Callable[..., None] | None:
    """(out [T, S], gate_up [T, 2S], beta, linear_beta)."""
    _find("vllm._custom_ops", "grouped_topk")  # loads vLLM's libraries
    return getattr(torch.ops._C, "situ_and_mul", None)


def rms_norm() -> Callable[..., None] | None:
    """(out, x, weight, eps)."""
    return _find("vllm._custom_ops", "rms_norm")


def kda_decode() -> Callable[..., object] | None:
    """The native fused decode of KDA (weight [3, 4, h d], norm weight fp32), which wants f_b's output."""
    call = _find("vllm._custom_ops", "fused_kda_decode")
    return call if call is not None and hasattr(torch.ops._C, "fused_kda_decode") else None


def kda_triton() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]] | None:
    """What K3's layer launches where the native decode does not fit: convolution, packed recurrence of one token, recurrence of
    several, gated norm.
    """
    recurrences = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
    found = (
        _find("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_update"),
        _find(recurrences, "fused_recurrent_kda_packed_decode"),
        _find(recurrences, "fused_recurrent_kda"),
        _find("vllm.third_party.flash_linear_attention.ops.kda", "rms_norm_gated"),
    )
    return None if None in found else found  # type: ignore[return-value]


def mla_decode() -> Callable[..., Any] | None:
    """FlashAttention 3 over the paged latent cache, as the FLASH_ATTN_MLA backend calls it on Hopper."""
    return _find("vllm.vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func")


def mla_schedule() -> Callable[..., torch.Tensor] | None:
    """FlashAttention 3's plan of the splits, made once for a step outside the layers."""
    return _find("vllm.vllm_flash_attn.flash_attn_interface", "get_scheduler_metadata")
