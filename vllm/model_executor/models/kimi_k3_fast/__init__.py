"""Kimi K3 at low latency: an overlay on stock vLLM 0.32.0. `docs/architecture.md` shows the rooms."""


def register() -> None:
    """The plug-in's entry point: make vLLM serve Kimi K3 with this package. Called in every process, possibly more than once."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from .model.layers import register_quantization
    from .model.platform import ARCHITECTURES, restore_chunking

    restore_chunking()
    register_quantization()
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}.fast.served:ServedKimiK3ForCausalLM")
