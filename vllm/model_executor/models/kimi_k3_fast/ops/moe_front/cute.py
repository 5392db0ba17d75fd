"""Device half of `moe_front`: the three matrices that read the MoE input. The choice of experts is in topk.py."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from ..device.ptx import sigmoid, store_bf16, store_f32
from ..device.ring import select_tensor
from ..device.skinny import Rows, Smem, even_share
from ..device.streamed import make_block
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents


def situ(gate: Any, up: Any, beta: float, linear_beta: float | None) -> Any:
    """b tanh(g / b) sigmoid(g) * (lb tanh(u / lb), or u without lb), fp32."""
    bounded = up if linear_beta is None else Float32(linear_beta) * cute.math.tanh(up / Float32(linear_beta))
    return Float32(beta) * cute.math.tanh(gate / Float32(beta)) * sigmoid(gate) * bounded


def emit_logit(config: Any, pointer: Any, value: Any, inside: Any) -> None:
    store_f32(pointer, value(0), inside)


def emit_latent(config: Any, pointer: Any, value: Any, inside: Any) -> None:
    store_bf16(pointer, value(0), inside)


def emit_hidden(config: Any, pointer: Any, value: Any, inside: Any) -> None:
    store_bf16(pointer, situ(value(0), value(1), config.beta, config.linear_beta), inside)


def segment(config: Any, which: int, weight: Static, x: Dynamic, out: Output, smem: Smem, group: Any, rank: Any) -> None:
    """One group's rows of matrix `which`, from the first load to the last store."""
    rows = out.shape[1]
    first, last = even_share(rows, config.groups[which], group)
    pair = rows if which == 2 else 0
    block = make_block(config.shape, rank, Rows(first, last, pair), [weight.early()], smem, exact=which == 0)
    release_dependents()
    token = dependency_wait()
    block.stage(0, x.after(token))
    block.multiply(0)
    target, emit = out.after(token).iterator, (emit_logit, emit_latent, emit_hidden)[which]
    block.reduce(lambda t, row, value, inside: emit(config, target + (t * rows + row), value, inside))


@cute.kernel
def _front(
    router: Static,
    down: Static,
    gate_up: Static,
    x: Dynamic,
    logits: Output,
    z: Output,
    hidden: Output,
    config: cutlass.Constexpr,
):
    shape = config.shape
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    smem = Smem(shape)
    to_down, to_shared = config.groups[0], config.groups[0] + config.groups[1]
    if group < to_down:
        segment(config, 0, router, x, logits, smem, group, rank)
    elif group < to_shared:
        segment(config, 1, down, x, z, smem, group - to_down, rank)
    else:
        segment(config, 2, gate_up, x, hidden, smem, group - to_shared, rank)


@cute.kernel
def _front_ring(
    router: Static,
    down: Static,
    gate_up: Static,
    x: Dynamic,
    logits: Output,
    z: Output,
    hidden: Output,
    config: cutlass.Constexpr,
):
    """As `_front`, one path for all three matrices: only addresses and the last step differ, so the code is read once."""
    shape, (to_router, to_down, _), (experts, latent, both) = config.shape, config.groups, config.rows
    index, _, _ = cute.arch.block_idx()
    group, rank = index // shape.tactic.splits, index % shape.tactic.splits
    is_router, is_shared = group < to_router, group >= to_router + to_down

    def among(of_router: Any, of_down: Any, of_shared: Any) -> Int32:
        return Int32(select_(is_router, Int32(of_router), Int32(select_(is_shared, Int32(of_shared), Int32(of_down)))))

    rows = (experts, latent, both // 2)
    starts = (0, to_router, to_router + to_down)
    shares = [even_share(r, g, group - start) for r, g, start in zip(rows, config.groups, starts, strict=True)]
    share = Rows(among(*(s[0] for s in shares)), among(*(s[1] for s in shares)), among(0, 0, both // 2))
    weight = select_tensor([is_router, is_shared], [router.early(), gate_up.early(), down.early()])
    block = make_block(shape, rank, share, [weight], Smem(shape), exact=True)
    release_dependents()
    token = dependency_wait()
    block.stage(0, x.after(token))
    block.multiply(0)
    targets = [t.after(token).iterator for t in (logits, z, hidden)]
    width = among(*rows)
    block.reduce(
        lambda t, row, value, inside: emit_any(config, targets, is_router, is_shared, t * width + row, value(0), value(1), inside)
    )


@cute.jit
def emit_any(config: cutlass.Constexpr, targets: Any, is_router: Any, is_shared: Any, at: Any, own: Any, other: Any, inside: Any):
    if is_router:
        store_f32(targets[0] + at, own, inside)
    elif is_shared:
        store_bf16(targets[2] + at, situ(own, other, config.beta, config.linear_beta), inside)
    else:
        store_bf16(targets[1] + at, own, inside)


def bf16_front_skinny(
    config: Any,
    router: Static,
    down: Static,
    gate_up: Static,
    x: Dynamic,
    logits: Output,
    z: Output,
    hidden: Output,
    stream: object,
) -> None:
    tactic = config.shape.tactic
    kernel = _front_ring if tactic.chunk else _front
    kernel(router, down, gate_up, x, logits, z, hidden, config).launch(
        grid=[sum(config.groups) * tactic.splits, 1, 1],
        block=[tactic.threads, 1, 1],
        cluster=[tactic.splits, 1, 1] if tactic.splits > 1 else None,
        min_blocks_per_mp=tactic.resident,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
