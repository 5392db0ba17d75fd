"""A small Kimi K3 for training, in plain PyTorch, with every feature of the architecture.

Parameters carry the names of the released checkpoint, except that a layer's routed experts are stacked (`experts.w1` [E, I, L]).
Tokens are flat, [N, D]; a batch is several stretches of equal-length sequences laid end to end, so everything that acts per
token sees one static shape; only the convolution's shifts, KDA and attention know where sequences begin. Weights are float32
masters; `dtype` is what activations and matrix products run in. What lies between matrix products is a handful of pure
functions of tensors, shared by all layers: `compile_parts` compiles each once, not once a layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from kda import Kda, kda_chunk
from mxfp4 import fake_quantize
from torch import Tensor, nn

GATE_NORM_EPS = 1e-5


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; per-head sizes are Kimi K3's own, so that kernels built for it apply. Layer numbers are 1-based, as
    released."""

    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 7
    full_attn_layers: tuple[int, ...] = (3, 6, 7)
    kda_heads: int = 2
    kda_head_dim: int = 128
    conv_width: int = 4
    gate_lower_bound: float = -5.0
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 384
    num_experts: int = 16
    num_experts_per_token: int = 4
    moe_intermediate_size: int = 64
    num_shared_experts: int = 2
    routed_expert_hidden_size: int = 128
    attn_res_block_size: int = 3
    rms_norm_eps: float = 1e-5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    max_position_embeddings: int = 16384

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(1, self.num_hidden_layers + 1) if i not in self.full_attn_layers)


Shapes = Sequence[tuple[int, int]]


def _rms(x32: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight


def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x.float(), weight, eps).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return _situ(gate.float(), up.float(), beta, linear_beta).to(gate.dtype)


