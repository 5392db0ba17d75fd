"""Kimi K3's text model as a vLLM model: embedding, decoder layers, final mixture, logits. Kimi-Linear differs in its fields."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from . import loader
from .attn_res import AttnResStream, Mixer
from .config import K3Config
from .kda import KimiDeltaAttention
from .layers import MLP, RMSNorm, Slot, Slots, slot
from .mla import KimiLatentAttention
from .moe import SparseMoE
from .platform import spare_generators


class DecoderLayer(nn.Module):
    """Attention of one kind and a dense or sparse MLP, each behind its own norm and, with AttnRes, its own mixer."""

    def __init__(self, config: K3Config, vllm_config: VllmConfig, index: int, prefix: str) -> None:
        super().__init__()
        self.index = index
        attention = KimiDeltaAttention if config.is_kda(index) else KimiLatentAttention
        self.self_attn: KimiDeltaAttention | KimiLatentAttention = attention(config, vllm_config, f"{prefix}.self_attn")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: SparseMoE | MLP
        if config.is_moe(index):
            self.mlp = SparseMoE(config, f"{prefix}.block_sparse_moe")
        else:
            self.mlp = MLP(config, config.intermediate_size, f"{prefix}.mlp")
        self.attention_mixer = self.mlp_mixer = None
        if config.attn_res_block is not None:
            self.attention_mixer, self.mlp_mixer = Mixer(config), Mixer(config)

    def mixed(self, stream: AttnResStream) -> None:
        """Advance an AttnRes stream by this layer."""
        assert self.attention_mixer is not None and self.mlp_mixer is not None
        output = self.self_attn(stream.before_attention(self.index, self.attention_mixer, self.input_layernorm))
        stream.after_mlp(self.mlp(stream.after_attention(self.index, output, self.mlp_mixer, self.post_attention_layernorm)))

    def residual(self, hidden: torch.Tensor) -> torch.Tensor:
        """The ordinary pre-norm layer: [T, D] -> [T, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def slots(self) -> Slots:
        yield "input_layernorm.weight", slot(self.input_layernorm.weight)
        yield "post_attention_layernorm.weight", slot(self.post_attention_layernorm.weight)
        if self.attention_mixer is not None and self.mlp_mixer is not None:
            yield from self.attention_mixer.slots("self_attention_res")
            yield from self.mlp_mixer.slots("mlp_res")
        for name, target in self.self_attn.slots():
            yield f"self_attn.{name}", target
        room = "block_sparse_moe" if isinstance(self.mlp, SparseMoE) else "mlp"
        for name, target in self.mlp.slots():
            yield f"{room}.{name}", target


class KimiK3Model(nn.Module):
    """Embedding and layers. The result is the hidden state before the final norm, which belongs to the logits."""

    def __init__(self, config: K3Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens")
        self.layers = nn.ModuleList(
            DecoderLayer(config, vllm_config, i, f"{prefix}.layers.{i}") for i in range(config.num_layers)
        )
        self.output_mixer = Mixer(config) if config.attn_res_block is not None else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, D] -> hidden states [T, D]."""
        if self.output_mixer is None:
            for layer in self.layers:
                hidden = layer.residual(hidden)
            return hidden
        stream = AttnResStream(hidden, self.config)
        for layer in self.layers:
            layer.mixed(stream)
        return stream.finish(self.output_mixer, hidden.dtype)

    def slots(self) -> Slots:
        yield "embed_tokens.weight", vocabulary_slot(self.embed_tokens)
        for i, layer in enumerate(self.layers):
            for name, target in layer.slots():
                yield f"layers.{i}.{name}", target
        if self.output_mixer is not None:
            yield from self.output_mixer.slots("output_attn_res")
        yield "norm.weight", slot(self.norm.weight)


def vocabulary_slot(table: VocabParallelEmbedding) -> Slot:
    """This rank's rows of a vocabulary table; vLLM pads the table, the checkpoint does not."""
    rows = table.shard_indices
    start, end = rows.org_vocab_start_index, rows.org_vocab_end_index
    return slot(table.weight[: end - start], dim=0, full=table.org_vocab_size, start=start)


class KimiK3ForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The standard path of Kimi K3 and Kimi-Linear for vLLM's V1 runner."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        spare_generators(vllm_config)
        self.vllm_config = vllm_config
        self.config = K3Config.from_hf(vllm_config.model_config.hf_config)
        self.config.check_tensor_parallel(vllm_config.parallel_config.tensor_parallel_size)
        root = f"{prefix}." if prefix else ""
        self.model = KimiK3Model(self.config, vllm_config, f"{root}model")
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size, prefix=f"{root}lm_head")
        for table in (self.model.embed_tokens, self.lm_head):
            table.weight.data.zero_()  # vLLM allocates the rows that pad the vocabulary and never writes them
        self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=self.config.logit_scale)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """Token ids [T] (or embeddings [T, D]) -> hidden states [T, D] before the final norm. The model uses no positions."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, self.model.norm(hidden_states))

    # -- recurrent state, as vLLM plans its memory -------------------------------------------------------------------------------
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        c = K3Config.from_hf(vllm_config.model_config.hf_config)
        tp_size = vllm_config.parallel_config.tensor_parallel_size
        return MambaStateShapeCalculator.kda_state_shape(tp_size, c.kda_heads, c.kda_head_dim, conv_kernel_size=c.conv_width)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.kda_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, MambaStateCopyFunc]:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()

    # -- checkpoint --------------------------------------------------------------------------------------------------------------
    def slots(self) -> Slots:
        """Every checkpoint tensor (without prefix) and where it goes."""
        for name, target in self.model.slots():
            yield f"model.{name}", target
        yield "lm_head.weight", vocabulary_slot(self.lm_head)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the released checkpoint. Raises CheckpointError listing everything wrong; returns the names of all parameters."""
        folder = Path(self.vllm_config.model_config.model)
        loader.load(
            dict(self.slots()), weights, folder if folder.is_dir() else None, self.config.num_layers, self.config.num_mtp_layers
        )
        return {name for name, _ in self.named_parameters()}
