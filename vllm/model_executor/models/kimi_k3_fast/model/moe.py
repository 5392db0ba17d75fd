"""Mixture of experts: sigmoid router with a correction bias, experts in a latent space, shared experts beside them.

MXFP4 experts stay packed in memory and are decoded one expert at a time when tokens are routed to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ReplicatedLinear

from . import mxfp4
from .activation import gated
from .config import K3Config
from .layers import KEEP_WEIGHTS, MLP, RMSNorm, Slots, parameter, slot

RENORMALIZE_EPS = 1e-20


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    renormalize: bool,
    scaling: float,
    imposed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E], bias [E] -> (experts int64 [T, k], weights [T, k]), best first.

    s = sigmoid(logits). The k largest of s + bias are chosen, equal ones by the lower expert id; the weights are s without bias.
    With `imposed` [T, k] those experts are taken.
    """
    score = torch.sigmoid(logits)
    order = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices
    experts = order[:, :k] if imposed is None else imposed
    return experts, shares(score, experts, renormalize, scaling)


def shares(score: torch.Tensor, experts: torch.Tensor, renormalize: bool, scaling: float) -> torch.Tensor:
    """Weights [T, k] of the experts int64 [T, k] by their scores without bias [T, E]."""
    weights = score.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + RENORMALIZE_EPS)
    return weights * scaling


class Judged(NamedTuple):
    """Selection scores s + bias, [T, k] each: of the experts that were imposed, in their order, and of the k best, sorted."""

    imposed: torch.Tensor
    best: torch.Tensor

    @property
    def taken(self) -> torch.Tensor:
        """The imposed experts' scores as `best` has its own: equal where the choices are."""
        return self.imposed.sort(dim=-1, descending=True).values

    def moved(self, noisy: Judged) -> torch.Tensor:
        """`best`, changed as far as noise moves scores: those of the imposed experts or the sorted ones, whichever go further.
        Sorting hides how far a single expert's went, and of the imposed ones none need be the one that noise has raised."""
        by_expert, by_place = ((n - s).nan_to_num(0.0, 0.0, 0.0) for n, s in zip(noisy, self, strict=True))
        further = by_expert.norm(dim=-1, keepdim=True) > by_place.norm(dim=-1, keepdim=True)
        return self.best + torch.where(further, by_expert, by_place)


def judge(logits: torch.Tensor, bias: torch.Tensor, chosen: torch.Tensor) -> Judged:
    """The scores that a choice of experts is judged by. chosen: int64 [T, k]."""
    score = torch.sigmoid(logits) + bias
    return Judged(score.gather(-1, chosen), score.topk(chosen.shape[-1], dim=-1).values)


