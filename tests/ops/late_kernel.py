"""A producer as bad as one can be under programmatic dependent launch: it lets the next kernel start at once, spins, writes last.

A kernel that reads an activation before its dependency wait finds what was in the buffer before. A copy of torch's would not show
it: it lets nothing start early. `settle` then is all that may stand between such a producer and who reads its output early.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch

from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.build import ACTIVATION, OUTPUT, KernelSpec, Param
from vllm.model_executor.models.kimi_k3_fast.ops.order import Dynamic, Output, dependency_wait, release_dependents

THREADS = 128


@dataclass(frozen=True)
class Config:
    words: int  # of 4 bytes
    late_ns: int = 100_000
    settles: bool = False


@cute.kernel
def _late(source: Dynamic, target: Output, words: int, late_ns: int, settles: cutlass.Constexpr):
    if cutlass.const_expr(not settles):
        release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = dependency_wait()
    if cutlass.const_expr(settles):
        release_dependents()
    start = cute.arch.globaltimer()
    while cute.arch.globaltimer() - start < late_ns:
        pass
    index = block * THREADS + thread
    read, written = source.after(token), target.after(token)
    if index < words:
        written[index] = read[index]


def late_copy(config: Config, source: Dynamic, target: Output, stream: object) -> None:
    grid = [-(-config.words // THREADS), 1, 1]
    kernel = _late(source, target, config.words, config.late_ns, config.settles)
    kernel.launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True)


def spec(words: int, settles: bool = False) -> KernelSpec:
    params = (Param("source", "i32", (words,), ACTIVATION, align=4), Param("target", "i32", (words,), OUTPUT, align=4))
    return KernelSpec("late_copy", "late", Config(words, settles=settles), late_copy, params, settles)


def write_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """target <- source, 100 us late; the next kernel of the stream may have started long before. Contiguous, of 4 n bytes."""
    flat = [tensor.view(-1).view(torch.int32) for tensor in (source, target)]
    build.get(spec(flat[0].numel()), build.device_arch())(*flat)


def settle(target: torch.Tensor) -> None:
    """A kernel between a producer and who may read its output early: it lets the next one start behind its own wait, runs on for
    100 us, and writes the one word of `target` over itself. No launch of torch's: that would settle, too."""
    build.get(spec(1, settles=True), build.device_arch())(target, target)
