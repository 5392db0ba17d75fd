"""The model classes that vLLM serves on CUDA: stock's own, with the fast path in their decode graphs.

Loading, prefill, mixed and eager steps are stock's code, untouched. The model state, vLLM's hook for a model in its V2 runner,
tells `CudaPath` when weights are loaded, caches bound and batches prepared; the forward pass asks it only for batches that are
about to be captured. `KimiK3ForConditionalGeneration` makes its language model through vLLM's registry and so gets the class
below.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.models.kimi_k3.nvidia.model import KimiK3ForConditionalGeneration, KimiLinearForCausalLM
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from .. import settings
from ..guard import current
from ..scope import deployment
from . import cuda_exchange, cuda_shadow, metadata
from .cuda_path import CudaPath, caches_of
from .cuda_views import KeptExperts, attention_layers

_path: CudaPath | None = None  # of the model that this process serves; `dispatch` has no model at hand


class FastKimiLinearForCausalLM(KimiLinearForCausalLM):
    """Stock's K3 text model. Raises FastPathRequired before any weight is loaded where `require` cannot be kept."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.fast: CudaPath | None = None
        chosen = settings.load(vllm_config.additional_config)
        if chosen.mode == "off":
            return
        routed = {i: experts for i, layer in enumerate(self.model.layers) if (experts := _routed_experts(layer)) is not None}
        sizes = [KeptExperts.bytes_of(experts) for experts in routed.values()]
        world = get_tensor_model_parallel_world_size()
        largest = vllm_config.scheduler_config.max_num_seqs
        gather = metadata.bind_ranks(current())
        self.fast = CudaPath(
            deployment.read(vllm_config),
            chosen,
            [size for size in vllm_config.compilation_config.cudagraph_capture_sizes or () if size <= largest],
            lambda: {i: KeptExperts(f"layer {i}", experts) for i, experts in routed.items()},
            (sum(shared for shared, _ in sizes), sum(copied for _, copied in sizes)),
            world,
            tensor_model_parallel_all_reduce if world > 1 else lambda x: x,
            gather,
            cuda_exchange.choose(chosen.exchange, get_tp_group(), gather),
            rank=get_tensor_model_parallel_rank(),
        )

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As stock's: token ids [T] or embeddings [T, D] -> hidden states [T, D] before the final norm."""
        if self.fast is not None and self.fast.staged is not None:
            hidden = self._staged(self.fast, input_ids, positions.shape[-1], inputs_embeds)
            if hidden is not None:
                return hidden
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)

    def _staged(self, fast: CudaPath, ids: torch.Tensor | None, tokens: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The batch that the runner warms up or captures, if this is it."""
        context = get_forward_context()
        full = isinstance(context.attn_metadata, dict) and context.cudagraph_runtime_mode == CUDAGraphMode.NONE
        if not full or fast.staged is None or fast.staged.padded != tokens:
            return None
        names = [attention.name for attention in attention_layers(fast.model)] if fast.model is not None else []
        return fast.forward(
            lambda: given if given is not None else self.embed_input_ids(ids),
            lambda: metadata.cuda_step(names, tokens, context.attn_metadata, context.slot_mapping),
            torch.cuda.is_current_stream_capturing(),
        )

    def get_model_state_cls(self) -> type[MambaHybridModelState]:
        """vLLM's hook for a model's state in the V2 runner; stock's class where the fork is off."""
        return MambaHybridModelState if self.fast is None else FastModelState


class FastKimiK3ForConditionalGeneration(KimiK3ForConditionalGeneration):
    """Stock's multimodal wrapper; only the hook is passed on from the language model in it."""

    def get_model_state_cls(self) -> type[MambaHybridModelState]:
        return self.language_model.get_model_state_cls()


class FastModelState(MambaHybridModelState):
    """Stock's state of hybrid models, which also tells the fast path what the runner does."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        global _path
        super().__init__(vllm_config, model, encoder_cache, device)
        text = getattr(model, "language_model", model)
        self.fast: CudaPath = text.fast
        _path = self.fast
        _watch_dispatch()
        _watch_capture()
        self.fast.loaded(text.model)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        model = self.fast.model
        if model is not None:
            self.fast.bound(lambda: caches_of(model, lambda name: layers[name].kv_cache))

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        found = super().prepare_attn(input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs)
        if for_capture:
            uniform = self.vllm_config.compilation_config.cudagraph_mode.separate_routine()
            self.fast.stage(input_batch.num_reqs, input_batch.num_tokens_after_padding, uniform)
        elif cudagraph_mode == CUDAGraphMode.FULL:
            self.fast.replayed()
        else:
            self.fast.record(metadata.batch_key(input_batch, cudagraph_mode.name.lower(), self.fast.generation))
        return found


def _routed_experts(layer: nn.Module) -> nn.Module | None:
    """Stock's module that owns a layer's MXFP4 experts, if the layer has any."""
    return getattr(getattr(getattr(layer, "block_sparse_moe", None), "experts", None), "routed_experts", None)


def _watch_dispatch() -> None:
    """Let a batch whose graph holds a retired plan run eagerly instead: vLLM's choice of graph, asked about once more. Once."""
    original = ModelCudaGraphManager.dispatch
    if getattr(original, "_kimi_k3_fast", False):
        return

    @functools.wraps(original)
    def dispatch(self: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        chosen = original(self, num_reqs, num_tokens, *args, **kwargs)
        if _path is None or chosen.cg_mode != CUDAGraphMode.FULL or not _path.turn_away(chosen.num_tokens):
            return chosen
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs, num_active_loras=chosen.num_active_loras
        )

    dispatch._kimi_k3_fast = True  # type: ignore[attr-defined]
    ModelCudaGraphManager.dispatch = dispatch  # type: ignore[method-assign]


def _watch_capture() -> None:
    """Where the settings ask for audit or shadow, let stock's graphs be captured behind the fast ones and check them. Once."""
    original = ModelCudaGraphManager.capture
    if getattr(original, "_kimi_k3_fast", False):
        return

    @functools.wraps(original)
    def capture(self: Any, model: Any, model_state: Any, input_buffers: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            original(self, model, model_state, input_buffers, *args, **kwargs)

        again()
        profiling = getattr(self, "_max_full_descs_to_capture", None) is not None
        if _path is not None and isinstance(model_state, FastModelState) and not profiling:
            cuda_shadow.watch(self, _path, again, input_buffers.is_padding)

    capture._kimi_k3_fast = True  # type: ignore[attr-defined]
    ModelCudaGraphManager.capture = capture  # type: ignore[method-assign]