class Experts(nn.Module):
    """The routed experts of one layer, this rank's slice of every expert: `w13` [E, 2 i, L] as [gate | up], `w2` [E, L, i].

    MXFP4: `w13` uint8 [E, 2 i, L / 2] with `w13_scale` [E, 2 i, L / 32], `w2` uint8 [E, L, i / 2] with `w2_scale` [E, L, i / 32].
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.local_width = config.moe_intermediate_size // get_tensor_model_parallel_world_size()
        e, size, width = config.num_experts, config.expert_input_size, self.local_width
        if config.mxfp4_experts:
            self.w13 = parameter(e, 2 * width, size // 2, dtype=torch.uint8)
            self.w13_scale = parameter(e, 2 * width, size // mxfp4.GROUP, dtype=torch.uint8)
            self.w2 = parameter(e, size, width // 2, dtype=torch.uint8)
            self.w2_scale = parameter(e, size, width // mxfp4.GROUP, dtype=torch.uint8)
        else:
            self.w13 = parameter(e, 2 * width, size)
            self.w2 = parameter(e, size, width)

    def weights(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's (w13 [2 i, L], w2 [L, i]) in `dtype`."""
        if not self.config.mxfp4_experts:
            return self.w13[expert], self.w2[expert]
        w13 = mxfp4.decode(self.w13[expert], self.w13_scale[expert], dtype)
        return w13, mxfp4.decode(self.w2[expert], self.w2_scale[expert], dtype)

    def forward(self, z: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """z [T, L], experts [T, k], weights fp32 [T, k] -> this rank's part of sum_e w_e y_e, fp32 [T, L], e ascending."""
        out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
        for expert in experts.unique().tolist():
            token, place = (experts == expert).nonzero(as_tuple=True)
            w13, w2 = self.weights(expert, z.dtype)
            y = F.linear(gated(self.config, F.linear(z[token], w13)), w2)
            out.index_add_(0, token, y.float() * weights[token, place].unsqueeze(-1))
        return out

    def slots(self) -> Slots:
        full, start = self.config.moe_intermediate_size, self.local_width * get_tensor_model_parallel_rank()
        for e in range(self.w13.shape[0]):
            if not self.config.mxfp4_experts:
                gate, up = self.w13[e].chunk(2)
                yield f"{e}.w1.weight", slot(gate, dim=0, full=full, start=start)
                yield f"{e}.w3.weight", slot(up, dim=0, full=full, start=start)
                yield f"{e}.w2.weight", slot(self.w2[e], dim=1, full=full, start=start)
                continue
            parts = (("weight_packed", self.w13, self.w2, 2), ("weight_scale", self.w13_scale, self.w2_scale, mxfp4.GROUP))
            for kind, w13, w2, per_byte in parts:
                gate, up = w13[e].chunk(2)
                yield f"{e}.w1.{kind}", slot(gate, dim=0, full=full, start=start)
                yield f"{e}.w3.{kind}", slot(up, dim=0, full=full, start=start)
                yield f"{e}.w2.{kind}", slot(w2[e], dim=1, full=full // per_byte, start=start // per_byte)


class SparseMoE(nn.Module):
    """out = up(norm(sum_e w_e expert_e(down m))) + shared(m); without a latent size, down, norm and up are absent."""

    def __init__(self, config: K3Config, prefix: str) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        size = config.hidden_size
        self.gate_weight = parameter(config.num_experts, size)
        self.correction_bias = parameter(config.num_experts, dtype=torch.float32)
        self.experts = Experts(config)
        self.imposed: torch.Tensor | None = None
        self.judged: Judged | None = None
        self.shared_experts = (
            MLP(config, config.shared_intermediate_size, f"{prefix}.shared_experts") if config.num_shared_experts else None
        )
        self.down_proj: ReplicatedLinear | None = None
        self.up_proj: ReplicatedLinear | None = None
        self.latent_norm: RMSNorm | None = None
        if config.latent_size is not None:
            latent = config.latent_size
            self.down_proj = ReplicatedLinear(size, latent, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.down_proj")
            self.up_proj = ReplicatedLinear(latent, size, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.up_proj")
            if config.latent_norm:
                self.latent_norm = RMSNorm(latent, config.rms_norm_eps)

    def forward(self, m: torch.Tensor) -> torch.Tensor:
        """m [T, D] -> [T, D]. The router works in fp32 on the weights as stored."""
        c = self.config
        logits = F.linear(m.float(), self.gate_weight.float())
        experts, weights = route(
            logits, self.correction_bias, c.experts_per_token, c.renormalize, c.routed_scaling_factor, self.imposed
        )
        if self.imposed is not None:
            self.judged = judge(logits, self.correction_bias, self.imposed)
        z = m if self.down_proj is None else self.down_proj(m)[0]
        r = self.experts(z, experts, weights).to(m.dtype)
        if get_tensor_model_parallel_world_size() > 1:
            r = tensor_model_parallel_all_reduce(r)
        if self.latent_norm is not None:
            r = self.latent_norm(r)
        if self.up_proj is not None:
            r, _ = self.up_proj(r)
        return r if self.shared_experts is None else r + self.shared_experts(m)

    def slots(self) -> Slots:
        yield "gate.weight", slot(self.gate_weight)
        yield "gate.e_score_correction_bias", slot(self.correction_bias)
        if self.down_proj is not None and self.up_proj is not None:
            yield "routed_expert_down_proj.weight", slot(self.down_proj.weight)
            yield "routed_expert_up_proj.weight", slot(self.up_proj.weight)
        if self.latent_norm is not None:
            yield "routed_expert_norm.weight", slot(self.latent_norm.weight)
        for name, target in self.experts.slots():
            yield f"experts.{name}", target
        if self.shared_experts is not None:
            for name, target in self.shared_experts.slots():
                yield f"shared_experts.{name}", target


@contextmanager
def imposed(layers: Mapping[str, SparseMoE], choices: Sequence[torch.Tensor]) -> Iterator[dict[str, Judged]]:
    """While this lasts, every layer takes the experts that another path chose for the same tokens, [T, k] each in order.

    Rounding decides between experts of nearly equal score; either choice is right, but what follows differs by a whole expert.
    Two paths can be compared only behind the same choices, and the choices by their scores, which the dictionary holds at the
    end, by the layer's name.
    Raises ValueError unless there is one choice for each layer.
    """
    if len(choices) != len(layers):
        raise ValueError(f"expected the chosen experts of {len(layers)} layers, found {len(choices)}: the path must record all")
    judged: dict[str, Judged] = {}
    for layer, choice in zip(layers.values(), choices, strict=True):
        layer.imposed = choice
    try:
        yield judged
        for name, layer in layers.items():
            assert layer.judged is not None
            judged[name] = layer.judged
    finally:
        for layer in layers.values():
            layer.imposed = layer.judged = None
