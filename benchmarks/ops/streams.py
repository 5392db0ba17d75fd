"""How fast bulk copies bring a matrix into shared memory, and nothing else: what the rings of `ops/device/ring.py` can reach.

A block an SM, 48 rows of 7168 bf16 each, as the in-projection of a TP8 rank. A stage is so many pieces of rows; who finds it
landed has it filled anew at once. Compared: bytes of a row that one copy takes, rows of a stage, stages.

    python benchmarks/ops/streams.py --json OUT [--compile ARCH]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ops.ahead import compile_all
from benchmarks.timing import Case, arguments, copies_for, main
from vllm.model_executor.models.kimi_k3_fast.ops import build
from vllm.model_executor.models.kimi_k3_fast.ops.build import OUTPUT, STATIC, KernelSpec, Param
from vllm.model_executor.models.kimi_k3_fast.ops.device.ptx import copy_bulk, evict_first
from vllm.model_executor.models.kimi_k3_fast.ops.order import Output, Static, dependency_wait, release_dependents

BLOCKS, ROWS, PITCH = 132, 48, 14336
ALONE = 120 * 1024  # bytes of shared memory of which an SM has no two


@dataclass(frozen=True)
class Config:
    """`piece`: bytes of a row in one copy. `rows` of a stage, which is as many pieces, one below the other."""

    piece: int
    rows: int
    stages: int

    @property
    def stage(self) -> int:
        return self.piece * self.rows

    @property
    def across(self) -> int:
        """Pieces of a row."""
        return PITCH // self.piece

    @property
    def chunks(self) -> int:
        """What fills a stage, of a block."""
        return self.across * (ROWS // self.rows)

    def __str__(self) -> str:
        return f"pieces of {self.piece} B, {self.rows} rows, {self.stages} stages"


CONFIGS = [
    *(Config(512, 48, stages) for stages in (6, 8)),
    *(Config(1024, rows, stages) for rows, stages in ((48, 2), (48, 3), (48, 4), (16, 9))),
    *(Config(1792, rows, stages) for rows, stages in ((48, 2), (24, 4))),
    *(Config(2048, 24, stages) for stages in (3, 4)),
    Config(3584, 12, 4),
    *(Config(14336, rows, stages) for rows, stages in ((3, 4), (1, 8))),
]


@cute.jit
def _fill(c: cutlass.Constexpr, base: Any, smem: Any, full: Any, chunk: Any, policy: Any):
    lane, _, _ = cute.arch.thread_idx()
    stage, rows, piece = chunk % c.stages, chunk // c.across, chunk % c.across
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, c.stage)
    cute.arch.sync_warp()
    for turn in cutlass.range_constexpr(-(-c.rows // 32)):
        row = turn * 32 + lane
        source = base + Int64(rows * c.rows + row) * Int64(PITCH) + Int64(piece * c.piece)
        target = smem.iterator + (stage * c.stage + row * c.piece)
        copy_bulk(target, source, Int32(c.piece), full + stage, row < c.rows, policy)


@cute.kernel
def _stream(w: Static, out: Output, c: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    smem = memory.allocate_tensor(cutlass.Uint8, cute.make_layout(max(c.stages * c.stage, ALONE)), byte_alignment=128)
    full = memory.allocate_array(Int64, c.stages, byte_alignment=8)
    if lane < c.stages:
        cute.arch.mbarrier_init(full + lane, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    base, policy = w.early().iterator.toint() + Int64(block) * Int64(ROWS * PITCH), evict_first()
    for chunk in cutlass.range(0, c.stages, unroll=1):
        _fill(c, base, smem, full, chunk, policy)
    release_dependents()
    token = dependency_wait()
    for chunk in cutlass.range(0, c.chunks, unroll=1):
        cute.arch.mbarrier_wait(full + chunk % c.stages, chunk // c.stages & 1)
        if chunk + c.stages < c.chunks:
            _fill(c, base, smem, full, chunk + c.stages, policy)
    landed = out.after(token)
    if lane == 0:
        landed[block] = Int32(c.chunks)


def stream(config: Any, w: Static, out: Output, stream: object) -> None:
    kernel = _stream(w, out, config)
    kernel.launch(grid=[BLOCKS, 1, 1], block=[32, 1, 1], preferred_smem_carveout=100, stream=stream, use_pdl=True)


def spec(config: Config) -> KernelSpec:
    params = (Param("w", "u8", (BLOCKS * ROWS, PITCH), STATIC), Param("out", "i32", (BLOCKS,), OUTPUT))
    return KernelSpec("streams", "streams", config, stream, params)


def cases() -> Iterator[Case]:
    moved = BLOCKS * ROWS * PITCH
    copies = copies_for(moved)
    w = [torch.randint(0, 255, (BLOCKS * ROWS, PITCH), dtype=torch.uint8, device="cuda") for _ in range(copies)]
    out = torch.zeros(BLOCKS, dtype=torch.int32, device="cuda")
    variants: dict[str, Callable[[int], object]] = {}
    for config in CONFIGS:
        kernel = build.get(spec(config), build.device_arch())
        variants[str(config)] = lambda i, kernel=kernel: kernel(w[i], out)
    yield Case({"rows": BLOCKS * ROWS, "row bytes": PITCH}, moved, variants, copies, str(Config(1024, 48, 3)))


if __name__ == "__main__":
    parser = arguments("streams")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for this architecture and stop; needs no GPU")
    options = parser.parse_args()
    compile_all(map(spec, CONFIGS), options.compile or build.device_arch())
    if not options.compile:
        main("streams", cases(), options)
