"""A small Kimi K3 for training, in plain PyTorch, with every feature of the architecture.

Parameters carry the names of the released checkpoint, except that a layer's routed experts are stacked (`experts.w1` [E, I, L]).
Tokens are flat, [N, D]; a batch is several stretches of equal-length sequences laid end to end, so everything that acts per
token sees one static shape and can be compiled once; only the convolution's shifts, KDA and attention know where sequences
begin. Weights are float32 masters; `dtype` is what activations and matrix products run in.
"""

from collections.abc import Sequence
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight).to(dtype or x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    g, u = gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)


class Linear(nn.Module):
    """y = x W^T in x's dtype; no bias anywhere in the model."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * scale * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


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
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.cfg.situ_beta, self.cfg.situ_linear_beta))


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

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, E], zero off the chosen experts, and the number of tokens of each expert [E]."""
        score = torch.sigmoid(F.linear(x.float(), self.gate.weight.to(x.dtype).float()))  # a BF16 weight, a float32 score
        chosen = torch.topk(score.detach() + self.gate.e_score_correction_bias, self.cfg.num_experts_per_token, dim=-1).indices
        mask = torch.zeros_like(score).scatter(1, chosen, 1.0)
        weight = score * mask
        return weight / (weight.sum(-1, keepdim=True) + 1e-20), mask.sum(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cfg, ex = self.cfg, self.experts
        weight, load = self.route(x)
        z = self.routed_expert_down_proj(x)
        w1, w3, w2 = (fake_quantize(w).to(x.dtype) for w in (ex.w1, ex.w3, ex.w2))
        hidden = situ(F.linear(z, w1.flatten(0, 1)), F.linear(z, w3.flatten(0, 1)), cfg.situ_beta, cfg.situ_linear_beta)
        hidden = (hidden.unflatten(-1, (cfg.num_experts, -1)) * weight.to(x.dtype)[..., None]).flatten(1)
        routed = F.linear(hidden, w2.transpose(0, 1).flatten(1))
        routed = rms_norm(routed, self.routed_expert_norm.weight, cfg.rms_norm_eps)
        return self.routed_expert_up_proj(routed) + self.shared_experts(x), load


class Conv(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        weight = torch.randn(channels, 1, width) * 0.2
        weight[..., -1] += 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x [N, C] -> SiLU of the causal depthwise convolution; taps oldest to newest, zero before position 0 of each
        sequence."""
        x32, width = x.float(), self.weight.shape[-1]
        out = x32 * self.weight[:, 0, -1]
        for back in range(1, width):
            shifted = F.pad(x32, (0, 0, back, 0))[: x32.shape[0]]
            out = out + torch.where((position >= back)[:, None], shifted, 0.0) * self.weight[:, 0, width - 1 - back]
        return F.silu(out).to(x.dtype)


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

    def before(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        cfg = self.cfg
        heads = (cfg.kda_heads, cfg.kda_head_dim)
        q, k, v = (
            getattr(self, f"{n}_conv1d")(getattr(self, f"{n}_proj")(x), position).unflatten(-1, heads) for n in ("q", "k", "v")
        )
        q, k = ((t.float() * torch.rsqrt(t.float().square().sum(-1, keepdim=True) + 1e-6)) for t in (q, k))
        z = (self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias).unflatten(-1, heads)
        decay = cfg.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * z)
        beta = torch.sigmoid(self.b_proj(x).float())
        return (q * cfg.kda_head_dim**-0.5).to(x.dtype), k.to(x.dtype), v, decay, beta.to(x.dtype), self.g_proj(x)

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        normed = rms_norm(out, self.o_norm.weight, GATE_NORM_EPS, torch.float32).flatten(-2)
        return self.o_proj((normed * torch.sigmoid(gate.float())).to(gate.dtype))

    def forward(self, x: Tensor, position: Tensor, shapes: Shapes, kda: Kda) -> Tensor:
        *streams, gate = self.before(x, position)
        out, at = [], 0
        for rows, length in shapes:
            part = (s[at : at + rows * length].unflatten(0, (rows, length)) for s in streams)
            out.append(kda(*part).flatten(0, 1))
            at += rows * length
        return self.after(torch.cat(out), gate)


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

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k [N, heads, 192]; v [N, heads, 192], zero beyond v_head_dim because the flash kernel wants one width; the output
        gate."""
        cfg = self.cfg
        heads, nope, rope, vdim = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        q = self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight, cfg.rms_norm_eps)).unflatten(-1, (heads, -1))
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((cfg.kv_lora_rank, rope), -1)
        kv = self.kv_b_proj(rms_norm(latent, self.kv_a_layernorm.weight, cfg.rms_norm_eps)).unflatten(-1, (heads, -1))
        k = torch.cat((kv[..., :nope], k_pe[:, None].expand(-1, heads, -1)), -1)
        return q, k, F.pad(kv[..., nope:], (0, nope + rope - vdim)), self.g_proj(x)

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        out = out[..., : self.cfg.v_head_dim].flatten(-2)
        return self.o_proj((out.float() * torch.sigmoid(gate.float())).to(gate.dtype))

    def forward(self, x: Tensor, position: Tensor, shapes: Shapes, kda: Kda) -> Tensor:
        *streams, gate = self.before(x)
        out, at = [], 0
        for rows, length in shapes:
            q, k, v = (s[at : at + rows * length].unflatten(0, (rows, length)).transpose(1, 2) for s in streams)
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1))
            at += rows * length
        return self.after(torch.cat(out), gate)


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


