"""Device half of `moe_tail`: the latent norm, the up-projection and the shared experts' down-projection as one matmul along K.
The sum over ranks is `ops/device/reduction.py`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..device.exchange import Post
from ..device.ptx import store_bf16
from ..device.reduction import Outbox, Reduction, Target
from ..device.skinny import Block, Rows, Smem, even_share
from ..device.streamed import make_block
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents


def _multiply(block: Block, config: Any, weight: Any, r: Any, hidden: Any) -> None:
    """Both products. weight: as `Block.norm_words` gives it, None where r is normalised already."""
    if weight is None:
        block.stage(0, r)
        block.stage(1, hidden)
        block.multiply(0, pending=1)
    else:
        block.stage(1, hidden)
        block.stage_normalised(0, r, weight)
        block.multiply(0, staged=True)
        block.scale(block.inverse_rms(config.eps, config.latent))
    block.multiply(1)


@cute.kernel
def _tail(
    up: Static,
    down: Static,
    norms: tuple[Static, ...],
    r: Dynamic,
    hidden: Dynamic,
    deltas: tuple[Output, ...],
    post: tuple[Any, ...],
    config: cutlass.Constexpr,
):
    """norms: the norm's weight, or nothing. deltas: the sum, or nothing where it is the next launch's. post: of one of several
    ranks the fields of its `Post`, or nothing."""
    shape = config.shape
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    first, last = even_share(config.rows, shape.tactic.groups, group, config.whole)
    norm = None if config.normed else norms[0].early()
    block = make_block(shape, rank, Rows(first, last), [up.early(), down.early()], Smem(shape), norm=norm)
    weight = None if config.normed else block.norm_words(0, norm)
    token = dependency_wait()
    release_dependents()  # not before: see `KernelSpec.settles`
    if cutlass.const_expr(config.world > 1):
        if cutlass.const_expr(config.posts):
            sums = Outbox(config, token, Post(*post))
        else:
            sums = Reduction(config, token, Target(deltas[0].after(token)), Post(*post), group, first)
        _multiply(block, config, weight, r.after(token), hidden.after(token))
        block.reduce(sums.emit)
        sums.finish()
    else:
        out = deltas[0].after(token)
        _multiply(block, config, weight, r.after(token), hidden.after(token))
        block.reduce(lambda t, row, value, inside: store_bf16(out.iterator + (t * config.rows + row), value(0), inside))


def bf16_tail(config: Any, up: Static, down: Static, *args: Any) -> None:
    norms, rest = ((), args) if config.normed else (args[:1], args[1:])
    r, hidden, *rest, stream = rest
    deltas, post = ((), rest) if config.posts else (rest[:1], rest[1:])
    tactic = config.shape.tactic
    _tail(up, down, norms, r, hidden, tuple(deltas), tuple(post), config).launch(
        grid=[tactic.groups * tactic.splits, 1, 1],
        block=[tactic.threads, 1, 1],
        cluster=[tactic.splits, 1, 1] if tactic.splits > 1 else None,
        min_blocks_per_mp=tactic.resident,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
