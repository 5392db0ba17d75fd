"""Views of stock vLLM's K3 modules for the CUDA kernels: where the weights lie, and the little that has to be made of them.

Stock keeps the layouts that the kernels read: packed projections, W_UK and W_UV as views of kv_b, BF16 everywhere but the
experts. The AttnRes score rows (norm weight times projection row, fp32) are made here, once; they are small. The routed experts
are large. Where stock packs their MXFP4 for its backend HUMMING, as on Hopper, the kernels read that layout in place. Other
backends' layouts they do not read, and stock drops the checkpoint's, so `KeptExperts` copies it right before stock repacks.
Nothing of stock's is changed. Modules are read by attribute; no class of vLLM is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import experts as experts_op
from ..ops.experts.torch_form import Weights
from ..ops.mla import LATENT, NOPE, ROPE, VALUE

HEAD = 128  # K and V dimension of a KDA head
PACKING_BACKEND = "HUMMING"  # stock's name of the backend whose layout the kernels read


class LayoutError(ValueError):
    """Stock's weights do not lie as the kernels read them; the message names the layer, what was expected and found."""


@dataclass(frozen=True)
class Mix:
    """One AttnRes: score [D] fp32; `norm` [D] bf16, the RMSNorm that follows (none at the model's end: any stands in)."""

    score: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class Kda:
    """in_proj [q | k | v | gate | f_a | beta | pad, D]; conv [3 h d, 4] and a_log [h], dt_bias [h d] fp32; the others bf16."""

    name: str  # in vLLM's metadata
    in_proj: torch.Tensor
    conv: torch.Tensor
    f_b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    out_norm: torch.Tensor
    o_proj: torch.Tensor
    heads: int
    lower_bound: float | None
    norm_eps: float


@dataclass(frozen=True)
class Mla:
    """in_proj [q_a | kv_a | k_pe | gate, D]; q_b [h 192, q_a]; w_uk and w_uv [h, 128, 512], any head stride."""

    name: str
    in_proj: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    o_proj: torch.Tensor
    heads: int
    norm_eps: float
    scale: float


@dataclass(frozen=True)
class Moe:
    """router [E, D], down [L, D], gate_up [2 S, D], up [D, L], shared_down [D, S], norm [L]: bf16; bias [E] fp32. stock_router:
    stock's object that chooses experts from logits, for the shadow check."""

    router: torch.Tensor
    bias: torch.Tensor
    down: torch.Tensor
    gate_up: torch.Tensor
    experts: Weights
    norm: torch.Tensor
    up: torch.Tensor
    shared_down: torch.Tensor
    top_k: int
    renormalise: bool
    scaling: float
    stock_router: Any = None


@dataclass(frozen=True)
class Dense:
    """A dense MLP, computed by stock's own module: [T, D] -> [T, D], reduced over the ranks."""

    forward: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One decoder layer. `prev`: closed blocks before it; `write`: the block that it closes, or -1."""

    index: int
    prev: int
    write: int
    attention_mix: Mix
    attention: Kda | Mla
    mlp_mix: Mix
    mlp: Moe | Dense


@dataclass(frozen=True)
class Model:
    """All that a fast step reads but the caches. embed: ids [T] -> [T, D], reduced over the ranks. `closed`: AttnRes blocks."""

    hidden: int
    eps: float
    situ_beta: float
    situ_linear_beta: float | None
    layers: tuple[Layer, ...]
    final_mix: Mix
    closed: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    prepared: Prepared


class Prepared:
    """Tensors made of stock's weights, and how: `rebuild` makes them anew in place, where captured graphs read them."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def __call__(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make().detach().contiguous()
        self._made.append((made, make))
        return made

    @property
    def bytes(self) -> int:
        return sum(made.numel() * made.element_size() for made, _ in self._made)

    def rebuild(self) -> None:
        """After stock's weights were changed in place (a test or a benchmark does; a server refuses)."""
        with torch.no_grad():
            for made, make in self._made:
                made.copy_(make())


