"""Small parts that every layer uses: RMSNorm, linear layers that keep their weights, and the dense MLP.

The linear layers are vLLM's parallel layers. Only their method is ours: on CPUs vLLM repacks an unquantised weight and drops the
original, but the fast path and the loader need the packed weight to stay where the model put it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from .activation import gated
from .config import MXFP4_FORMAT, K3Config

QUANTIZATION_NAME = "kimi_k3_experts"
ROW_ALIGNMENT = 16  # of a packed projection


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint tensor goes. `dest` is a view of a weight; it receives `tensor[start : start + dest.shape]`.

    `shapes` are the stored forms accepted for the name. A tensor in any form but the first is flattened, and cut to the first
    form's length (KDA's `A_log` is stored in three ways).
    """

    shapes: tuple[tuple[int, ...], ...]
    dest: torch.Tensor
    start: tuple[int, ...]

    @property
    def is_bytes(self) -> bool:
        return self.dest.dtype == torch.uint8


Slots = Iterator[tuple[str, Slot]]


def slot(dest: torch.Tensor, *, dim: int | None = None, full: int | None = None, start: int = 0) -> Slot:
    """A slot for a tensor of `dest`'s shape, except that dimension `dim` has `full` elements; this rank's begin at `start`."""
    shape, offset = list(dest.shape), [0] * dest.dim()
    if dim is not None and full is not None:
        shape[dim], offset[dim] = full, start
    return Slot((tuple(shape),), dest, tuple(offset))


def sharded(dest: torch.Tensor, dim: int = 0) -> Slot:
    """A slot whose dimension `dim` is split evenly over the tensor-parallel ranks."""
    local = dest.shape[dim]
    return slot(
        dest, dim=dim, full=local * get_tensor_model_parallel_world_size(), start=local * get_tensor_model_parallel_rank()
    )


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) w over the last dimension in fp32 (float64 stays), rounded once to `dtype` (default: x's)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return normed.to(x.dtype if dtype is None else dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mixture of AttnRes arrives in fp32; the result is always in the weight's dtype."""
        return rms_norm(x, self.weight, self.eps, self.weight.dtype)


class KeepWeightLinearMethod(UnquantizedLinearMethod):
    """vLLM's unquantised linear method, which leaves `weight` [out, in] as it was loaded; rows that only pad stay zero."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **named: Any) -> None:
        super().create_weights(layer, *sizes, **named)
        layer.weight.data.zero_()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is repacked."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class K3QuantConfig(QuantizationConfig):
    """vLLM's view of the released checkpoint's quantisation: linear layers plain, routed experts the model's own affair.

    vLLM's built-in configs for this format allow no fp32 activations, and their CPU experts need AMX.
    """

    def get_name(self) -> str:
        return QUANTIZATION_NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> K3QuantConfig:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return QUANTIZATION_NAME if hf_quant_cfg.get("format") == MXFP4_FORMAT else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return KeepWeightLinearMethod() if isinstance(layer, LinearBase) else None


KEEP_WEIGHTS = K3QuantConfig()


def register_quantization() -> None:
    """Let vLLM accept the released quantisation on a CPU. Only for platforms on which this model, not stock's, is served."""
    register_quantization_config(QUANTIZATION_NAME)(K3QuantConfig)


def packed_projection(config: K3Config, prefix: str, *sizes: int) -> tuple[MergedColumnParallelLinear, list[int]]:
    """One projection of a hidden state to parts of these sizes on this rank, and the sizes with that of the padding behind."""
    rows = [*sizes, -sum(sizes) % ROW_ALIGNMENT]
    whole = [size * get_tensor_model_parallel_world_size() for size in rows]
    return MergedColumnParallelLinear(config.hidden_size, whole, bias=False, quant_config=KEEP_WEIGHTS, prefix=prefix), rows


class MLP(nn.Module):
    """The dense MLP of layer 0 and of the shared experts: down(act(gate x, up x)), gate and up packed as [gate | up]."""

    def __init__(self, config: K3Config, intermediate_size: int, prefix: str) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            size, [width, width], bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(width, size, bias=False, quant_config=KEEP_WEIGHTS, prefix=f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(gated(self.config, gate_up))[0]

    def slots(self) -> Slots:
        gate, up = self.gate_up_proj.weight.chunk(2)
        yield "gate_proj.weight", sharded(gate)
        yield "up_proj.weight", sharded(up)
        yield "down_proj.weight", sharded(self.down_proj.weight, dim=1)
