"""Kimi K3 at low latency: an overlay on stock vLLM 0.32.0. `docs/architecture.md` shows the rooms."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """The plug-in's entry point: make vLLM serve Kimi K3 with this package. Called in every process, possibly more than once.

    Raises RuntimeError on another vLLM than the one the package was written against: nothing is registered then.
    """
    from .base import check_base

    refusal = check_base()
    if refusal is not None:
        raise RuntimeError(
            f"vllm-kimi-k3-fast does not start: {refusal}. To run this vLLM without the fork, uninstall vllm-kimi-k3-fast or "
            "leave it out of VLLM_PLUGINS."
        )
    from . import patches
    from .guard import api

    patches.apply()
    patches.hooks.decide = _watches
    api.install(patches.worker_report, lambda: {"patches": patches.state()})

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _register_cpu()
    elif current_platform.is_cuda():
        _register_cuda()


def _watches(vllm_config: Any) -> bool:
    """Whether the guard follows this engine: it serves a model of the family, and the fork is on, where its steps can be seen.

    Raises RuntimeError for mode `require` on a platform for which the fork registers no model: no fast step could ever come.
    """
    from vllm.platforms import current_platform

    from . import settings
    from .scope.deployment import K3_ARCHITECTURES

    if vllm_config.model_config.architecture not in K3_ARCHITECTURES:
        return False
    mode, served = settings.load(vllm_config.additional_config).mode, current_platform.is_cpu() or current_platform.is_cuda()
    if mode == "require" and not served:
        raise RuntimeError(
            "mode is 'require': expected a CPU or a CUDA device, where the fork has a model, found "
            f"{current_platform.device_type}. Set mode to 'auto' to let vLLM's own model answer; "
            "docs/support.md says what has been run where."
        )
    return mode != "off" and served and (current_platform.is_cpu() or vllm_config.use_v2_model_runner)


def _register_cpu() -> None:
    """On CPUs the models of the family are this package's own; vLLM's need CUDA."""
    from vllm.model_executor.models.registry import ModelRegistry

    from . import settings
    from .model.layers import register_quantization
    from .model.platform import ARCHITECTURES, restore_chunking

    restore_chunking(inspect=lambda vllm_config: settings.load(vllm_config.additional_config))
    register_quantization()
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}.fast.served:ServedKimiK3ForCausalLM")


def _register_cuda() -> None:
    """On CUDA the models of the family are stock's, with the fast path in their decode graphs."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"):
        ModelRegistry.register_model(architecture, f"{__name__}.fast.cuda:Fast{architecture}")