class KeptExperts:
    """One layer's routed experts as the kernels read them: stock's own tensors where its backend packs them in a layout that the
    kernels know, else a copy of the checkpoint's layout, made right before stock repacks it.

    routed: stock's module of the experts, which owns `quant_method` and the raw tensors until that method has processed them.
    """

    def __init__(self, name: str, routed: Any) -> None:
        self.name = name
        self.weights: Weights | None = None
        self.problem = "they were never processed"
        method = routed.quant_method
        process = method.process_weights_after_loading

        def keep_and_process(layer: Any) -> None:
            if self.weights is not None:
                raise RuntimeError(
                    f"{name}: expected one load of weights, found a second. The fast path's graphs read the first one's "
                    "experts: restart the server for new weights, or serve with mode 'off'."
                )
            shared = self.shares(layer)
            try:
                raw = self.raw(layer)
            except ValueError as error:  # told when the views are taken: whether it ends the server is the mode's word
                self.problem = str(error)
                process(layer)
                return
            width, pitch = self.width_of(layer), raw.width
            if not shared:
                self.weights = narrowed(raw, width)
            del raw  # stock frees them one by one
            process(layer)
            if shared:
                try:
                    self.weights = self.view(layer, width, pitch)
                except ValueError as error:
                    self.problem = str(error)

        method.process_weights_after_loading = keep_and_process

    @staticmethod
    def shares(routed: Any) -> bool:
        """Whether stock will pack these experts, still raw, in a layout that the kernels read."""
        backend = getattr(getattr(routed.quant_method, "mxfp4_backend", None), "name", "")
        raw = getattr(routed, "w13_weight", None)
        if backend != PACKING_BACKEND or raw is None or raw.dim() != 3:
            return False
        width, pitch = KeptExperts.width_of(routed), raw.shape[1] // 2
        shape = experts_op.Config(1, 2 * raw.shape[2], width, layout=experts_op.HUMMING, pitch=pitch)
        return experts_op.unavailable_reason(shape, experts_op.ARCHS[0]) is None

    @staticmethod
    def width_of(routed: Any) -> int:
        """Rows of gate that the checkpoint fills: stock widens narrow experts with zeros, and notes what they were."""
        real = getattr(getattr(routed, "moe_config", None), "intermediate_size_per_partition_unpadded", None)
        return real or routed.w13_weight.shape[1] // 2

    @classmethod
    def bytes_of(cls, routed: Any) -> tuple[int, int]:
        """What is read in stock's own memory, and what a copy takes: known before anything is loaded."""
        found = (getattr(routed, name, None) for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"))
        size = sum(t.numel() * t.element_size() for t in found if t is not None)
        if cls.shares(routed):
            return size, 0
        return 0, size * cls.width_of(routed) // (routed.w13_weight.shape[1] // 2) if size else 0

    def raw(self, layer: Any) -> Weights:
        """`w13_weight` [E, 2 I, L/2], `w2_weight` [E, L, I/2] and their scales, all uint8. Raises LayoutError."""
        raw = [getattr(layer, f"{name}_weight{kind}", None) for name in ("w13", "w2") for kind in ("", "_scale")]
        for tensor, what in zip(raw, ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"), strict=True):
            if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 3:
                found = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise LayoutError(f"{self.name}.{what}: expected the checkpoint's MXFP4, uint8 in 3 dimensions, found {found}")
        w13, s13, w2, s2 = (t.detach() for t in raw if t is not None)
        experts, rows, half = w13.shape
        shapes = {
            "w13 scales": (s13, (experts, rows, half // 16)),
            "w2": (w2, (experts, 2 * half, rows // 4)),
            "w2 scales": (s2, (experts, 2 * half, rows // 64)),
        }
        for what, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise LayoutError(f"{self.name}, {what}: expected {shape}, found {tuple(tensor.shape)}")
        width = self.width_of(layer)
        padding = w13.view(experts, 2, rows // 2, half)[:, :, width:]
        if padding.any():
            raise LayoutError(f"{self.name}, w13: expected zeros in the rows behind {width} of gate and up, found other codes")
        experts_op.check_scales(s13, s2)
        return Weights(w13, s13, w2, s2)

    def view(self, layer: Any, width: int, pitch: int) -> Weights:
        """Stock's packed tensors of experts `width` wide, which it made `pitch` wide. Raises LayoutError where they are packed
        otherwise than the kernels read them.
        """
        latent = layer.w2_weight.shape[2] // 2
        found = []
        for name, rows, columns in (("w13", 2 * pitch, latent), ("w2", latent, pitch)):
            packing = layer.humming_configs[name]
            types = {part: str(getattr(packing, f"{part}_dtype")) for part in ("a", "b", "bs", "c")}
            wanted = {"a": "bfloat16", "b": "float4e2m1", "bs": "float8e8m0", "c": "bfloat16"}
            if types != wanted or packing.use_native_dequant or packing.use_fused_e8m0_scale or packing.has_zero_point:
                raise LayoutError(f"{self.name}, {name}: expected packing for {wanted} by shifts, found {types}: {packing}")
            experts, n, k = layer.w13_weight.shape[0], experts_op.padded_rows(rows), experts_op.padded_columns(columns)
            codes, scales = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            found.append(_need(f"{self.name}, packed {name}", codes, torch.int32, experts, k // 16, 2 * n))
            scales = _need(f"{self.name}, packed {name} scales", scales, torch.float8_e8m0fnu, experts, k // 32, n)
            found.append(scales.view(torch.uint8))
        return Weights(*found, layout=experts_op.HUMMING, inner=width, pitch=pitch if pitch != width else 0)


def narrowed(raw: Weights, width: int) -> Weights:
    """A copy without the zeros that make experts wider than they are."""
    e, pitch = raw.w13.shape[0], raw.width
    first = [t.view(e, 2, pitch, -1)[:, :, :width] for t in (raw.w13, raw.s13)]
    w13, s13, w2, s2 = (
        t.clone(memory_format=torch.contiguous_format)
        for t in (*first, raw.w2[:, :, : width // 2], raw.s2[:, :, : width // experts_op.GROUP])
    )
    return Weights(w13.view(e, 2 * width, -1), s13.view(e, 2 * width, -1), w2, s2)


def _need(where: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The tensor without its gradient, if it lies row-major with this type and shape; -1 leaves a size open."""
    same = tensor.dim() == len(shape) and all(want in (-1, found) for want, found in zip(shape, tensor.shape, strict=True))
    if not same or tensor.dtype != dtype or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ' not row-major'}"
        raise LayoutError(f"{where}: expected {dtype} {shape} row-major, found {found}")
    return tensor.detach()


def view_model(stock: Any, kept: dict[int, KeptExperts]) -> Model:
    """Views of a loaded K3 text model (stock's `KimiLinearModel`). kept: the experts of each MoE layer, by its index.

    Raises LayoutError where something lies otherwise than the kernels read it.
    """
    config, made = stock.config, Prepared()
    hidden, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
    layers = tuple(_layer(layer, i, hidden, eps, block, kept.get(i), made) for i, layer in enumerate(stock.layers))
    final = _mix("output", stock.output_attn_res_norm, stock.output_attn_res_proj, stock.norm, hidden, eps, made)
    return Model(
        hidden=hidden,
        eps=eps,
        situ_beta=config.activation_situ_beta or 1.0,
        situ_linear_beta=config.activation_situ_linear_beta,
        layers=layers,
        final_mix=final,
        closed=-(-len(layers) // block),
        embed=stock.embed_input_ids,
        prepared=made,
    )


def _mix(where: str, norm: Any, proj: Any, following: Any, hidden: int, eps: float, made: Prepared) -> Mix:
    for module in (norm, following):
        if module.variance_epsilon != eps:
            raise LayoutError(f"{where}: expected one epsilon {eps} for all norms of AttnRes, found {module.variance_epsilon}")
    score = made(lambda: norm.weight.float() * proj.weight.float().flatten())
    return Mix(score, _need(f"{where}: norm", following.weight, torch.bfloat16, hidden))


def _layer(layer: Any, index: int, hidden: int, eps: float, block: int, kept: KeptExperts | None, made: Prepared) -> Layer:
    where, attention = f"layer {index}", layer.self_attn
    mixes = (
        _mix(where, layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm, hidden, eps, made),
        _mix(where, layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm, hidden, eps, made),
    )
    view = _kda if hasattr(attention, "in_proj_qkvgfab") else _mla
    return Layer(
        index=index,
        prev=-(-index // block),
        write=index // block if index % block == 0 else -1,
        attention_mix=mixes[0],
        attention=view(f"{where} attention", attention, hidden, made),
        mlp_mix=mixes[1],
        mlp=Dense(layer.mlp) if kept is None else _moe(f"{where} experts", layer.mlp, hidden, eps, kept),
    )


def _kda(where: str, attention: Any, hidden: int, made: Prepared) -> Kda:
    heads, bf16, f32 = attention.local_num_heads, torch.bfloat16, torch.float32
    inner = heads * HEAD
    conv = attention.conv1d.weight
    return Kda(
        name=attention.prefix,
        in_proj=_need(f"{where}: in-projection", attention.in_proj_qkvgfab.weight, bf16, -1, hidden),
        conv=_need(f"{where}: conv", conv.view(conv.shape[0], conv.shape[-1]), f32, 3 * inner, 4),
        f_b=_need(f"{where}: f_b", attention.f_b_proj.weight, bf16, inner, HEAD),
        a_log=_need(f"{where}: A_log", attention.A_log, f32, heads),
        dt_bias=_need(f"{where}: dt_bias", attention.dt_bias, f32, inner),
        out_norm=_need(f"{where}: output norm", attention.o_norm.weight, bf16, HEAD),
        o_proj=_need(f"{where}: o_proj", attention.o_proj.weight, bf16, hidden, inner),
        heads=heads,
        lower_bound=attention.gate_lower_bound,
        norm_eps=attention.o_norm.eps,
    )


def _mla(where: str, attention: Any, hidden: int, made: Prepared) -> Mla:
    heads, rank, bf16 = attention.num_local_heads, attention.q_lora_rank, torch.bfloat16
    sizes = (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank, attention.v_head_dim)
    if sizes != (NOPE, ROPE, LATENT, VALUE):
        raise LayoutError(f"{where}: expected nope, rope, latent and value sizes {(NOPE, ROPE, LATENT, VALUE)}, found {sizes}")

    def by_head(view: Callable[[], torch.Tensor], rows: int) -> torch.Tensor:
        """[h, rows, latent], rows dense: stock's own memory where it lies so, else a copy."""
        found = view().detach()
        if tuple(found.shape) != (heads, rows, LATENT) or found.dtype != bf16:
            raise LayoutError(f"{where}: expected bf16 {(heads, rows, LATENT)}, found {found.dtype} {tuple(found.shape)}")
        return found if found.stride()[1:] == (LATENT, 1) and found.stride(0) % 8 == 0 else made(view)

    return Mla(
        name=attention.layer_name,
        in_proj=_need(f"{where}: in-projection", attention.fused_qkv_a_g_proj.weight, bf16, -1, hidden),
        q_norm=_need(f"{where}: q norm", attention.q_a_layernorm.weight, bf16, rank),
        kv_norm=_need(f"{where}: kv norm", attention.kv_a_layernorm.weight, bf16, LATENT),
        q_b=_need(f"{where}: q_b", attention.q_b_proj.weight, bf16, heads * (NOPE + ROPE), rank),
        w_uk=by_head(lambda: attention.W_UK_T, NOPE),
        w_uv=by_head(lambda: attention.W_UV.transpose(1, 2), VALUE),
        o_proj=_need(f"{where}: o_proj", attention.o_proj.weight, bf16, hidden, heads * VALUE),
        heads=heads,
        norm_eps=attention.rms_norm_eps,
        scale=attention.scale,
    )


def _moe(where: str, moe: Any, hidden: int, eps: float, kept: KeptExperts) -> Moe:
    if kept.weights is None:
        raise LayoutError(f"{where}: expected them as the kernels read them, found none: {kept.problem}")
    if moe.shared_experts is None or moe.routed_expert_norm is None or moe.routed_expert_norm.variance_epsilon != eps:
        raise LayoutError(f"{where}: expected shared experts and a latent norm of epsilon {eps}, found another kind of MoE")
    bf16, experts = torch.bfloat16, moe.gate.weight.shape[0]
    latent = moe.routed_expert_down_proj.weight.shape[0]
    return Moe(
        router=_need(f"{where}: router", moe.gate.weight, bf16, experts, hidden),
        bias=_need(f"{where}: bias", moe.gate.e_score_correction_bias, torch.float32, experts),
        down=_need(f"{where}: latent down", moe.routed_expert_down_proj.weight, bf16, latent, hidden),
        gate_up=_need(f"{where}: shared gate_up", moe.shared_experts.gate_up_proj.weight, bf16, -1, hidden),
        experts=kept.weights,
        norm=_need(f"{where}: latent norm", moe.routed_expert_norm.weight, bf16, latent),
        up=_need(f"{where}: latent up", moe.routed_expert_up_proj.weight, bf16, hidden, latent),
        shared_down=_need(f"{where}: shared down", moe.shared_experts.down_proj.weight, bf16, hidden, -1),
        top_k=moe.experts.routed_experts.top_k,
        renormalise=moe.moe_renormalize,
        scaling=moe.routed_scaling_factor,
        stock_router=moe.experts.router,
    )


def attention_layers(model: Model) -> Sequence[Kda | Mla]:
    """Every layer that owns a cache, in order."""
    return [layer.attention for layer in model.layers]
