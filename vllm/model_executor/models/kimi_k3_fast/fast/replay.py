"""A saved step run again: the model from its checkpoint, the step's own state and metadata, both paths. `k3fast replay-step`.

No engine takes part. The caches hold just the slots and blocks that the step read, numbered as the file numbers them. Each rank
of a tensor-parallel group has saved its own part of the state: all parts are run together, in a process for each.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
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
        "rank": get_tensor_model_parallel_rank(),
        "max_tokens": load(vllm_config.additional_config).max_tokens,
    }


def replay(files: Sequence[Path]) -> list[shadow.Replay]:
    """Run a saved step again and compare, rank by rank. Raises ValueError unless these are one file of each rank of one step, and
    where it cannot be run here."""
    ordered = in_rank_order(files)
    if len(ordered) == 1:
        return [shadow.replay(ordered[0], run)]
    with tempfile.TemporaryDirectory() as folder:
        try:  # ends every rank when one fails, which would otherwise wait for it in a collective
            torch.multiprocessing.spawn(_rank, (ordered, folder), nprocs=len(ordered))
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise ValueError(f"a rank failed: {error}") from None
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(len(ordered))]
    return results


def in_rank_order(files: Sequence[Path]) -> list[Path]:
    """The parts of one saved step, by rank. Raises ValueError where one is missing, twice there, or of another step."""
    steps = {file: shadow.Step.load(file) for file in files}
    for file, step in steps.items():
        if not {"model", "tensor_parallel", "rank", "groups"} <= set(step.origin):
            raise ValueError(f"{file}: expected a step with the model it belongs to, found {step.origin or 'no model'}")
    ranks = {step.origin["rank"]: file for file, step in steps.items()}
    whole = {step.origin["tensor_parallel"] for step in steps.values()}
    found = sorted((step.step, step.plan_key, step.origin["rank"]) for step in steps.values())
    if len({(number, key) for number, key, _ in found}) > 1 or len(ranks) != len(found) or whole != {len(found)}:
        raise ValueError(
            f"expected one file of each of the {max(whole)} ranks of one step, found (step, plan, rank) {found}: give the files "
            "that the ranks saved for that step, each rank those named after its own process"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _rank(rank: int, files: Sequence[Path], folder: str) -> None:
    """One rank of `replay`, in a process of its own; leaves its result in the folder."""
    torch.set_num_threads(max(1, torch.get_num_threads() // len(files)))
    os.environ["VLLM_DIST_IDENT"] = f"k3fast_replay_{os.getppid()}"  # names the memory that ranks on one CPU reduce through
    _join(rank, len(files), f"{folder}/store")
    torch.save(shadow.replay(files[rank], run), Path(folder) / f"{rank}.pt")


def _join(rank: int, world: int, store: str) -> None:
    """Make this process a rank of the group of a saved step."""
    from vllm.config import ParallelConfig

    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=world))):
        init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world)


def run(step: shadow.Step) -> shadow.Rerun:
    """One rank's part of a saved step, both ways. Raises ValueError where the step cannot be run here."""
    model = _load(step.origin)
    metadata = _bind(model, step)
    ids = step.inputs["input_ids"]
    choices = [step.inputs[name] for name in step.inputs if name.startswith("choices.")]

    def standard(nudge: float, draw: int = 0) -> torch.Tensor:
        return model.forward_standard(ids, nudge=nudge, draw=draw)

    with torch.inference_mode(), override_forward_context(SimpleNamespace(attn_metadata=metadata)):
        both = model.fast.compare(ids, metadata, standard)
        drawn = model.fast.drawn(both, metadata, standard)
        return shadow.Rerun(both.fast, both.standard, both.nudged, drawn, model.fast.outcome(metadata, standard, choices))


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
        tensor_parallel_size=origin["tensor_parallel"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={KEY: {"max_tokens": origin["max_tokens"]}},
    ).create_engine_config()
    with tempfile.TemporaryDirectory() as folder:
        if not model_parallel_is_initialized():
            _join(0, 1, f"{folder}/store")
    with set_current_vllm_config(config):
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
