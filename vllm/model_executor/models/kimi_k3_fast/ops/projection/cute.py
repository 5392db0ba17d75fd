"""Device half of `projection`: y = a W^T for a few tokens."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..device.ptx import store_bf16, store_f32
from ..device.skinny import Rows, Smem, even_share
from ..device.streamed import make_block
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents
from ..skinny import Shape


@cute.kernel
def _project(w: Static, x: Dynamic, y: Output, shape: cutlass.Constexpr, store: cutlass.Constexpr):
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    rows = w.shape[0]
    first, last = even_share(rows, shape.tactic.groups, group)
    block = make_block(shape, rank, Rows(first, last), [w.early()], Smem(shape), exact=store is store_f32)
    token = dependency_wait()
    release_dependents()  # not before: see `KernelSpec.settles`
    block.stage(0, x.after(token))
    block.multiply(0)
    out = y.after(token)
    block.reduce(lambda t, row, value, inside: store(out.iterator + (t * rows + row), value(0), inside))


def bf16_skinny(config: Any, w: Static, x: Dynamic, y: Output, stream: object) -> None:
    shape: Shape = config.shape
    store = store_f32 if config.out == "f32" else store_bf16
    blocks = shape.tactic.groups * shape.tactic.splits
    _project(w, x, y, shape, store).launch(
        grid=[blocks, 1, 1],
        block=[shape.tactic.threads, 1, 1],
        cluster=[shape.tactic.splits, 1, 1] if shape.tactic.splits > 1 else None,
        min_blocks_per_mp=shape.tactic.resident,
        preferred_smem_carveout=100,  # one carve-out for all kernels of a step: a change would drain the SM
        stream=stream,
        use_pdl=True,
    )
