"""Kimi Delta Attention: a linear attention whose state decays per key channel and is corrected by the delta rule.

The first half are pure functions of tensors, used by the layer below and by anything that wants a reference; the layer adds
vLLM's parallel projections and the two states that each request keeps in one cache slot: the last conv inputs and the recurrent
state S [head, V, K].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from .backend import NULL_BLOCK, KDABackend, KDAMetadata
from .config import KDA_OUTPUT_NORM_EPS, K3Config
from .layers import KEEP_WEIGHTS, Slot, Slots, packed_projection, parameter, rms_norm, sharded, slot

L2_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0
CHUNK = 32


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution, then SiLU: c_t = sum_j W[:, j] x_{t - w + 1 + j}, w taps from oldest to newest.

    x [..., T, C] raw inputs, state [..., w - 1, C] the inputs before them (zeros at a sequence's start), weight fp32 [C, w].
    Returns the activated [..., T, C] in x's dtype and the new state in `state`'s dtype. Computed in fp32 (float64 stays).
    """
    window = torch.cat((state.to(x.dtype), x), dim=-2)
    taps = _wide(window).unfold(-2, weight.shape[-1], 1)  # [..., T, C, w]
    y = (taps * weight.to(taps.dtype)).sum(dim=-1)
    return (y * torch.sigmoid(y)).to(x.dtype), window[..., x.shape[-2] :, :].to(state.dtype)


