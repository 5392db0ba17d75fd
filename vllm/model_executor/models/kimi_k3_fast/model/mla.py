"""Multi-head latent attention without positions: queries and keys meet in a shared latent, which is all that is cached.

A cache row is [c | k_pe]: the normalised latent of a token and one key part shared by all heads. `expanded` rebuilds keys and
values from the latents (prefill); `absorbed` moves the key matrix to the query side and works on the rows as they lie (decode).
Both compute the same attention.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from .backend import NULL_BLOCK, MLABackend, MLAMetadata
from .config import K3Config
from .layers import KEEP_WEIGHTS, Slots, packed_projection, parameter, rms_norm, sharded, slot

QUERY_TILE = 256
CACHE_DTYPES = ("auto", "bfloat16")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def expanded(q: torch.Tensor, rows: torch.Tensor, w_kvb: torch.Tensor, rank: int, nope: int, scale: float) -> torch.Tensor:
    """Causal attention of the last T of S tokens: q [T, h, nope + rope], rows [S, rank + rope] -> [T, h, v].

    w_kvb [h, nope + v, rank] rebuilds each head's k_nope and value; a key is [k_nope | k_pe]. Scores and softmax: fp32. Queries
    go in tiles, so that scores stay [h, 256, S].
    """
    latent, shared_key = rows[:, :rank], rows[:, rank:]
    per_head = torch.einsum("sl,hdl->hsd", latent, w_kvb)
    key = torch.cat((per_head[..., :nope], shared_key.expand(per_head.shape[0], -1, -1)), dim=-1)
    value = _wide(per_head[..., nope:])
    first = rows.shape[0] - q.shape[0]
    positions = torch.arange(rows.shape[0], device=q.device)
    outputs = []
    for start in range(0, q.shape[0], QUERY_TILE):
        tile = q[start : start + QUERY_TILE].transpose(0, 1)
        score = _wide(tile) @ _wide(key).transpose(1, 2) * scale
        own = positions[first + start : first + start + tile.shape[1]]
        score = score.masked_fill(positions[None, :] > own[:, None], float("-inf"))
        outputs.append((torch.softmax(score, dim=-1) @ value).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)


def absorbed(
    q: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, w_kvb: torch.Tensor, rank: int, nope: int, scale: float
) -> torch.Tensor:
    """One query of each of R requests: q [R, h, nope + rope], rows [R, S, rank + rope], lengths [R] valid rows each -> [R, h, v].

    ql = q_nope W_UK; score = (ql . c + q_pe . k_pe) scale; latent = sum p c; v = latent W_UV^T. Rows beyond a length are ignored,
    whatever they hold.
    """
    w_uk, w_uv = w_kvb[:, :nope], w_kvb[:, nope:]
    query = torch.cat((torch.einsum("rhn,hnl->rhl", q[..., :nope], w_uk), q[..., nope:]), dim=-1)
    unused = torch.arange(rows.shape[1], device=q.device)[None, :] >= lengths[:, None]
    rows = _wide(rows.masked_fill(unused.unsqueeze(-1), 0))
    score = _wide(query) @ rows.transpose(1, 2) * scale
    p = torch.softmax(score.masked_fill(unused.unsqueeze(1), float("-inf")), dim=-1)
    latent = (p @ rows[..., :rank]).to(q.dtype)
    return torch.einsum("rhl,hvl->rhv", latent, w_uv)


class KimiLatentAttention(nn.Module, AttentionLayerBase):
    """One MLA layer on this rank's heads. The latent cache is the same on every rank.

    `in_proj` packs its rows as [query | kv_a | k_pe | gate | pad]: `query` is the replicated q_a (K3) or the full-rank q
    (Kimi-Linear), kv_a and k_pe are replicated, and gate is absent without an output gate.
    """

    supports_dcp = False

    def __init__(self, config: K3Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.config, self.prefix = config, prefix
        self.cache_config, self.model_dtype = vllm_config.cache_config, vllm_config.model_config.dtype
        self.heads = config.num_heads // tp
        self.query_dim = config.nope_dim + config.rope_dim
        self.scale = self.query_dim**-0.5
        query = self.heads * self.query_dim if config.q_lora_rank is None else config.q_lora_rank
        gate = self.heads * config.v_head_dim if config.mla_output_gate else 0
        sizes = (query, config.kv_lora_rank, config.rope_dim, gate)
        self.in_proj, self.row_sizes = packed_projection(config, f"{prefix}.in_proj", *sizes)
        self.q_a_norm_weight: nn.Parameter | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if config.q_lora_rank is not None:
            self.q_a_norm_weight = parameter(config.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(
                config.q_lora_rank,
                config.num_heads * self.query_dim,
                bias=False,
                quant_config=KEEP_WEIGHTS,
                prefix=f"{prefix}.q_b_proj",
            )
        self.kv_a_norm_weight = parameter(config.kv_lora_rank)
        self.kv_b_proj = ColumnParallelLinear(
            config.kv_lora_rank,
            config.num_heads * (config.nope_dim + config.v_head_dim),
            bias=False,
            quant_config=KEEP_WEIGHTS,
            prefix=f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.v_head_dim,
            config.hidden_size,
            bias=False,
            quant_config=KEEP_WEIGHTS,
            prefix=f"{prefix}.o_proj",
        )
        self.kv_cache = torch.empty(0)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    # -- what vLLM asks of an attention layer ------------------------------------------------------------------------------------
    def get_attn_backend(self) -> type[AttentionBackend]:
        return MLABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        if vllm_config.cache_config.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype: expected one of {', '.join(CACHE_DTYPES)} on the standard path, found "
                f"{vllm_config.cache_config.cache_dtype!r}. Leave --kv-cache-dtype at auto."
            )
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.config.mla_row_size,
            dtype=kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config),
            cache_dtype_str=vllm_config.cache_config.cache_dtype,
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """[blocks, 1, block, row] from vLLM; kept as [blocks, block, row]."""
        self.kv_cache = kv_cache.squeeze(1)

    # -- forward -----------------------------------------------------------------------------------------------------------------
    @property
    def w_kvb(self) -> torch.Tensor:
        """[h, nope + v, rank] view of kv_b: W_UK above, W_UV below."""
        return self.kv_b_proj.weight.unflatten(0, (self.heads, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]. Padded tokens give zero before the output projection."""
        c = self.config
        projected, _ = self.in_proj(x)
        query, latent, shared_key, gate, _ = projected.split(self.row_sizes, dim=-1)
        if self.q_b_proj is not None:
            query, _ = self.q_b_proj(rms_norm(query, self.q_a_norm_weight, c.latent_norm_eps))
        rows = torch.cat((rms_norm(latent, self.kv_a_norm_weight, c.latent_norm_eps), shared_key), dim=-1)
        y = self._attend(query.unflatten(-1, (self.heads, self.query_dim)), rows).flatten(1)
        if c.mla_output_gate:
            y = (_wide(y) * torch.sigmoid(_wide(gate))).to(x.dtype)
        return self.o_proj(y)[0]

    def _attend(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """q [T, h, nope + rope], rows [T, rank + rope] -> [T, h, v]; writes the rows to the cache first."""
        c = self.config
        out = q.new_zeros(q.shape[0], self.heads, c.v_head_dim)
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run has no caches
            return out
        step: MLAMetadata = metadata[self.prefix]
        self._write(rows, step.slot_mapping)
        lengths = step.rows.lengths
        if step.rows.decodes:
            tokens = torch.tensor([step.rows.starts[i] for i in step.rows.decodes], device=q.device)
            valid = torch.tensor([lengths[i] for i in step.rows.decodes], device=q.device)
            context = self._read(step.block_table[step.rows.decodes], int(valid.max()))
            out[tokens] = absorbed(q[tokens], context.to(q.dtype), valid, self.w_kvb, c.kv_lora_rank, c.nope_dim, self.scale)
        for request in step.rows.prefills:
            tokens = step.rows.tokens(request)
            context = self._read(step.block_table[request : request + 1], lengths[request])[0]
            out[tokens] = expanded(q[tokens], context.to(q.dtype), self.w_kvb, c.kv_lora_rank, c.nope_dim, self.scale)
        return out

    def _write(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store each token's row at its slot. Padding (negative slots) and the null block are left alone."""
        block_size = self.kv_cache.shape[1]
        slot_mapping = slot_mapping[: rows.shape[0]]
        real = slot_mapping >= (NULL_BLOCK + 1) * block_size
        slots, rows = slot_mapping[real], rows[: slot_mapping.shape[0]][real]
        self.kv_cache[slots // block_size, slots % block_size] = rows.to(self.kv_cache.dtype)

    def _read(self, block_table: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` cache rows of each request in `block_table` [R, blocks]: [R, length, row]."""
        blocks = -(-length // self.kv_cache.shape[1])
        return self.kv_cache[block_table[:, :blocks]].flatten(1, 2)[:, :length]

    # -- checkpoint --------------------------------------------------------------------------------------------------------------
    def slots(self) -> Slots:
        c = self.config
        query, _, _, gate, _ = self.in_proj.weight.split(self.row_sizes)
        if self.q_b_proj is None:
            yield "q_proj.weight", sharded(query)
        else:
            assert self.q_a_norm_weight is not None
            yield "q_a_proj.weight", slot(query)
            yield "q_a_layernorm.weight", slot(self.q_a_norm_weight)
            yield "q_b_proj.weight", sharded(self.q_b_proj.weight)
        first = self.row_sizes[0]
        yield "kv_a_proj_with_mqa.weight", slot(self.in_proj.weight[first : first + c.mla_row_size])
        yield "kv_a_layernorm.weight", slot(self.kv_a_norm_weight)
        yield "kv_b_proj.weight", sharded(self.kv_b_proj.weight)
        if c.mla_output_gate:
            yield "g_proj.weight", sharded(gate)
        yield "o_proj.weight", sharded(self.o_proj.weight, dim=1)