def mixed_norm(
    prefix: Tensor, delta: Tensor | None, blocks: list[Tensor], mix: tuple[Tensor, Tensor], norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """prefix + delta; and the norm of the softmax-weighted sum, in float32, of the closed blocks and that prefix. One source
    comes back unchanged. mix: the mixture's norm weight [D] and projection [1, D]."""
    if delta is not None:
        prefix = prefix + delta
    mixed = prefix.float()
    if blocks:
        stack = torch.stack([s.float() for s in (*blocks, prefix)])
        logit = torch.rsqrt(stack.square().mean(-1) + eps) * (stack * (mix[0] * mix[1][0])).sum(-1)
        mixed = (torch.softmax(logit, 0)[..., None] * stack).sum(0)
    return _rms(mixed, norm, eps).to(prefix.dtype), prefix


def final_norm(
    prefix: Tensor, delta: Tensor, blocks: list[Tensor], mix: tuple[Tensor, Tensor], norm: Tensor, eps: float
) -> Tensor:
    """As `mixed_norm`, the mixture rounded before the norm, since serving hands it over."""
    stack = torch.stack([s.float() for s in (*blocks, prefix + delta)])
    logit = torch.rsqrt(stack.square().mean(-1) + eps) * (stack * (mix[0] * mix[1][0])).sum(-1)
    mixed = (torch.softmax(logit, 0)[..., None] * stack).sum(0).to(prefix.dtype)
    return _rms(mixed.float(), norm, eps).to(prefix.dtype)


def kda_inputs(
    qkv: Tensor, raw: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, position: Tensor, lower_bound: float
) -> tuple[Tensor, ...]:
    """qkv [N, 3 H d] -> causal depthwise convolution (conv [3 H d, width], taps oldest to newest, zero before position 0 of each
    sequence), SiLU, unit q (times d^-1/2) and k; raw [N, H d] -> log decay, float32; b [N, H] -> beta."""
    x32, width, heads = qkv.float(), conv.shape[1], a_log.shape[0]
    out = x32 * conv[:, -1]
    for back in range(1, width):
        shifted = F.pad(x32, (0, 0, back, 0))[: x32.shape[0]]
        out = out + torch.where((position >= back)[:, None], shifted, 0.0) * conv[:, width - 1 - back]
    q, k, v = F.silu(out).to(qkv.dtype).unflatten(-1, (3, heads, -1)).unbind(1)
    q, k = (t.float() * torch.rsqrt(t.float().square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    z = (raw.float() + dt_bias).unflatten(-1, (heads, -1))
    decay = lower_bound * torch.sigmoid(a_log.exp()[:, None] * z)
    beta = torch.sigmoid(b.float())
    return (
        (q * q.shape[-1] ** -0.5).to(qkv.dtype), k.to(qkv.dtype), v.contiguous(), decay, beta.to(qkv.dtype),
    )  # fmt: skip


def gated_norm(out: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """out [N, H, d] -> norm of each head, times the gate's sigmoid, [N, H d]."""
    return (_rms(out.float(), weight, GATE_NORM_EPS).flatten(-2) * torch.sigmoid(gate.float())).to(gate.dtype)


def mla_keys_values(kv: Tensor, k_pe: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """kv [N, H, nope + v] and the shared k_pe [N, rope] -> k [N, H, nope + rope] and v as wide, zero beyond its own width,
    because the flash kernel wants one width."""
    k = torch.cat((kv[..., :nope], k_pe[:, None].expand(-1, kv.shape[1], -1)), -1)
    return k, F.pad(kv[..., nope:], (0, k.shape[-1] - (kv.shape[-1] - nope)))


def gated(out: Tensor, gate: Tensor) -> Tensor:
    """out [N, H, padded] -> its first columns times the gate's sigmoid, [N, H v]."""
    out = out[..., : gate.shape[-1] // out.shape[1]].flatten(-2)
    return (out.float() * torch.sigmoid(gate.float())).to(gate.dtype)


def route(logit: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Weights [N, E], zero off the chosen experts, and the number of tokens of each expert [E]."""
    score = torch.sigmoid(logit)
    chosen = torch.topk(score.detach() + bias, k, dim=-1).indices
    mask = torch.zeros_like(score).scatter(1, chosen, 1.0)
    weight = score * mask
    return weight / (weight.sum(-1, keepdim=True) + 1e-20), mask.sum(0)


def expert_weights(w1: Tensor, w3: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All experts' quantised matrices, stacked: gate and up [2 E I, L], down [L, E I]."""
    w13 = torch.cat((fake_quantize(w1).flatten(0, 1), fake_quantize(w3).flatten(0, 1))).to(dtype)
    return w13, fake_quantize(w2).to(dtype).transpose(0, 1).flatten(1)


def expert_hidden(gate_up: Tensor, weight: Tensor, beta: float, linear_beta: float) -> Tensor:
    """gate_up [N, 2 E I], weight [N, E] -> every expert's activation times its weight, [N, E I]."""
    gate, up = gate_up.chunk(2, -1)
    hidden = _situ(gate.float(), up.float(), beta, linear_beta).to(gate.dtype).unflatten(-1, (weight.shape[-1], -1))
    return (hidden * weight.to(gate.dtype)[..., None]).flatten(1)


_PARTS = (
    rms_norm, situ, mixed_norm, final_norm, kda_inputs, gated_norm, mla_keys_values, gated, route, expert_weights, expert_hidden,
)  # fmt: skip


def compile_parts(on: bool) -> None:
    """Put compiled forms of the functions above in their places, or the plain ones back. Shapes are static: one graph per
    distinct signature."""
    torch._dynamo.config.recompile_limit = 64
    for part in _PARTS:
        globals()[part.__name__] = torch.compile(part, dynamic=False) if on else part


class Linear(nn.Module):
    """y = x W^T in x's dtype; no bias anywhere in the model."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def together(x: Tensor, linears: Iterable[Linear]) -> tuple[Tensor, ...]:
    """Several linear maps of one input as one matrix product."""
    weights = [linear.weight for linear in linears]
    return F.linear(x, torch.cat(weights).to(x.dtype)).split([w.shape[0] for w in weights], -1)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Mlp(nn.Module):
    def __init__(self, cfg: TinyConfig, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate_proj = Linear(cfg.hidden_size, width)
        self.up_proj = Linear(cfg.hidden_size, width)
        self.down_proj = Linear(width, cfg.hidden_size, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = together(x, (self.gate_proj, self.up_proj))
        return self.down_proj(situ(gate, up, self.cfg.situ_beta, self.cfg.situ_linear_beta))


class Gate(Linear):
    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__(cfg.hidden_size, cfg.num_experts)
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts))


class Experts(nn.Module):
    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        latent, width = cfg.routed_expert_hidden_size, cfg.moe_intermediate_size
        self.w1 = nn.Parameter(torch.randn(cfg.num_experts, width, latent) * latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(cfg.num_experts, width, latent) * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(cfg.num_experts, latent, width) * width**-0.5)


class LatentMoe(nn.Module):
    """Routed experts in a latent space, beside shared experts. All experts are evaluated on all tokens and weighted, most with
    zero: at this size one wide product is cheaper than dispatch."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = Gate(cfg)
        self.experts = Experts(cfg)
        self.routed_expert_down_proj = Linear(cfg.hidden_size, cfg.routed_expert_hidden_size)
        self.routed_expert_norm = Norm(cfg.routed_expert_hidden_size)
        self.routed_expert_up_proj = Linear(cfg.routed_expert_hidden_size, cfg.hidden_size, 0.3)
        self.shared_experts = Mlp(cfg, cfg.num_shared_experts * cfg.moe_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cfg, ex = self.cfg, self.experts
        logit = F.linear(x.float(), self.gate.weight.to(x.dtype).float())  # a BF16 weight, a float32 score
        weight, load = route(logit, self.gate.e_score_correction_bias, cfg.num_experts_per_token)
        w13, w2 = expert_weights(ex.w1, ex.w3, ex.w2, x.dtype)
        shared = self.shared_experts
        z, gate, up = together(x, (self.routed_expert_down_proj, shared.gate_proj, shared.up_proj))
        routed = F.linear(expert_hidden(F.linear(z, w13), weight, cfg.situ_beta, cfg.situ_linear_beta), w2)
        routed = rms_norm(routed, self.routed_expert_norm.weight, cfg.rms_norm_eps)
        return self.routed_expert_up_proj(routed) + shared.down_proj(situ(gate, up, cfg.situ_beta, cfg.situ_linear_beta)), load


class Conv(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        weight = torch.randn(channels, 1, width) * 0.2
        weight[..., -1] += 1
        self.weight = nn.Parameter(weight)


class KdaAttention(nn.Module):
    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        inner = cfg.kda_heads * cfg.kda_head_dim
        for name in ("q", "k", "v", "g"):
            setattr(self, f"{name}_proj", Linear(cfg.hidden_size, inner))
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_conv1d", Conv(inner, cfg.conv_width))
        self.f_a_proj = Linear(cfg.hidden_size, cfg.kda_head_dim)
        self.f_b_proj = Linear(cfg.kda_head_dim, inner, 0.5)
        self.b_proj = Linear(cfg.hidden_size, cfg.kda_heads)
        self.A_log = nn.Parameter(torch.zeros(cfg.kda_heads))
        # Decay rates start spread over 1e-4 .. 1 a token: some channels remember 10 000 tokens, some only the last.
        share = 10 ** (torch.rand(inner) * 4 - 4) / -cfg.gate_lower_bound
        self.dt_bias = nn.Parameter(torch.log(share / (1 - share)))
        self.o_norm = Norm(cfg.kda_head_dim)
        self.o_proj = Linear(inner, cfg.hidden_size, 0.3)

    def forward(self, x: Tensor, position: Tensor, shapes: Shapes, kda: Kda) -> Tensor:
        q, k, v, gate, fa, b = together(x, (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj))
        conv = torch.cat([c.weight.squeeze(1) for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        streams = kda_inputs(
            torch.cat((q, k, v), -1), self.f_b_proj(fa), b, conv, self.A_log, self.dt_bias, position, self.cfg.gate_lower_bound
        )
        out, at = [], 0
        for rows, length in shapes:
            part = (s[at : at + rows * length].unflatten(0, (rows, length)) for s in streams)
            out.append(kda(*part).flatten(0, 1))
            at += rows * length
        return self.o_proj(gated_norm(torch.cat(out), self.o_norm.weight, gate))


class MlaAttention(nn.Module):
    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, qk = cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
        self.q_a_proj = Linear(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = Norm(cfg.q_lora_rank)
        self.q_b_proj = Linear(cfg.q_lora_rank, heads * qk)
        self.kv_a_proj_with_mqa = Linear(cfg.hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(cfg.kv_lora_rank)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, heads * (cfg.qk_nope_head_dim + cfg.v_head_dim))
        self.g_proj = Linear(cfg.hidden_size, heads * cfg.v_head_dim)
        self.o_proj = Linear(heads * cfg.v_head_dim, cfg.hidden_size, 0.3)

    def forward(self, x: Tensor, position: Tensor, shapes: Shapes, kda: Kda) -> Tensor:
        cfg = self.cfg
        qa, kva, gate = together(x, (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj))
        heads = (cfg.num_attention_heads, -1)
        q = self.q_b_proj(rms_norm(qa, self.q_a_layernorm.weight, cfg.rms_norm_eps)).unflatten(-1, heads)
        latent, k_pe = kva.split((cfg.kv_lora_rank, cfg.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(rms_norm(latent, self.kv_a_layernorm.weight, cfg.rms_norm_eps)).unflatten(-1, heads)
        streams = (q, *mla_keys_values(kv, k_pe, cfg.qk_nope_head_dim))
        out, at = [], 0
        for rows, length in shapes:
            q, k, v = (s[at : at + rows * length].unflatten(0, (rows, length)).transpose(1, 2) for s in streams)
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1))
            at += rows * length
        return self.o_proj(gated(torch.cat(out), gate))


class Layer(nn.Module):
    def __init__(self, cfg: TinyConfig, index: int) -> None:
        super().__init__()
        self.is_kda = index + 1 in cfg.kda_layers
        self.self_attn = KdaAttention(cfg) if self.is_kda else MlaAttention(cfg)
        if index:
            self.block_sparse_moe = LatentMoe(cfg)
        else:
            self.mlp = Mlp(cfg, cfg.intermediate_size)
        self.input_layernorm = Norm(cfg.hidden_size)
        self.post_attention_layernorm = Norm(cfg.hidden_size)
        for name in ("self_attention", "mlp"):
            setattr(self, f"{name}_res_norm", Norm(cfg.hidden_size))
            setattr(self, f"{name}_res_proj", Linear(cfg.hidden_size, 1, 0.0))


class Body(nn.Module):
    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.output_attn_res_norm = Norm(cfg.hidden_size)
        self.output_attn_res_proj = Linear(cfg.hidden_size, 1, 0.0)
        self.norm = Norm(cfg.hidden_size)


class TinyK3(nn.Module):
    def __init__(self, cfg: TinyConfig, kda: Kda = kda_chunk, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg, self.kda, self.dtype = cfg, kda, dtype
        self.model = Body(cfg)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)

    def forward(self, tokens: Tensor, position: Tensor, shapes: Shapes, tap: int = -1) -> tuple[Tensor, Tensor, Tensor | None]:
        """tokens, position int64 [N] -> normalised final hidden [N, D] (times lm_head = logits), expert loads [layers - 1, E],
        and the attention input of layer `tap` (what the auxiliary head reads)."""
        cfg, body, eps = self.cfg, self.model, self.cfg.rms_norm_eps
        shapes = merged(shapes)
        # The embedding as a product with one-hot rows: exact, and its gradient a product too (a scatter would need a sort).
        vocabulary = torch.arange(cfg.vocab_size, device=tokens.device)
        prefix = (tokens[:, None] == vocabulary).to(self.dtype) @ body.embed_tokens.weight.to(self.dtype)
        blocks: list[Tensor] = []
        loads, tapped, delta = [], None, None
        for index, layer in enumerate(body.layers):
            mix = (layer.self_attention_res_norm.weight, layer.self_attention_res_proj.weight)
            x, prefix = mixed_norm(prefix, delta, blocks, mix, layer.input_layernorm.weight, eps)
            if index == tap:
                tapped = x
            y = layer.self_attn(x, position, shapes, self.kda)
            if index % cfg.attn_res_block_size == 0:
                blocks = [*blocks, prefix]
                prefix, y = y, None
            mix = (layer.mlp_res_norm.weight, layer.mlp_res_proj.weight)
            x, prefix = mixed_norm(prefix, y, blocks, mix, layer.post_attention_layernorm.weight, eps)
            if index:
                delta, load = layer.block_sparse_moe(x)
                loads.append(load)
            else:
                delta = layer.mlp(x)
        mix = (body.output_attn_res_norm.weight, body.output_attn_res_proj.weight)
        return final_norm(prefix, delta, blocks, mix, body.norm.weight, eps), torch.stack(loads), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()


def merged(shapes: Shapes) -> list[tuple[int, int]]:
    """Neighbouring stretches of one length as one."""
    out: list[tuple[int, int]] = []
    for rows, length in shapes:
        if out and out[-1][1] == length:
            rows += out.pop()[0]
        out.append((rows, length))
    return out


def positions(shapes: Shapes, device: str | torch.device) -> Tensor:
    return torch.cat([torch.arange(length, device=device).repeat(rows) for rows, length in shapes])


def hf_config(cfg: TinyConfig, specials: dict[str, int]) -> dict:
    """The released configuration's fields for these sizes (`model_type` kimi_linear)."""
    sizes = asdict(cfg)
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "num_experts_per_token",
        "moe_intermediate_size", "num_shared_experts", "routed_expert_hidden_size", "attn_res_block_size",
        "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **{name: sizes[name] for name in same},
        "num_key_value_heads": cfg.num_attention_heads,
        "hidden_act": "situ",
        "activation_situ_beta": cfg.situ_beta,
        "activation_situ_linear_beta": cfg.situ_linear_beta,
        "tie_word_embeddings": False,
        **specials,
        "linear_attn_config": {
            "kda_layers": list(cfg.kda_layers),
            "full_attn_layers": list(cfg.full_attn_layers),
            "num_heads": cfg.kda_heads,
            "head_dim": cfg.kda_head_dim,
            "short_conv_kernel_size": cfg.conv_width,
            "use_full_rank_gate": True,
            "gate_lower_bound": cfg.gate_lower_bound,
        },
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "latent_moe_use_norm": True,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": [
                "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*",
                "re:.*routed_expert_.*",
            ],
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                        "dynamic": False, "scale_dtype": "torch.uint8",
                    },
                    "input_activations": None,
                    "output_activations": None,
                }
            },
        },
    }  # fmt: skip