def log_decay(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """g [..., H, d], the log of the per-channel decay, from raw [..., H, d], a_log [H] and dt_bias [H, d]; fp32, never positive.

    Bounded (K3): lower_bound sigmoid(e^A z); unbounded (Kimi-Linear): -e^A softplus(z), with z = raw + dt_bias.
    """
    z = _wide(raw) + dt_bias.to(_wide(raw).dtype)
    rate = a_log.to(z.dtype).exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(z, threshold=SOFTPLUS_THRESHOLD)
    return lower_bound * torch.sigmoid(rate * z)


def normalise(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L2-normalised q and k per head in fp32, q scaled by d^-1/2 as well."""
    q, k = _wide(q), _wide(k)
    q = q / torch.sqrt(q.square().sum(dim=-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    return q, k / torch.sqrt(k.square().sum(dim=-1, keepdim=True) + L2_EPS)


def recurrent_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every row: q, k, g [..., H, K], v [..., H, V], beta [..., H], state [..., H, V, K]; normalised, all fp32.

    S <- S diag(e^g); u = beta (v - S k); S <- S + u k^T; o = S q. Returns o [..., H, V] and the new state.
    """
    state = state * g.exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
    state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), state


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence, one by one: q, k, v, g [T, H, d], beta [T, H], state [H, V, K]. Returns ([T, H, V], state)."""
    outputs = []
    for t in range(q.shape[0]):
        o, state = recurrent_step(q[t], k[t], v[t], g[t], beta[t], state)
        outputs.append(o)
    return torch.stack(outputs), state


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `recurrent`, a chunk of tokens at a time.

    Decay factors are built from pairwise differences e^(G_t - G_s) with s <= t, which never exceed one: a single factor e^(-G)
    would overflow fp32 after 18 tokens at the bound of -5.
    """
    outputs = []
    for start in range(0, q.shape[0], chunk):
        piece = slice(start, start + chunk)
        heads_first = [x[piece].transpose(0, 1) for x in (q, k, v, g, beta)]
        o, state = _one_chunk(heads_first, state)
        outputs.append(o.transpose(0, 1))
    return torch.cat(outputs), state


def _one_chunk(piece: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`piece`: q, k, v, g [H, C, d] and beta [H, C], heads first; state [H, V, K]."""
    q, k, v, g, beta = piece
    total = g.cumsum(dim=1)  # G_t, the log decay from before the chunk to after token t
    length = q.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    difference = total.unsqueeze(2) - total.unsqueeze(1)
    pairwise = difference.masked_fill(~causal.unsqueeze(-1), float("-inf")).exp()  # [H, t, s, d]

    # u_t depends on the earlier u_s through (I + A) U = diag(beta) (V - (K e^G) S0^T), A strictly lower triangular.
    coupling = torch.einsum("htd,hsd,htsd->hts", k, k, pairwise) * beta.unsqueeze(-1)
    coupling = coupling.tril(-1) + torch.eye(length, dtype=q.dtype, device=q.device)
    seen = (k * total.exp()) @ state.transpose(1, 2)
    u = torch.linalg.solve_triangular(coupling, beta.unsqueeze(-1) * (v - seen), upper=False, unitriangular=True)

    output = (q * total.exp()) @ state.transpose(1, 2) + torch.einsum("htd,hsd,htsd->hts", q, k, pairwise) @ u
    to_end = (total[:, -1:] - total).exp()
    state = state * total[:, -1].exp().unsqueeze(1) + u.transpose(1, 2) @ (k * to_end)
    return output, state


def gated_norm(core: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = KDA_OUTPUT_NORM_EPS) -> torch.Tensor:
    """RMSNorm over each head's d, times sigmoid(gate), in fp32: core, gate [..., H, d], weight [d]; returned in gate's dtype."""
    normed = rms_norm(core, weight, eps, dtype=_wide(core).dtype)
    return (normed * torch.sigmoid(gate.to(normed.dtype))).to(gate.dtype)


class KimiDeltaAttention(nn.Module, MambaBase):
    """One KDA layer on this rank's heads.

    `in_proj` packs its rows as [q | k | v | gate | f_a | beta | pad]: `gate` is the full-rank output gate (K3) or the replicated
    low-rank g_a (Kimi-Linear), f_a is replicated, and pad brings the row count to a multiple of 16.
    """

    def __init__(self, config: K3Config, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.config, self.prefix = config, prefix
        self.model_dtype = vllm_config.model_config.dtype
        self.cache_config = vllm_config.cache_config
        self.heads, self.head_dim = config.kda_heads // tp, config.kda_head_dim
        width, rank = config.kda_heads * self.head_dim, self.head_dim
        local = self.heads * self.head_dim
        self.local_width = local
        gate = local if config.full_rank_gate else rank
        sizes = (local, local, local, gate, rank, self.heads)
        self.in_proj, self.row_sizes = packed_projection(config, f"{prefix}.in_proj", *sizes)
        self.f_b_proj = ColumnParallelLinear(rank, width, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.f_b_proj")
        self.g_b_proj: ColumnParallelLinear | None = None
        if not config.full_rank_gate:
            self.g_b_proj = ColumnParallelLinear(rank, width, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.g_b_proj")
        self.conv_weight = parameter(3 * local, config.conv_width, dtype=torch.float32)
        self.A_log = parameter(self.heads, dtype=torch.float32)
        self.dt_bias = parameter(self.heads, self.head_dim, dtype=torch.float32)
        self.o_norm_weight = parameter(self.head_dim)
        self.o_proj = RowParallelLinear(
            width, config.hidden_size, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.o_proj"
        )
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self

    # -- what vLLM asks of a layer with recurrent state --------------------------------------------------------------------------
    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self) -> type[AttentionBackend]:
        return KDABackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        c = self.config
        tp = get_tensor_model_parallel_world_size()
        return MambaStateShapeCalculator.kda_state_shape(tp, c.kda_heads, c.kda_head_dim, conv_kernel_size=c.conv_width)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        cache = self.cache_config
        return MambaStateDtypeCalculator.kda_state_dtype(self.model_dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype)

    @property
    def conv_state(self) -> torch.Tensor:
        """[slots, width - 1, 3 h d] view of the bound conv states, oldest input first, whatever layout vLLM stores."""
        state = self.kv_cache[0]
        return state.transpose(1, 2) if is_conv_state_dim_first() else state

    @property
    def recurrent_state(self) -> torch.Tensor:
        """[slots, h, V, K] view of the bound recurrent states."""
        return self.kv_cache[1]

    # -- forward -----------------------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [T, D]. Padded tokens give zero before the output projection."""
        projected, _ = self.in_proj(x)
        *_, gate, f_a, beta, _ = projected.split(self.row_sizes, dim=-1)
        qkv = projected[:, : 3 * self.local_width]
        raw_g, _ = self.f_b_proj(f_a)
        if self.g_b_proj is not None:
            gate, _ = self.g_b_proj(gate)
        core = self._attend(qkv, self._heads(raw_g), torch.sigmoid(_wide(beta)))
        y = gated_norm(core, self._heads(gate), self.o_norm_weight)
        return self.o_proj(y.flatten(1))[0]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))

    def _attend(self, qkv: torch.Tensor, raw_g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """qkv [T, 3 h d], raw_g [T, h, d], beta [T, h] -> [T, h, d]; reads and writes the states of the step's requests."""
        out = torch.zeros_like(raw_g)
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profiling run has no caches
            return out
        step: KDAMetadata = metadata[self.prefix]
        g = log_decay(raw_g, self.A_log, self.dt_bias, self.config.gate_lower_bound)
        if step.decode_slots.numel():
            self._decode(step, qkv, g, beta, out)
        slots = step.slots.tolist() if step.rows.prefills else []
        for request in step.rows.prefills:
            if slots[request] > NULL_BLOCK:
                self._prefill(slots[request], step.rows.tokens(request), step.rows.context(request) > 0, qkv, g, beta, out)
        return out

    def _decode(self, step: KDAMetadata, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor) -> None:
        tokens, slots = step.decode_tokens, step.decode_slots
        conv_state = self.conv_state[slots].masked_fill(step.decode_fresh[:, None, None], 0)
        state = _wide(self.recurrent_state[slots]).masked_fill(step.decode_fresh[:, None, None, None], 0)
        mixed, conv_state = short_conv(qkv[tokens].unsqueeze(1), conv_state, self.conv_weight)
        q, k, v = (self._heads(x) for x in mixed.squeeze(1).chunk(3, dim=-1))
        q, k = normalise(q, k)
        o, state = recurrent_step(q, k, _wide(v), g[tokens], beta[tokens], state)
        out[tokens] = o.to(out.dtype)
        self.conv_state[slots] = conv_state
        self.recurrent_state[slots] = state.to(self.recurrent_state.dtype)

    def _prefill(
        self,
        state_slot: int,
        tokens: slice,
        resume: bool,
        qkv: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        conv_state, state = self.conv_state[state_slot], _wide(self.recurrent_state[state_slot])
        if not resume:
            conv_state, state = torch.zeros_like(conv_state), torch.zeros_like(state)
        mixed, conv_state = short_conv(qkv[tokens], conv_state, self.conv_weight)
        q, k, v = (self._heads(x) for x in mixed.chunk(3, dim=-1))
        q, k = normalise(q, k)
        o, state = chunked(q, k, _wide(v), g[tokens], beta[tokens], state)
        out[tokens] = o.to(out.dtype)
        self.conv_state[state_slot] = conv_state
        self.recurrent_state[state_slot] = state.to(self.recurrent_state.dtype)

    # -- checkpoint --------------------------------------------------------------------------------------------------------------
    def slots(self) -> Slots:
        q, k, v, gate, f_a, beta, _ = self.in_proj.weight.split(self.row_sizes)
        for name, rows in (("q", q), ("k", k), ("v", v), ("b", beta)):
            yield f"{name}_proj.weight", sharded(rows)
        yield "f_a_proj.weight", slot(f_a)
        yield "f_b_proj.weight", sharded(self.f_b_proj.weight)
        if self.g_b_proj is None:
            yield "g_proj.weight", sharded(gate)
        else:
            yield "g_a_proj.weight", slot(gate)
            yield "g_b_proj.weight", sharded(self.g_b_proj.weight)
        for name, taps in zip("qkv", self.conv_weight.chunk(3), strict=True):
            yield f"{name}_conv1d.weight", sharded(taps.unsqueeze(1))
        yield "A_log", self._a_log_slot()
        yield "dt_bias", sharded(self.dt_bias.view(-1))
        yield "o_norm.weight", slot(self.o_norm_weight)
        yield "o_proj.weight", sharded(self.o_proj.weight, dim=1)

    def _a_log_slot(self) -> Slot:
        """Stored as [H], as (1, 1, H, 1), or zero-padded to the head width (K3: 96 heads in 128)."""
        base = sharded(self.A_log)
        heads = self.config.kda_heads
        padded = max(128, heads)
        return Slot(((heads,), (1, 1, heads, 1), (padded,)), base.dest, base.start)
