"""A saved step run again: the model from its checkpoint, the step's own state and metadata, both paths. `k3fast replay-step`.

No engine takes part. The caches hold just the slots and blocks that the step read, numbered as the file numbers them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
from vllm.forward_context import override_forward_context

from ..guard import shadow
from ..model.backend import NULL_BLOCK, KDAMetadata, MLAMetadata, StepRows
from ..settings import KEY, load


def origin(vllm_config: VllmConfig) -> dict[str, Any]:
    """What `run` needs to load this deployment's model again, as plain values."""
    model = vllm_config.model_config
    return {
        "model": str(Path(model.model).resolve()) if Path(model.model).is_dir() else model.model,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "max_tokens": load(vllm_config.additional_config).max_tokens,
    }


def run(step: shadow.Step) -> shadow.Rerun:
    """Raises ValueError where the step cannot be run here."""
    if step.origin.get("tensor_parallel") != 1 or "groups" not in step.origin:
        raise ValueError(
            f"expected a step of one rank, with the model it belongs to, found {step.origin or 'no model'}: "
            "reproduce it with --tensor-parallel-size 1, or compare the saved tensors"
        )
    model = _load(step.origin)
    metadata = _bind(model, step)
    ids = step.inputs["input_ids"]
    choices = [step.inputs[name] for name in step.inputs if name.startswith("choices.")]

    def standard(nudge: float) -> torch.Tensor:
        return model.forward_standard(ids, nudge=nudge)

    with torch.inference_mode(), override_forward_context(SimpleNamespace(attn_metadata=metadata)):
        both = model.fast.compare(ids, metadata, standard)
        return shadow.Rerun(both.fast, both.standard, both.nudged, model.fast.outcome(metadata, standard, choices))


def _load(origin: Mapping[str, Any]) -> Any:
    """The model, by vLLM's own loader, in a process that serves nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=origin["model"],
        revision=origin["revision"],
        dtype=origin["dtype"],
        kv_cache_dtype=origin["kv_cache_dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={KEY: {"max_tokens": origin["max_tokens"]}},
    ).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype):
            model = loader.create_model(config, config.model_config)
            loader.load_weights(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return model.eval()


def _bind(model: Any, step: shadow.Step) -> dict[str, Any]:
    """Give every attention layer a cache with the saved state, and return the step's metadata by layer."""
    by_group: dict[int, KDAMetadata | MLAMetadata] = {}
    lengths = next(tensor.tolist() for name, tensor in step.inputs.items() if name.endswith(".lengths"))
    count = len(lengths)
    rows = StepRows(list(range(count + 1)), lengths, list(range(count)), [])
    metadata = {}
    for index, (name, layer) in enumerate(model.fast.layers):
        group = step.origin["groups"][index]
        if f"groups.{group}.slots" in step.inputs:
            _bind_state(layer, [step.inputs[f"layers.{index}.{part}"] for part in ("conv", "state")])
            made = by_group.setdefault(group, _kda(rows, step.inputs[f"groups.{group}.slots"]))
        else:
            latent = step.inputs[f"layers.{index}.latent"]
            layer.bind_kv_cache(torch.cat((torch.zeros_like(latent[:1]), latent)).unsqueeze(1))
            table, mapping = (step.inputs[f"groups.{group}.{part}"] for part in ("block_table", "slot_mapping"))
            made = by_group.setdefault(group, MLAMetadata(rows, table, mapping))
        metadata[name] = made
    return metadata


def _bind_state(layer: Any, saved: list[torch.Tensor]) -> None:
    shapes = layer.get_state_shape()
    layer.kv_cache = tuple(
        torch.zeros(1 + len(state), *shape, dtype=state.dtype) for shape, state in zip(shapes, saved, strict=True)
    )
    for view, state in zip((layer.conv_state, layer.recurrent_state), saved, strict=True):
        view[1:] = state


def _kda(rows: StepRows, slots: torch.Tensor) -> KDAMetadata:
    owned = (slots > NULL_BLOCK).nonzero().flatten()
    return KDAMetadata(rows, slots, owned, slots[owned], torch.zeros(len(owned), dtype=torch.bool))
