"""What the two cache kinds need to know of a step: attention backends and metadata builders for vLLM's V1 runner.

The builders turn the runner's common metadata into plain host lists and index tensors. Requests keep the runner's order. A
request with one new token is a decode row whatever its age: a fresh one merely starts from a zero state. Rows without tokens and
tokens beyond the last request are padding and appear in no list.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

NULL_BLOCK = 0
"""Block 0 is vLLM's placeholder for rows without a cache. It is never written, and reads as zero."""


@dataclass(frozen=True)
class StepRows:
    """How a step's tokens belong to its requests (host data; R requests).

    `starts` [R + 1]: first token of each request; `lengths` [R]: tokens after the step, context included; `decodes`: requests
    with one new token; `prefills`: those with more.
    """

    starts: list[int]
    lengths: list[int]
    decodes: list[int]
    prefills: list[int]

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> StepRows:
        starts = common.query_start_loc_cpu.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        return cls(
            starts=starts,
            lengths=common.seq_lens.tolist(),
            decodes=[i for i, n in enumerate(counts) if n == 1],
            prefills=[i for i, n in enumerate(counts) if n > 1],
        )

    def tokens(self, request: int) -> slice:
        return slice(self.starts[request], self.starts[request + 1])

    def context(self, request: int) -> int:
        """Tokens of the request computed before this step."""
        return self.lengths[request] - (self.starts[request + 1] - self.starts[request])


@dataclass(frozen=True)
class KDAMetadata:
    """`slots` int64 [R]: each request's state slot, <= 0 for none; `decode_*`: indices of the decode rows that own a slot."""

    rows: StepRows
    slots: torch.Tensor
    decode_tokens: torch.Tensor
    decode_slots: torch.Tensor
    decode_fresh: torch.Tensor  # bool: the row has no context, so its slot holds another request's leavings


@dataclass(frozen=True)
class MLAMetadata:
    """`block_table` int64 [R, blocks]; `slot_mapping` int64 [T]: cache row of each token, negative for padding."""

    rows: StepRows
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class _Builder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "the standard path expects no speculative_config, and found one. Serve without speculative decoding."
            )


class KDAMetadataBuilder(_Builder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KDAMetadata:
        assert isinstance(self.kv_cache_spec, MambaSpec)
        rows = StepRows.of(common_attn_metadata)
        table = mamba_get_block_table_tensor(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        slots = table[:, 0].long()
        owners = slots.tolist()
        decodes = [i for i in rows.decodes if owners[i] > NULL_BLOCK]
        device = slots.device
        return KDAMetadata(
            rows=rows,
            slots=slots,
            decode_tokens=torch.tensor([rows.starts[i] for i in decodes], dtype=torch.long, device=device),
            decode_slots=torch.tensor([owners[i] for i in decodes], dtype=torch.long, device=device),
            decode_fresh=torch.tensor([rows.context(i) == 0 for i in decodes], dtype=torch.bool, device=device),
        )


class MLAMetadataBuilder(_Builder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        return MLAMetadata(
            rows=StepRows.of(common_attn_metadata),
            block_table=common_attn_metadata.block_table_tensor.long(),
            slot_mapping=common_attn_metadata.slot_mapping.long(),
        )


class _Backend(AttentionBackend):
    """The layers compute attention themselves; vLLM needs the backend for its builder and the cache geometry."""

    accept_output_buffer = True

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError(
            "Kimi K3's layers compute their attention themselves; there is no separate implementation class."
        )


class KDABackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return "KIMI_K3_KDA"

    @staticmethod
    def get_builder_cls() -> type[KDAMetadataBuilder]:
        return KDAMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class MLABackend(_Backend):
    """Any block size serves: the standard path gathers cache rows by index."""

    @staticmethod
    def get_name() -> str:
        return "KIMI_K3_MLA"

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        return MLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True
