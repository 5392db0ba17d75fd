"""Device half of `oproj`. What goes to other ranks is `ops/device/reduction.py`'s."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from ..device.exchange import Post
from ..device.reduction import Item, Outbox, Reduction, Target
from ..device.skinny import Rows, Smem, even_share
from ..device.streamed import make_block
from ..order import Dynamic, Ordered, Static, dependency_wait, release_dependents


def _target(config: Any, prefix: Dynamic, ready: Ordered) -> Target:
    return Target(prefix.after(ready), add=config.update == "add")


def _project(config: Any, w: Static, x: Dynamic, emit_with: Any) -> None:
    """The matmul. `emit_with(token, group, first)` runs behind the dependency wait and returns what takes the outputs."""
    shape = config.shape
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    first, last = even_share(config.rows, shape.tactic.groups, group, config.whole)
    block = make_block(shape, rank, Rows(first, last), [w.early()], Smem(shape))
    token = dependency_wait()
    release_dependents()  # not before: see `KernelSpec.settles`
    emit = emit_with(token, group, first)
    block.stage(0, x.after(token))
    block.multiply(0)
    block.reduce(emit)


@cute.kernel
def _alone(w: Static, x: Dynamic, prefix: Dynamic, config: cutlass.Constexpr):
    def emit_with(ready: Ordered, group: Any, first: Any) -> Any:
        target = _target(config, prefix, ready)

        def emit(token: Any, row: Any, value: Any, inside: Any) -> None:
            target.put(Item(token, row, None, inside, None, target.read(token, row)), value(0))

        return emit

    _project(config, w, x, emit_with)


@cute.kernel
def _reduced(
    w: Static,
    x: Dynamic,
    prefix: Dynamic,
    post: tuple[Any, ...],
    config: cutlass.Constexpr,
):
    """post: the fields of its `Post`."""
    reductions: list[Reduction] = []

    def emit_with(ready: Ordered, group: Any, first: Any) -> Any:
        target = _target(config, prefix, ready)
        reductions.append(Reduction(config, ready, target, Post(*post), group, first))
        return reductions[0].emit

    _project(config, w, x, emit_with)
    reductions[0].finish()


@cute.kernel
def _posted(w: Static, x: Dynamic, post: tuple[Any, ...], config: cutlass.Constexpr):
    """post: the fields of its `Post`."""
    outboxes: list[Outbox] = []

    def emit_with(ready: Ordered, group: Any, first: Any) -> Any:
        outboxes.append(Outbox(config, ready, Post(*post)))
        return outboxes[0].emit

    _project(config, w, x, emit_with)
    outboxes[0].finish()


def _launch(kernel: Any, config: Any, stream: object) -> None:
    tactic = config.shape.tactic
    kernel.launch(
        grid=[tactic.groups * tactic.splits, 1, 1],
        block=[tactic.threads, 1, 1],
        cluster=[tactic.splits, 1, 1] if tactic.splits > 1 else None,
        preferred_smem_carveout=100,  # one carve-out for all kernels of a step: a change would drain the SM
        stream=stream,
        use_pdl=True,
    )


def bf16_oproj(config: Any, w: Static, x: Dynamic, prefix: Dynamic, stream: object) -> None:
    _launch(_alone(w, x, prefix, config), config, stream)


def bf16_oproj_reduced(config: Any, w: Static, x: Dynamic, prefix: Dynamic, *args: Any) -> None:
    *post, stream = args
    _launch(_reduced(w, x, prefix, tuple(post), config), config, stream)


def bf16_oproj_posted(config: Any, w: Static, x: Dynamic, *args: Any) -> None:
    *post, stream = args
    _launch(_posted(w, x, tuple(post), config), config, stream)