def attn_res(sources: Sequence[Tensor], norm: Norm, proj: Linear, eps: float) -> Tensor:
    """Softmax-weighted sum, in float32, of the closed blocks and the running prefix; one source comes back unchanged."""
    if len(sources) == 1:
        return sources[0].float()
    stack = torch.stack([s.float() for s in sources])
    logit = torch.rsqrt(stack.square().mean(-1) + eps) * (stack @ (norm.weight * proj.weight[0]))
    return (torch.softmax(logit, 0)[..., None] * stack).sum(0)


class TinyK3(nn.Module):
    def __init__(self, cfg: TinyConfig, kda: Kda = kda_chunk, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.cfg, self.kda, self.dtype = cfg, kda, dtype
        self.model = Body(cfg)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)

    def forward(self, tokens: Tensor, position: Tensor, shapes: Shapes, tap: int = -1) -> tuple[Tensor, Tensor, Tensor | None]:
        """tokens, position int64 [N] -> normalised final hidden [N, D] (times lm_head = logits), expert loads [layers - 1, E],
        and the attention input of layer `tap` (what the auxiliary head reads)."""
        cfg, body = self.cfg, self.model
        prefix = body.embed_tokens(tokens).to(self.dtype)
        blocks: list[Tensor] = []
        loads, tapped, delta = [], None, None
        for index, layer in enumerate(body.layers):
            write = index % cfg.attn_res_block_size == 0
            x, prefix = self._into_attention(layer, prefix, delta, blocks)
            if index == tap:
                tapped = x
            y = layer.self_attn(x, position, shapes, self.kda)
            if write:
                blocks.append(prefix)
            delta, prefix, load = self._mlp(layer, None if write else prefix, y, blocks)
            if load is not None:
                loads.append(load)
        prefix = prefix + delta
        hidden = attn_res([*blocks, prefix], body.output_attn_res_norm, body.output_attn_res_proj, cfg.rms_norm_eps).to(
            self.dtype
        )
        return rms_norm(hidden, body.norm.weight, cfg.rms_norm_eps), torch.stack(loads), tapped

    def _into_attention(self, layer: Layer, prefix: Tensor, delta: Tensor | None, blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
        if delta is not None:
            prefix = prefix + delta
        mixed = attn_res([*blocks, prefix], layer.self_attention_res_norm, layer.self_attention_res_proj, self.cfg.rms_norm_eps)
        return rms_norm(mixed, layer.input_layernorm.weight, self.cfg.rms_norm_eps, self.dtype), prefix

    def _mlp(self, layer: Layer, prefix: Tensor | None, y: Tensor, blocks: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        prefix = y if prefix is None else prefix + y
        mixed = attn_res([*blocks, prefix], layer.mlp_res_norm, layer.mlp_res_proj, self.cfg.rms_norm_eps)
        x = rms_norm(mixed, layer.post_attention_layernorm.weight, self.cfg.rms_norm_eps, self.dtype)
        if hasattr(layer, "mlp"):
            return layer.mlp(x), prefix, None
        delta, load = layer.block_sparse_moe(x)
        return delta, prefix, load

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()

    def compile_parts(self) -> None:
        """Compile what acts per token; the sequence operators stay as they are. Shapes are static: one graph per distinct
        signature."""
        torch._dynamo.config.recompile_limit = 64
        self._into_attention = torch.compile(self._into_attention, dynamic=False)
        self._mlp = torch.compile(self._mlp, dynamic=False)
        for layer in self.model.layers:
            layer.self_attn.before = torch.compile(layer.self_attn.before, dynamic=False)
            layer.self_attn.after = torch.compile(layer.self_attn.after, dynamic=False)


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
