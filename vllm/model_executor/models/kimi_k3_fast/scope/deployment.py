"""`Deployment`: the plain facts on which the scope rules decide, read once from vLLM's configuration and the platform.

Every rank of a deployment reads the same facts, so that every rank reaches the same verdict without talking to another.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

K3_ARCHITECTURES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")


@dataclass(frozen=True)
class Deployment:
    """Facts only; no vLLM object is kept. Sizes are counts, dtypes are vLLM's names."""

    architecture: str = K3_ARCHITECTURES[0]
    platform: str = "cpu"  # "cpu", "cuda", "rocm", ...
    device_arch: str = "cpu"  # "cpu", or the compute capability as "sm_90a"
    device: str = "cpu"  # "cpu", or the GPU's name
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    state_dtype: str = "float32"  # of the recurrent state
    quantization: str | None = None  # of the routed experts
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    prefill_context_parallel: int = 1
    decode_context_parallel: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    dbo: bool = False
    lora: bool = False
    speculation: str | None = None  # the method's name
    rejection_sampling: str | None = None  # "standard", "block" or "synthetic", where there is speculation
    kv_connector: str | None = None
    sleep_mode: bool = False
    prompt_embeds: bool = False
    replay_ssm: bool = False
    cudagraph: str = "none"  # vLLM's cudagraph_mode of decode steps, lower case
    runner: str = "v1"  # which of vLLM's model runners: "v1" or "v2"
    conv_layout: str = "SD"  # of the convolution state: (state, dim) or "DS"
    offload: bool = False  # weights move between host and device
    attention_heads: int = 0
    kda_heads: int = 0
    sizes: tuple[tuple[str, int], ...] = ()  # of the model on one rank, those that an operator bounds
    options: tuple[str, ...] = ()  # vLLM's, that ask something of every layer as it runs
    features: tuple[str, ...] = ()  # of the model's configuration, those that the fast path does not plan

    def facts(self) -> dict[str, str]:
        """Name and printed value of every fact, for the report and `k3fast doctor`."""
        return {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self)}


def device_arch(platform: Any) -> str:
    """The kernel architecture of vLLM's `current_platform`: "cpu", or "sm_90a" for compute capability 9.0."""
    if not platform.is_cuda():
        return platform.device_type
    capability = platform.get_device_capability()
    return f"sm_{capability.major}{capability.minor}a"


def device_name(platform: Any) -> str:
    """The name of the first GPU of vLLM's `current_platform`, "cpu" without one."""
    return platform.get_device_name() if platform.is_cuda() else "cpu"


def read(vllm_config: Any) -> Deployment:
    """The facts of a resolved `VllmConfig`."""
    import vllm.envs as envs
    from vllm.platforms import current_platform

    offload, graphs = vllm_config.offload_config, str(vllm_config.compilation_config.cudagraph_mode)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text = model.hf_text_config
    linear = getattr(text, "linear_attn_config", None) or {}
    quantization = getattr(text, "quantization_config", None) or getattr(model.hf_config, "quantization_config", None)
    transfer = vllm_config.kv_transfer_config
    return Deployment(
        architecture=model.architecture,
        platform=current_platform.device_type,
        device_arch=device_arch(current_platform),
        device=device_name(current_platform),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=cache.cache_dtype,
        state_dtype=cache.mamba_ssm_cache_dtype,
        quantization=(quantization or {}).get("quant_method"),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        eplb=parallel.enable_eplb,
        dbo=parallel.enable_dbo,
        lora=vllm_config.lora_config is not None,
        speculation=vllm_config.speculative_config.method if vllm_config.speculative_config else None,
        rejection_sampling=vllm_config.speculative_config.rejection_sample_method if vllm_config.speculative_config else None,
        kv_connector=transfer.kv_connector if transfer is not None else None,
        sleep_mode=model.enable_sleep_mode,
        prompt_embeds=model.enable_prompt_embeds,
        replay_ssm=cache.use_replayssm,
        cudagraph="none" if model.enforce_eager else graphs.rpartition(".")[2].lower(),
        runner="v2" if current_platform.is_cuda() and vllm_config.use_v2_model_runner else "v1",
        conv_layout=envs.VLLM_SSM_CONV_STATE_LAYOUT or "SD",
        offload=offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
        attention_heads=int(getattr(text, "num_attention_heads", 0) or 0),
        kda_heads=int(linear.get("num_heads", 0) or 0),
        sizes=_sizes(text, linear, parallel.tensor_parallel_size),
        options=_options_of_layers(vllm_config, envs),
        features=_features_not_planned(text, linear, bool(quantization)),
    )


def _sizes(text: Any, linear: Any, tensor_parallel: int) -> tuple[tuple[str, int], ...]:
    """Name and value of every size that a rule bounds; one that the model does not have is left out."""
    block = getattr(text, "attn_res_block_size", None)
    found = {
        "KDA head width": linear.get("head_dim"),
        "KDA conv width": linear.get("short_conv_kernel_size"),
        "MLA heads": (getattr(text, "num_attention_heads", 0) or 0) // tensor_parallel,
        "MLA key width": getattr(text, "qk_nope_head_dim", None),
        "AttnRes sources": 1 - (-text.num_hidden_layers // block) if block else None,
        "experts of a token": getattr(text, "num_experts_per_token", None),
        "expert input": getattr(text, "routed_expert_hidden_size", None),
        "expert width": (getattr(text, "moe_intermediate_size", 0) or 0) // tensor_parallel,
    }
    return tuple((name, int(size)) for name, size in found.items() if size)


def _options_of_layers(vllm_config: Any, envs: Any) -> tuple[str, ...]:
    """What is asked of layers as they run, or of weights while they serve."""
    wanted = {
        "routed experts returned with the output": vllm_config.aux_output_config.enabled,
        "batch invariance": bool(envs.VLLM_BATCH_INVARIANT),
        "weight transfer": vllm_config.weight_transfer_config is not None,
    }
    return tuple(name for name, found in wanted.items() if found)


def _features_not_planned(text: Any, linear: Any, quantized: bool) -> tuple[str, ...]:
    """What a configuration of the family asks for beyond Kimi K3's own features (Kimi-Linear asks for all of these)."""
    wanted = {
        "no AttnRes": not getattr(text, "attn_res_block_size", None),
        "no latent MoE": not getattr(text, "routed_expert_hidden_size", None),
        "experts not in MXFP4": not quantized,
        "full-rank query": not getattr(text, "q_lora_rank", None),
        "no MLA output gate": not getattr(text, "mla_use_output_gate", False),
        "low-rank KDA gate": not linear.get("use_full_rank_gate", False),
        "unbounded KDA decay": linear.get("gate_lower_bound") is None,
        "activation other than situ": getattr(text, "hidden_act", None) != "situ",
    }
    return tuple(name for name, found in wanted.items() if found)
