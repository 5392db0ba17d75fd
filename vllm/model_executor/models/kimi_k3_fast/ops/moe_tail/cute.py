"""Device half of `moe_tail`: the latent norm, the up-projection and the shared experts' down-projection as one matmul along K."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..device.ptx import store_bf16
from ..device.skinny import Rows, Smem, even_share
from ..device.streamed import make_block
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents


@cute.kernel
def _tail(up: Static, down: Static, norm: Static, r: Dynamic, hidden: Dynamic, delta: Output, config: cutlass.Constexpr):
    shape = config.shape
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    first, last = even_share(config.rows, shape.tactic.groups, group)
    block = make_block(shape, rank, Rows(first, last), [up.early(), down.early()], Smem(shape), norm=norm.early())
    weight = block.norm_words(0, norm.early())
    release_dependents()
    token = dependency_wait()
    block.stage(1, hidden.after(token))
    block.stage_normalised(0, r.after(token), weight)
    block.multiply(0, staged=True)
    block.scale(block.inverse_rms(config.eps, config.latent))
    block.multiply(1)
    out = delta.after(token)
    block.reduce(lambda t, row, value, inside: store_bf16(out.iterator + (t * config.rows + row), value(0), inside))


def bf16_norm_skinny(
    config: Any, up: Static, down: Static, norm: Static, r: Dynamic, hidden: Dynamic, delta: Output, stream: object
) -> None:
    tactic = config.shape.tactic
    _tail(up, down, norm, r, hidden, delta, config).launch(
        grid=[tactic.groups * tactic.splits, 1, 1],
        block=[tactic.threads, 1, 1],
        cluster=[tactic.splits, 1, 1] if tactic.splits > 1 else None,
        min_blocks_per_mp=tactic.resident,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
