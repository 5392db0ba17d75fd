"""The smallest kernel with all that the build and the order checker deal with: a weight, an activation, an output, the wait."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from vllm.model_executor.models.kimi_k3_fast.ops.build import ACTIVATION, OUTPUT, STATIC, KernelSpec, Param
from vllm.model_executor.models.kimi_k3_fast.ops.order import Dynamic, Output, Static, dependency_wait, release_dependents


@dataclass(frozen=True)
class Config:
    rows: int = 8
    columns: int = 256


@cute.kernel
def _scale(w: Static, x: Dynamic, y: Output):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    weight = w.early()[thread].to(cutlass.Float32)
    token = dependency_wait()
    release_dependents()
    scaled = x.after(token)[row, thread].to(cutlass.Float32) * weight
    y.after(token)[row, thread] = scaled.to(cutlass.BFloat16)


def bf16_scale(config: Config, w: Static, x: Dynamic, y: Output, stream: object) -> None:
    _scale(w, x, y).launch(grid=[config.rows, 1, 1], block=[config.columns, 1, 1], stream=stream, use_pdl=True)


def spec(config: Config | None = None) -> KernelSpec:
    config = config or Config()
    shape = (config.rows, config.columns)
    params = (
        Param("w", "bf16", (config.columns,), STATIC),
        Param("x", "bf16", shape, ACTIVATION),
        Param("y", "bf16", shape, OUTPUT),
    )
    return KernelSpec("bf16_scale", "scale", config, bf16_scale, params)
