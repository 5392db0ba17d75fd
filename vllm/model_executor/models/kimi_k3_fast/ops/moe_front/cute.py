"""Device half of `moe_front`: the three matrices that read the MoE input, and the choice of experts."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.ptx import sigmoid, store_bf16, store_f32, warp_max_u32, warp_min_u32
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
    _front(router, down, gate_up, x, logits, z, hidden, config).launch(
        grid=[sum(config.groups) * tactic.splits, 1, 1],
        block=[tactic.threads, 1, 1],
        cluster=[tactic.splits, 1, 1] if tactic.splits > 1 else None,
        min_blocks_per_mp=tactic.resident,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )


@cute.kernel
def _topk(
    bias: Static,
    logits: Dynamic,
    num_tokens: Dynamic,
    ids: Output,
    weights: Output,
    groups: Any,
    config: cutlass.Constexpr,
):
    """One block for a token, one thread for an expert.

    The least of the first k warps' maxima is a bound that at least k experts reach; those that do (about a tenth) are listed,
    and an expert's place is the number of listed ones before it. The order is total (score, then lower id), so places are
    distinct and ties settled. The block that finishes last groups all tokens' choices.
    """
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    lane, warp, experts, k = thread % 32, thread // 32, config.experts, config.top_k
    expert = cutlass.min(thread, experts - 1)
    allocator = SmemAllocator()
    scores = allocator.allocate_tensor(Float32, cute.make_layout(experts), byte_alignment=16)
    listed = allocator.allocate_tensor(Uint64, cute.make_layout(experts), byte_alignment=16)
    maxima = allocator.allocate_tensor(Uint32, cute.make_layout(32), byte_alignment=16)
    chosen = allocator.allocate_tensor(Float32, cute.make_layout(32), byte_alignment=16)
    count = allocator.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
    offset = bias.early()[expert]
    if thread == 0:
        count[0] = Int32(0)
    release_dependents()

    token = dependency_wait()
    live = row < num_tokens.after(token)[0]
    score = sigmoid(logits.after(token)[row, expert])
    key = sortable(score + offset)
    if thread >= experts:
        key = Uint32(0)
    scores[expert] = score
    maxima[warp] = warp_max_u32(key)
    cute.arch.sync_threads()

    bound = Uint32(0)
    if cutlass.const_expr(experts >= 32 * k):
        bound = warp_min_u32(maxima[cutlass.min(lane, k - 1)])
    reaches = (key >= bound) & (thread < experts)
    mask = cute.arch.vote_ballot_sync(reaches)
    base = Int32(0)
    if lane == 0:
        base = cute.arch.atomic_add(count.iterator, cute.arch.popc(mask), sem="relaxed", scope="cta")
    base = cute.arch.shuffle_sync(base, 0)
    if reaches:
        listed[base + popcount_below(mask, lane)] = (Uint64(key) << Uint64(32)) | Uint64(Uint32(0xFFFFFFFF) - Uint32(thread))
    cute.arch.sync_threads()

    candidates = count[0]
    out_ids = ids.after(token)
    if thread < candidates:
        mine, place = listed[thread], Int32(0)
        for other in cutlass.range(candidates, unroll=4):
            place = place + Int32(listed[other] > mine)
        if place < k:
            chosen_expert = Int32(Uint32(0xFFFFFFFF) - Uint32(mine & Uint64(0xFFFFFFFF)))
            out_ids[row, place] = Int32(select_(live, chosen_expert, Int32(0)))
            chosen[place] = scores[chosen_expert]
    cute.arch.sync_threads()

    out_weights = weights.after(token)
    if warp == 0:
        value = chosen[cutlass.min(lane, k - 1)]
        if lane >= k:
            value = Float32(0.0)
        if cutlass.const_expr(config.renormalise):
            value = value / (cute.arch.warp_reduction_sum(value) + Float32(1e-20))
        if lane < k:
            out_weights[row, lane] = Float32(select_(live, value * Float32(config.scaling), Float32(0.0)))

    if cutlass.const_expr(config.grouped):
        offsets, pairs, active, num_active, arrived = (tensor.after(token) for tensor in groups)
        if thread == 0:  # behind the barrier above, so this block's ids are written: the count publishes them
            before = cute.arch.atomic_add(arrived.iterator, Int32(1), sem="acq_rel", scope="gpu")
            count[1] = Int32(before == config.tokens - 1)
        cute.arch.sync_threads()
        if count[1] != 0:
            if thread == 0:
                arrived[0] = Int32(0)  # for the next launch
            buffers = (out_ids, offsets, pairs, active, num_active)
            group_pairs(config, buffers, num_tokens.after(token)[0], recast(listed, Uint32), recast(scores, Int32), maxima)


def recast(tensor: Any, dtype: Any) -> Any:
    """A tensor of shared memory as a flat one of another type."""
    count = cute.size(tensor) * tensor.element_type.width // dtype.width
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=dtype), cute.make_layout(count))


def popcount_below(mask: Any, lane: Any) -> Any:
    """Set bits of a 32-bit mask below bit `lane`."""
    return cute.arch.popc(Uint32(mask) & ((Uint32(1) << Uint32(lane)) - Uint32(1)))


def lanes_before(value: Any, lane: Any) -> Any:
    """Sum of `value` over this lane and those below it in the warp."""
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, offset=distance, mask_and_clamp=0)
        value = value + Int32(select_(lane >= distance, below, Int32(0)))
    return value


@cute.jit
def group_pairs(config: cutlass.Constexpr, buffers: Any, live_tokens: Int32, masks: Any, starts: Any, totals: Any):
    """List all tokens' (token, slot) pairs by expert; one thread for an expert, then one for a pair.

    A token chooses an expert at most once, so 64 bits say which tokens chose it: their number is the expert's share of the list,
    and the bits below a token's its place in the share. `masks` [2 E], `starts` [E], `totals` [32]: scratch in shared memory.
    """
    ids, offsets, pairs, active, num_active = buffers
    thread, _, _ = cute.arch.thread_idx()
    lane, warp, experts, k = thread % 32, thread // 32, config.experts, config.top_k
    threads = cutlass.const_expr(-(-experts // 32) * 32)
    warps = cutlass.const_expr(threads // 32)
    for half in cutlass.range_constexpr(2):
        masks[cutlass.min(thread, experts - 1) * 2 + half] = Uint32(0)
    cute.arch.sync_threads()
    for start in cutlass.range_constexpr(0, config.tokens * k, threads):
        pair = thread + start
        if pair < live_tokens * k:
            load = "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];"  # other blocks wrote it during this launch
            expert = inline_ptx(load, write_only_types=[Int32], read_only_args=[ids.iterator + pair])
            chosen_by = pair // k
            word = masks.iterator + (expert * 2 + chosen_by // 32)
            inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[word, Uint32(1) << Uint32(chosen_by % 32)])
    cute.arch.sync_threads()
    own = Int32(0)
    if thread < experts:
        own = cute.arch.popc(masks[thread * 2]) + cute.arch.popc(masks[thread * 2 + 1])
    # Both sums of an expert in one number: pairs above, active experts below.
    packed = own * 65536 + Int32(own > 0)
    upto = lanes_before(packed, lane)
    if lane == 31:
        totals[warp] = Uint32(upto)
    cute.arch.sync_threads()
    earlier = Int32(0)
    whole = Int32(0)
    for w in cutlass.range_constexpr(warps):
        whole = whole + Int32(totals[w])
        earlier = earlier + Int32(select_(w < warp, Int32(totals[w]), Int32(0)))
    start_of_own = earlier + upto - packed
    if thread < experts:
        offsets[thread] = start_of_own // 65536
        starts[thread] = start_of_own // 65536
        if own > 0:
            active[start_of_own % 65536] = thread
    if thread == 0:
        offsets[experts] = whole // 65536
        num_active[0] = whole % 65536
    cute.arch.sync_threads()
    for start in cutlass.range_constexpr(0, config.tokens * k, threads):
        pair = thread + start
        if pair < live_tokens * k:
            load = "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];"
            expert = inline_ptx(load, write_only_types=[Int32], read_only_args=[ids.iterator + pair])
            chosen_by = pair // k
            below = popcount_below(masks[expert * 2 + chosen_by // 32], chosen_by % 32)
            if chosen_by >= 32:
                below = below + cute.arch.popc(masks[expert * 2])
            pairs[starts[expert] + below] = pair


def sortable(value: Any) -> Any:
    """Unsigned number that orders as the fp32 value does."""
    bits = value.bitcast(Uint32)
    return Uint32(select_(bits >= Uint32(0x80000000), ~bits, bits | Uint32(0x80000000)))


def topk(
    config: Any, bias: Static, logits: Dynamic, num_tokens: Dynamic, ids: Output, weights: Output, *groups_and_stream: Any
) -> None:
    *groups, stream = groups_and_stream
    threads = -(-config.experts // 32) * 32
    _topk(bias, logits, num_tokens, ids, weights, tuple(groups), config).launch(
        grid=[config.tokens, 1, 1], block=[threads, 1, 1], preferred_smem_carveout=100, stream=stream, use_pdl=True
    )
