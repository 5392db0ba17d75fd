"""A model with caches but without an engine: the test chooses which tokens of which requests make a step.

Whatever a step must not depend on is NaN: caches start poisoned, the null block included, and stay so where nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import override_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm.model_executor.models.kimi_k3_fast.model import loader
from vllm.model_executor.models.kimi_k3_fast.model.backend import KDAMetadataBuilder, MLAMetadataBuilder
from vllm.model_executor.models.kimi_k3_fast.model.causal_lm import KimiK3ForCausalLM
from vllm.model_executor.models.kimi_k3_fast.model.kda import KimiDeltaAttention

BLOCK = 16


class Harness:
    """`max_requests` requests of up to `max_length` tokens; request r owns state slot r + 1 and a run of MLA blocks from 1 on."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        max_requests: int = 4,
        max_length: int = 256,
    ) -> None:
        self.vllm_config = _vllm_config(config, dtype)
        with set_default_torch_dtype(dtype):
            self.model = KimiK3ForCausalLM(vllm_config=self.vllm_config)
        loader.load(dict(self.model.slots()), tensors.items(), None, self.model.config.num_layers, 0)
        self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)  # as vLLM's loader does
        self.blocks_each = -(-max_length // BLOCK)
        self.lengths = [0] * max_requests
        self.layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        for layer in self.layers.values():
            if isinstance(layer, KimiDeltaAttention):
                shapes = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
                layer.kv_cache = tuple(poison(1 + max_requests, *shape, dtype=kind) for shape, kind in shapes)
            else:
                row = layer.config.mla_row_size
                layer.bind_kv_cache(poison(1 + max_requests * self.blocks_each, 1, BLOCK, row, dtype=dtype))

    def metadata(self, batch: Sequence[tuple[int | None, Sequence[int]]], padding: int = 0) -> dict[str, Any]:
        """Each attention layer's metadata for a step. Request None is a padded row: no length, null slots."""
        counts = [len(tokens) for _, tokens in batch]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
        owned = [[1 + r * self.blocks_each + b for b in range(self.blocks_each)] if r is not None else [] for r, _ in batch]
        table = torch.tensor([row or [0] * self.blocks_each for row in owned], dtype=torch.int32)
        slots: list[int] = []
        for (request, tokens), row in zip(batch, owned, strict=True):
            first = 0 if request is None else self.lengths[request]
            slots += [row[p // BLOCK] * BLOCK + p % BLOCK if row else -1 for p in range(first, first + len(tokens))]
        lengths = [n if r is None else self.lengths[r] + n for (r, _), n in zip(batch, counts, strict=True)]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(batch),
            num_actual_tokens=sum(counts) + padding,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.tensor([*slots, *([-1] * padding)], dtype=torch.int64),
        )
        state = common.replace(
            block_table_tensor=torch.tensor([[0 if r is None else r + 1] for r, _ in batch], dtype=torch.int32)
        )
        built = {}
        for name, layer in self.layers.items():
            kda = isinstance(layer, KimiDeltaAttention)
            builder = KDAMetadataBuilder if kda else MLAMetadataBuilder
            spec = layer.get_kv_cache_spec(self.vllm_config)
            built[name] = builder(spec, [name], self.vllm_config, torch.device("cpu")).build(0, state if kda else common)
        return built

    def step(self, batch: Sequence[tuple[int | None, Sequence[int]]], padding: int = 0) -> torch.Tensor:
        """Run a step of (request, new tokens) and return the logits of all its tokens [T, V], padding left out."""
        tokens = [t for _, part in batch for t in part]
        with override_forward_context(SimpleNamespace(attn_metadata=self.metadata(batch, padding))):
            ids = torch.tensor([*tokens, *([0] * padding)])
            hidden = self.model(ids, torch.zeros_like(ids))
        for request, part in batch:
            if request is not None:
                self.lengths[request] += len(part)
        logits = self.model.compute_logits(hidden[: len(tokens)])
        assert logits is not None
        return logits

    def attention(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The attention of one layer alone on a new request's hidden states [T, D]."""
        with override_forward_context(SimpleNamespace(attn_metadata=self.metadata([(0, range(len(hidden)))]))):
            return self.model.model.layers[layer].self_attn(hidden)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _vllm_config(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    cache = SimpleNamespace(
        block_size=BLOCK,
        cache_dtype="auto",
        mamba_block_size=4096,
        mamba_page_size_padded=None,
        mamba_cache_mode="none",
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
        use_replayssm=False,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_config=dict(config), model="no such folder"),
        cache_config=cache,
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(tensor_parallel_size=get_tensor_model_parallel_world_size()),
        speculative_config=None,
        num_speculative_tokens=0,
    )
