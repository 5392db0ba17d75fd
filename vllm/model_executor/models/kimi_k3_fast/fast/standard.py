"""Views of the standard path's own modules. Only norms and router rows are copied, widened to fp32; nothing is changed."""

from __future__ import annotations

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from ..model.attn_res import Mixer
from ..model.causal_lm import DecoderLayer, KimiK3ForCausalLM
from ..model.kda import KimiDeltaAttention
from ..model.layers import MLP, RMSNorm
from ..model.mla import KimiLatentAttention
from ..model.moe import SparseMoE
from ..ops.experts import torch_form as experts
from ..ops.kda import torch_form as kda
from .views import Backbone, Dense, Kda, Layer, Mix, Mla, Moe


class _Prepared:
    """Makes the few prepared tensors and counts their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """x in fp32; a copy only where it was narrower."""
        return x.detach() if x.dtype == torch.float32 else self.own(x.detach().float())

    def own(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += x.numel() * x.element_size()
        return x


def backbone(model: KimiK3ForCausalLM, generation: int, group_of: dict[str, str]) -> Backbone:
    """The views of a loaded model whose caches are bound. group_of: cache group of each attention layer, by its name in vLLM."""
    c, make = model.config, _Prepared()
    assert model.model.output_mixer is not None and c.attn_res_block is not None
    layers = tuple(_layer(layer, layer.index % c.attn_res_block == 0, group_of, make) for layer in model.model.layers)
    final = _mix(model.model.output_mixer, None, make)
    return Backbone(
        generation=generation,
        dtype=model.model.embed_tokens.weight.dtype,
        hidden=c.hidden_size,
        eps=c.rms_norm_eps,
        situ_beta=c.situ_beta,
        situ_linear_beta=c.situ_linear_beta,
        layers=layers,
        final_mix=final,
        embed=model.embed_input_ids,
        reduce=tensor_model_parallel_all_reduce if get_tensor_model_parallel_world_size() > 1 else _keep,
        prepared_bytes=make.bytes,
    )


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x


def _mix(mixer: Mixer | None, norm: RMSNorm | None, make: _Prepared) -> Mix:
    assert mixer is not None
    score = make.own(mixer.norm_weight.detach().float() * mixer.proj_weight.detach().float().flatten())
    return Mix(score, None if norm is None else make.wide(norm.weight))


def _layer(layer: DecoderLayer, closes: bool, group_of: dict[str, str], make: _Prepared) -> Layer:
    attention = layer.self_attn
    return Layer(
        index=layer.index,
        closes=closes,
        attention_mix=_mix(layer.attention_mixer, layer.input_layernorm, make),
        attention=_kda(attention, group_of, make)
        if isinstance(attention, KimiDeltaAttention)
        else _mla(attention, group_of, make),
        mlp_mix=_mix(layer.mlp_mixer, layer.post_attention_layernorm, make),
        mlp=_moe(layer.mlp, make) if isinstance(layer.mlp, SparseMoE) else _dense(layer.mlp),
    )


def _kda(layer: KimiDeltaAttention, group_of: dict[str, str], make: _Prepared) -> Kda:
    assert layer.config.gate_lower_bound is not None
    weights = kda.Weights(
        conv=layer.conv_weight.detach(),
        f_b=layer.f_b_proj.weight.detach(),
        decay=make.own(layer.A_log.detach().exp().unsqueeze(1)),
        dt_bias=layer.dt_bias.detach(),
        out_norm=make.wide(layer.o_norm_weight),
        lower_bound=layer.config.gate_lower_bound,
    )
    return Kda(
        group=group_of[layer.prefix],
        in_proj=layer.in_proj.weight.detach(),
        weights=weights,
        o_proj=layer.o_proj.weight.detach(),
        conv_state=layer.conv_state,
        state=layer.recurrent_state,
    )


def _mla(layer: KimiLatentAttention, group_of: dict[str, str], make: _Prepared) -> Mla:
    assert layer.q_b_proj is not None and layer.q_a_norm_weight is not None
    per_head = layer.w_kvb.detach()
    return Mla(
        group=group_of[layer.prefix],
        in_proj=layer.in_proj.weight.detach(),
        q_norm=make.wide(layer.q_a_norm_weight),
        kv_norm=make.wide(layer.kv_a_norm_weight),
        norm_eps=layer.config.latent_norm_eps,
        q_b=layer.q_b_proj.weight.detach(),
        w_uk=per_head[:, : layer.config.nope_dim],
        w_uv=per_head[:, layer.config.nope_dim :],
        o_proj=layer.o_proj.weight.detach(),
        cache=layer.kv_cache,
        scale=layer.scale,
    )


def _dense(mlp: MLP) -> Dense:
    return Dense(mlp.gate_up_proj.weight.detach(), mlp.down_proj.weight.detach())


def _moe(moe: SparseMoE, make: _Prepared) -> Moe:
    assert moe.down_proj is not None and moe.up_proj is not None
    routed = moe.experts
    return Moe(
        gate=make.wide(moe.gate_weight),
        bias=moe.correction_bias.detach(),
        top_k=moe.config.experts_per_token,
        renormalise=moe.config.renormalize,
        scaling=moe.config.routed_scaling_factor,
        down=moe.down_proj.weight.detach(),
        experts=experts.Weights(routed.w13.detach(), routed.w13_scale.detach(), routed.w2.detach(), routed.w2_scale.detach()),
        norm=None if moe.latent_norm is None else make.wide(moe.latent_norm.weight),
        up=moe.up_proj.weight.detach(),
        shared=None if moe.shared_experts is None else _dense(moe.shared_experts),
    )
