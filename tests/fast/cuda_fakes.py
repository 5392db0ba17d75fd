"""A small K3 as stock vLLM holds it, rank by rank, the same as a CPU backbone, and PyTorch forms in the CUDA kernels' places.

The CUDA executor's chain runs on these forms, which take the kernels' arguments in the kernels' order; the CPU executor, wired
independently, says what must come out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace as Module
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from vllm.model_executor.models.kimi_k3_fast.fast import cuda_executor, views
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_executor import Caches, StepTensors
from vllm.model_executor.models.kimi_k3_fast.fast.cuda_views import KeptExperts
from vllm.model_executor.models.kimi_k3_fast.ops import (
    all_reduce,
    attn_res,
    experts,
    kda,
    mla,
    moe_front,
    moe_tail,
    oproj,
    projection,
)
from vllm.model_executor.models.kimi_k3_fast.ops.attn_res import torch_form as attn_res_form
from vllm.model_executor.models.kimi_k3_fast.ops.experts import humming
from vllm.model_executor.models.kimi_k3_fast.ops.experts import torch_form as experts_form
from vllm.model_executor.models.kimi_k3_fast.ops.kda import torch_form as kda_form
from vllm.model_executor.models.kimi_k3_fast.ops.mla import torch_form as mla_form
from vllm.model_executor.models.kimi_k3_fast.ops.moe_front import torch_form as front_form
from vllm.model_executor.models.kimi_k3_fast.ops.situ.torch_form import situ

D, HEADS, BLOCK_SIZE, SLOTS, EXPERTS, TOP_K, LATENT, WIDTH, SHARED, DENSE, Q_RANK = 256, 2, 64, 9, 8, 2, 256, 128, 128, 128, 256
CLOSES = 2  # layers of a block of AttnRes
KINDS = ("kda", "kda", "mla", "kda")  # layer 0 has a dense MLP
EPS, BETA, LINEAR_BETA, LOWER = 1e-5, 4.0, 25.0, -5.0
BF16 = torch.bfloat16
VOCAB = 20


def weights() -> dict[str, torch.Tensor]:
    """All ranks' weights: BF16 values in fp32, MXFP4 experts as bytes."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, scale: float | None = None) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)
        return x.to(BF16).float()

    def byte(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    w = {"embed": draw(VOCAB, D, scale=1.0), "out.norm": 1 + draw(D, scale=0.2), "out.proj": draw(D), "norm": torch.ones(D)}
    inner = HEADS * 128
    for i, kind in enumerate(KINDS):
        for mix in ("attention", "mlp"):
            w[f"{i}.{mix}.norm"], w[f"{i}.{mix}.proj"] = 1 + draw(D, scale=0.2), draw(D, scale=0.1)
            w[f"{i}.{mix}.after"] = 1 + draw(D, scale=0.2)
        w[f"{i}.o"] = draw(D, inner)
        if kind == "kda":
            for name in "qkvg":
                w[f"{i}.{name}"] = draw(inner, D)
            w[f"{i}.f_a"], w[f"{i}.beta"], w[f"{i}.f_b"] = draw(128, D), draw(HEADS, D), draw(inner, 128)
            w[f"{i}.conv"] = draw(3, inner, 4, scale=0.5)
            w[f"{i}.a_log"], w[f"{i}.dt"], w[f"{i}.o_norm"] = (
                draw(HEADS, scale=0.3),
                draw(inner, scale=0.3),
                1 + draw(128, scale=0.2),
            )
        else:
            w[f"{i}.qkv_a"], w[f"{i}.gate"] = draw(Q_RANK + 576, D), draw(inner, D)
            w[f"{i}.q_norm"], w[f"{i}.kv_norm"] = 1 + draw(Q_RANK, scale=0.2), 1 + draw(512, scale=0.2)
            w[f"{i}.q_b"], w[f"{i}.kv_b"] = draw(HEADS * 192, Q_RANK), draw(HEADS, 256, 512)
        if i == 0:
            w["gate"], w["up"], w["down"] = draw(DENSE, D), draw(DENSE, D), draw(D, DENSE)
            continue
        w[f"{i}.router"], w[f"{i}.bias"] = draw(EXPERTS, D), draw(EXPERTS, scale=3.0)  # the bias decides: no near ties
        w[f"{i}.latent_down"], w[f"{i}.latent_norm"] = draw(LATENT, D), 1 + draw(LATENT, scale=0.2)
        w[f"{i}.latent_up"] = draw(D, LATENT)
        w[f"{i}.s_gate"], w[f"{i}.s_up"], w[f"{i}.s_down"] = draw(SHARED, D), draw(SHARED, D), draw(D, SHARED)
        for name in ("w1", "w3"):
            w[f"{i}.{name}"] = byte(0, 256, EXPERTS, WIDTH, LATENT // 2)
            w[f"{i}.{name}s"] = byte(118, 123, EXPERTS, WIDTH, LATENT // 32)
        w[f"{i}.w2"], w[f"{i}.w2s"] = byte(0, 256, EXPERTS, LATENT, WIDTH // 2), byte(118, 123, EXPERTS, LATENT, WIDTH // 32)
    return w


# -- as stock holds them ----------------------------------------


def _norm(weight: torch.Tensor) -> Module:
    return Module(weight=weight.to(BF16), variance_epsilon=EPS)


def _linear(weight: torch.Tensor) -> Module:
    return Module(weight=weight.to(BF16).contiguous())


class _Repacks:
    """Stock's quantisation method: after it, the checkpoint's layout is gone."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.w13_weight = layer.w13_weight.view(torch.int32).flip(-1).contiguous()
        layer.w2_weight.zero_()


class Packs:
    """Stock's method where its backend is HUMMING."""

    mxfp4_backend = Module(name="HUMMING")

    def __init__(self, activations: str = "bfloat16") -> None:
        types = {"a_dtype": activations, "b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "c_dtype": "bfloat16"}
        flags = dict.fromkeys(("use_native_dequant", "use_fused_e8m0_scale", "has_zero_point"), False)
        self.packing = Module(**types, **flags)

    def process_weights_after_loading(self, layer: Any) -> None:
        raw = (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
        packed = humming.pack(experts_form.Weights(*raw))
        layer.w13_weight, layer.w2_weight = packed.w13, packed.w2
        layer.w13_weight_scale, layer.w2_weight_scale = (s.view(torch.float8_e8m0fnu) for s in (packed.s13, packed.s2))
        layer.humming_configs = {"w13": self.packing, "w2": self.packing}
        for tensor in raw:
            tensor.zero_()


def stock(
    w: dict[str, torch.Tensor], rank: int = 0, world: int = 1, reduce: Callable = lambda x: x, packs: bool = False
) -> tuple[Any, dict[int, Any]]:
    """Stock's `KimiLinearModel` of one rank after load, and the kept experts. Attribute names and layouts are stock's."""
    heads = HEADS // world

    def mine(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(world, dim)[rank]

    layers, kept = [], {}
    for i, kind in enumerate(KINDS):
        attention = _kda(w, i, heads, mine) if kind == "kda" else _mla(w, i, heads, mine)
        attention.o_proj = _linear(mine(w[f"{i}.o"], 1))
        layer = Module(
            self_attn=attention,
            self_attention_res_norm=_norm(w[f"{i}.attention.norm"]),
            self_attention_res_proj=_linear(w[f"{i}.attention.proj"][None]),
            input_layernorm=_norm(w[f"{i}.attention.after"]),
            mlp_res_norm=_norm(w[f"{i}.mlp.norm"]),
            mlp_res_proj=_linear(w[f"{i}.mlp.proj"][None]),
            post_attention_layernorm=_norm(w[f"{i}.mlp.after"]),
        )
        if i == 0:
            gate_up, down = (x.to(BF16) for x in (torch.cat([mine(w["gate"]), mine(w["up"])]), mine(w["down"], 1)))
            layer.mlp = lambda x, a=gate_up, b=down: reduce(F.linear(situ(F.linear(x, a), BETA, LINEAR_BETA), b))
        else:
            layer.mlp, kept[i] = _moe(w, i, mine, packs)
        layers.append(layer)
    config = Module(
        hidden_size=D,
        rms_norm_eps=EPS,
        attn_res_block_size=CLOSES,
        activation_situ_beta=BETA,
        activation_situ_linear_beta=LINEAR_BETA,
    )
    table = w["embed"].to(BF16)
    model = Module(
        config=config,
        layers=layers,
        output_attn_res_norm=_norm(w["out.norm"]),
        output_attn_res_proj=_linear(w["out.proj"][None]),
        norm=_norm(w["norm"]),
        embed_input_ids=lambda ids: table[ids],
    )
    return model, kept


def _kda(w: dict[str, torch.Tensor], i: int, heads: int, mine: Callable) -> Module:
    parts = [mine(w[f"{i}.{name}"]) for name in "qkvg"] + [w[f"{i}.f_a"], mine(w[f"{i}.beta"])]
    rows = sum(len(part) for part in parts)
    parts.append(torch.zeros(-rows % 16, D))
    return Module(
        prefix=f"layers.{i}",
        local_num_heads=heads,
        in_proj_qkvgfab=_linear(torch.cat(parts)),
        conv1d=Module(weight=torch.cat([mine(c) for c in w[f"{i}.conv"]]).unsqueeze(1).contiguous()),
        f_b_proj=_linear(mine(w[f"{i}.f_b"])),
        A_log=mine(w[f"{i}.a_log"]).contiguous(),
        dt_bias=mine(w[f"{i}.dt"]).contiguous(),
        o_norm=Module(weight=w[f"{i}.o_norm"].to(BF16), eps=EPS),
        gate_lower_bound=LOWER,
    )


def _mla(w: dict[str, torch.Tensor], i: int, heads: int, mine: Callable) -> Module:
    packed = mine(w[f"{i}.kv_b"]).to(BF16).contiguous()  # [h, 256, 512]: kv_b's own rows, which W_UK_T and W_UV are views of
    return Module(
        layer_name=f"layers.{i}",
        num_local_heads=heads,
        q_lora_rank=Q_RANK,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        kv_lora_rank=512,
        v_head_dim=128,
        fused_qkv_a_g_proj=_linear(torch.cat([w[f"{i}.qkv_a"], mine(w[f"{i}.gate"])])),
        q_a_layernorm=_norm(w[f"{i}.q_norm"]),
        kv_a_layernorm=_norm(w[f"{i}.kv_norm"]),
        q_b_proj=_linear(mine(w[f"{i}.q_b"])),
        W_UK_T=packed[:, :128],
        W_UV=packed[:, 128:].transpose(1, 2),
        rms_norm_eps=EPS,
        scale=192**-0.5,
    )


def _moe(w: dict[str, torch.Tensor], i: int, mine: Callable, packs: bool) -> tuple[Module, KeptExperts]:
    routed = Module(
        top_k=TOP_K,
        quant_method=Packs() if packs else _Repacks(),
        w13_weight=torch.cat([mine(w[f"{i}.w1"], 1), mine(w[f"{i}.w3"], 1)], 1),
        w13_weight_scale=torch.cat([mine(w[f"{i}.w1s"], 1), mine(w[f"{i}.w3s"], 1)], 1),
        w2_weight=mine(w[f"{i}.w2"], 2).contiguous().clone(),
        w2_weight_scale=mine(w[f"{i}.w2s"], 2).contiguous(),
    )
    kept = KeptExperts(f"layer {i}", routed)
    routed.quant_method.process_weights_after_loading(routed)  # as vLLM's loader does
    gate = _linear(w[f"{i}.router"])
    gate.e_score_correction_bias = w[f"{i}.bias"]
    moe = Module(
        gate=gate,
        routed_expert_down_proj=_linear(w[f"{i}.latent_down"]),
        routed_expert_norm=_norm(w[f"{i}.latent_norm"]),
        routed_expert_up_proj=_linear(w[f"{i}.latent_up"]),
        shared_experts=Module(
            gate_up_proj=_linear(torch.cat([mine(w[f"{i}.s_gate"]), mine(w[f"{i}.s_up"])])),
            down_proj=_linear(mine(w[f"{i}.s_down"], 1)),
        ),
        experts=Module(routed_experts=routed, router=Router(w[f"{i}.bias"])),
        moe_renormalize=True,
        routed_scaling_factor=1.5,
    )
    return moe, kept


class Router(BaseRouter):
    """Stock's router but for its kernel."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__(TOP_K, EXPERTS)
        self.bias = bias

    routing_method_type = None  # type: ignore[assignment]

    def _compute_routing(self, hidden: Any, logits: Any, indices_type: Any, *, input_ids: Any = None) -> Any:
        ids, shares = front_form.route(logits, self.bias, TOP_K, True, 1.5)
        return shares, ids.to(torch.int32 if indices_type is None else indices_type)


def caches(dtype: torch.dtype = BF16, rank: int = 0, world: int = 1) -> Caches:
    """The bound caches of one rank, filled; the values do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(6)
    conv, state, latent = {}, {}, {}
    for i, kind in enumerate(KINDS):
        if kind == "kda":
            raw = (torch.randn(SLOTS, 3, 3, HEADS * 128, generator=generator) * 0.3).to(BF16).to(dtype)
            whole = torch.randn(SLOTS, HEADS, 128, 128, generator=generator) * 0.1
            conv[f"layers.{i}"] = torch.cat([part.chunk(world, -1)[rank] for part in raw.unbind(2)], -1).contiguous()
            state[f"layers.{i}"] = whole.chunk(world, 1)[rank].contiguous()
        else:
            latent[f"layers.{i}"] = torch.randn(SLOTS, BLOCK_SIZE, 576, generator=generator).to(BF16).to(dtype)
    return Caches(conv, state, latent)


# -- as the CPU executor reads them ----------------------------------------


def backbone(w: dict[str, torch.Tensor], bound: Caches, dtype: torch.dtype) -> views.Backbone:
    """The same model over the same caches, in the views of the CPU path."""
    x = {name: value if value.dtype == torch.uint8 else value.to(dtype) for name, value in w.items()}

    def mix(name: str, after: str | None) -> views.Mix:
        return views.Mix(w[f"{name}.norm"] * w[f"{name}.proj"], None if after is None else w[after])

    layers = []
    for i, kind in enumerate(KINDS):
        name = f"layers.{i}"
        if kind == "kda":
            packed = torch.cat([x[f"{i}.{part}"] for part in "qkvg"] + [x[f"{i}.f_a"], x[f"{i}.beta"]])
            held = kda_form.Weights(
                w[f"{i}.conv"].flatten(0, 1),
                x[f"{i}.f_b"],
                w[f"{i}.a_log"].exp()[:, None],
                w[f"{i}.dt"].view(HEADS, 128),
                w[f"{i}.o_norm"],
                LOWER,
            )
            attention: Any = views.Kda("kda", packed, held, x[f"{i}.o"], bound.conv[name], bound.state[name])
        else:
            packed = torch.cat([x[f"{i}.qkv_a"], x[f"{i}.gate"]])
            norms = w[f"{i}.q_norm"], w[f"{i}.kv_norm"]
            halves = x[f"{i}.kv_b"][:, :128], x[f"{i}.kv_b"][:, 128:]
            attention = views.Mla("mla", packed, *norms, EPS, x[f"{i}.q_b"], *halves, x[f"{i}.o"], bound.latent[name], 192**-0.5)
        mlp: Any = views.Dense(torch.cat([x["gate"], x["up"]]), x["down"])
        if i:
            both = [torch.cat([w[f"{i}.w1{s}"], w[f"{i}.w3{s}"]], 1) for s in ("", "s")]
            mlp = views.Moe(
                w[f"{i}.router"],
                w[f"{i}.bias"],
                TOP_K,
                True,
                1.5,
                x[f"{i}.latent_down"],
                experts_form.Weights(*both, w[f"{i}.w2"], w[f"{i}.w2s"]),
                w[f"{i}.latent_norm"],
                x[f"{i}.latent_up"],
                views.Dense(torch.cat([x[f"{i}.s_gate"], x[f"{i}.s_up"]]), x[f"{i}.s_down"]),
            )
        first, second = mix(f"{i}.attention", f"{i}.attention.after"), mix(f"{i}.mlp", f"{i}.mlp.after")
        layers.append(views.Layer(i, i % CLOSES == 0, first, attention, second, mlp))
    embed = x["embed"]
    final = mix("out", None)
    return views.Backbone(1, dtype, D, EPS, BETA, LINEAR_BETA, tuple(layers), final, lambda ids: embed[ids], lambda y: y, 0)


# -- in the place of the kernels ----------------------------------------


class Launches(list):
    """(kernel, plan) of every launch, in order; `lock` keeps ranks in threads apart."""


def replace_kernels(monkeypatch: Any) -> Launches:
    """Put PyTorch forms in the place of every `run` that the executor calls, and compile nothing."""
    launched = Launches()
    experts.plan.cache_clear()
    for op in (kda, mla, experts):
        monkeypatch.setattr(op, "get", lambda spec, arch: spec)
    monkeypatch.setattr(cuda_executor, "compile_missing", lambda specs, arch, say: 0)
    monkeypatch.setattr(cuda_executor.build, "get", lambda spec, arch: spec)

    def put(op: Any, name: str, form: Callable) -> None:
        def run(plan: Any, *tensors: Any, stream: int | None = None, **named: Any) -> None:
            assert stream is None
            given = [t for i, t in enumerate(tensors) if not (op is moe_tail and i == 3)]  # its up-projection may be a share
            assert all(t.is_contiguous() for t in given if isinstance(t, torch.Tensor) and t.dim() < 3)
            launched.append((f"{op.__name__.rpartition('.')[2]}.{name}", plan))
            form(plan.config, *tensors, **named)

        monkeypatch.setattr(op, name, run)

    put(attn_res, "run", _attn_res)
    put(
        projection, "run", lambda c, a, w, out: _shaped(out, c.tokens, c.rows).copy_(F.linear(_shaped(a, c.tokens, c.columns), w))
    )
    put(oproj, "run", _oproj)
    put(all_reduce, "run", lambda c, x, out, box: out.copy_(_sum(c, _shaped(x, c.tokens, c.columns), box)))
    put(all_reduce, "run_norm", _sum_norm)
    put(kda, "run", _kda_step)
    put(mla, "run", _mla_step)
    put(moe_front, "run", _front)
    put(moe_front, "run_topk", _topk)
    put(experts, "run", _experts)
    put(moe_tail, "run", _tail)
    return launched


def _shaped(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    assert tuple(tensor.shape) == shape, f"expected {shape}, found {tuple(tensor.shape)}"
    return tensor


def _attn_res(c: Any, score: Any, norm: Any, delta: Any, blocks: Any, prefix: Any, out: Any, box: Any = None) -> None:
    _shaped(blocks, c.closed, c.rows, c.columns), _shaped(prefix, c.rows, c.columns), _shaped(out, c.tokens, c.columns)
    t = c.tokens
    _shaped(delta, t, c.columns)
    if c.world > 1:
        delta = _sum(c, box.posted, box)
        del box.posted  # each is received once
    if c.has_delta:
        prefix[:t] = delta if c.replaces else prefix[:t] + delta
    if c.write >= 0:
        blocks[c.write, :t] = prefix[:t]
    mixed = attn_res_form.mix(torch.cat([blocks[: c.prev, :t], prefix[None, :t]]).float(), score, c.eps)
    out.copy_(attn_res_form.rms_norm(mixed, norm.float(), c.eps, BF16) if c.normalise else mixed)


def _sum(c: Any, partial: torch.Tensor, box: Any) -> torch.Tensor:
    """Over the ranks, where there are several."""
    assert (box is None) == (c.world == 1)
    if box is None:
        return partial
    assert box.layout.words >= c.words
    return box.reduce(partial)


def _post(c: Any, partial: torch.Tensor, box: Any) -> None:
    """What AttnRes is to add up."""
    assert not hasattr(box, "posted") and box.layout.words >= c.words
    box.posted = partial


def _sum_norm(c: Any, x: Any, norm: Any, out: Any, box: Any) -> None:
    r = _sum(c, _shaped(x, c.tokens, c.columns), box).float()
    normed = r * torch.rsqrt(r.square().mean(-1, keepdim=True) + c.eps) * norm.float()
    out.copy_(normed.chunk(c.world, 1)[box.rank])


def _oproj(c: Any, y: Any, weight: Any, prefix: Any, box: Any = None) -> None:
    partial = F.linear(_shaped(y, c.tokens, c.columns), weight)
    if c.posts:
        return _post(c, partial, box)
    summed = _sum(c, partial, box)
    prefix.copy_(summed if c.update == "write" else prefix + summed)


def _kda_step(
    c: Any, x: Any, conv: Any, f_b: Any, a_log: Any, dt: Any, norm: Any, slots: Any, states: Any, state: Any, y: Any
) -> None:
    _shaped(x, c.tokens, c.columns), _shaped(slots, c.requests, 1), _shaped(states[:1], 1, 3, 3 * c.heads * 128)
    held = kda_form.Weights(conv, f_b, a_log.exp()[:, None], dt.view(c.heads, 128), norm.float(), c.lower_bound)
    y.copy_(kda_form.step(x[:, : 4 * c.heads * 128 + 128 + c.heads], states, state, slots[:, 0].long(), held, BF16))


def _mla_step(c: Any, x: Any, w: Any, at: Any, y: Any, scratch: Any) -> None:
    _shaped(x, c.tokens, c.columns), _shaped(at.table, c.requests, c.pages), _shaped(at.cache[:1], 1, c.block_size, 576)
    assert w.scales.tolist() == [1, 1] and set(scratch) >= {"q", "query", "latent", "lse"}
    forms = views_forms()
    q_a = forms.mla_rows(x, w.q_norm.float(), w.kv_norm.float(), c.norm_eps, at.cache, at.slot_mapping)
    query = forms.absorb(F.linear(q_a, w.q_b).unflatten(1, (c.heads, -1)), w.w_uk)
    found = mla_form.attend(query, at.cache, at.table, at.lengths, 512, c.scale, int(at.lengths.max()))
    y.copy_(forms.values(found, w.w_uv, x[:, c.q_rank + 576 : c.q_rank + 576 + c.heads * 128]))


def views_forms() -> Any:
    from vllm.model_executor.models.kimi_k3_fast.fast.backend import TorchForms

    return TorchForms()


def _front(c: Any, m: Any, router: Any, down: Any, gate_up: Any, logits: Any, z: Any, hidden: Any) -> None:
    _shaped(router, c.experts, c.columns), _shaped(down, c.latent, c.columns)
    logits.copy_(F.linear(_shaped(m, c.tokens, c.columns).float(), router.float()))
    z.copy_(F.linear(m, down))
    hidden.copy_(situ(F.linear(m, gate_up), c.beta, c.linear_beta))


def _topk(c: Any, logits: Any, bias: Any, num_tokens: Any, ids: Any, chosen: Any, groups: Any = None, gather: Any = None) -> None:
    assert (groups is not None) == c.grouped and (gather is not None) == (c.world > 1)
    if gather is not None:
        _shaped(logits, c.tokens, c.experts // c.world), _shaped(gather.z_own, c.tokens, c.latent // c.world)
        logits = _whole(c, logits, gather.mailbox)
        _shaped(gather.z, c.tokens, c.latent).copy_(_whole(c, gather.z_own, gather.mailbox))
    found, shares = front_form.route(logits, bias, c.top_k, c.renormalise, c.scaling)
    real = torch.arange(c.tokens)[:, None] < _shaped(num_tokens, 1)
    ids.copy_(torch.where(real, found, 0))
    chosen.copy_(torch.where(real, shares, 0.0))


def _whole(c: Any, share: torch.Tensor, box: Any) -> torch.Tensor:
    """All ranks' columns, of which each has a share."""
    shares = [torch.zeros_like(share) for _ in range(c.world)]
    shares[box.rank] = share
    return _sum(c, torch.cat(shares, 1), box)


def _experts(c: Any, held: Any, z: Any, routing: Any, scratch: Any, out: Any) -> None:
    assert held.layout == c.layout and held.width == c.width
    held = humming.unpack(held) if held.layout == experts.HUMMING else held
    _shaped(scratch.hidden, c.pairs, c.width)
    ids = torch.where(routing.weights > 0, routing.ids, -1).long()
    out.copy_(
        experts_form.run(_shaped(z, c.tokens, c.hidden), ids, routing.weights, held, lambda h: situ(h, c.beta, c.linear_beta))
    )


def _tail(
    c: Any, r: Any, hidden: Any, norm: Any, up: Any, down: Any, delta: Any, scratch: Any = None, mailbox: Any = None
) -> None:
    inner = _shaped(r, c.tokens, c.latent).float()
    if not c.normed:
        inner = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + c.eps) * norm.float()
    assert up.shape == (c.rows, c.latent) and up.stride() == (c.pitch or c.latent, 1)
    partial = (F.linear(inner, up.float()) + F.linear(hidden.float(), down.float())).to(BF16)
    if c.posts:
        return _post(c, partial, mailbox)
    delta.copy_(_sum(c, partial, mailbox))


# -- a step ----------------------------------------


def step_tensors(slots: list[int], length: int) -> StepTensors:
    """Every real request has `length` tokens, this step's included; its blocks are its slot and the next but four."""
    live = torch.tensor(slots) > 0
    table = torch.tensor([[s, s + 4] if s > 0 else [0, 0] for s in slots], dtype=torch.int32)
    lengths = torch.where(live, length, 0).to(torch.int32)
    at = (lengths - 1).clamp_min(0).long()
    rows = torch.where(live, table[torch.arange(len(slots)), at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE, -1)
    kdas, mlas = ([f"layers.{i}" for i, kind in enumerate(KINDS) if kind == wanted] for wanted in ("kda", "mla"))
    return StepTensors(
        slots=dict.fromkeys(kdas, torch.tensor(slots, dtype=torch.int32)[:, None]),
        rows=dict.fromkeys(mlas, rows),
        tables=dict.fromkeys(mlas, table),
        lengths=dict.fromkeys(mlas, lengths),
        num_tokens=live.sum().to(torch.int32)[None],
    )


class Meeting:
    """An all-reduce between threads, one a rank."""

    def __init__(self, world: int) -> None:
        self.barrier, self.parts = threading.Barrier(world, timeout=60), [torch.empty(0)] * world

    def reduce(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = x
            self.barrier.wait()
            total = sum(part.float() for part in self.parts).to(x.dtype)  # type: ignore[union-attr]
            self.barrier.wait()
            return total

        return run
