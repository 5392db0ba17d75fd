"""Device half of the choice of experts: the ranks' shares put together, sigmoid scores, the k largest of score + bias, their
weights, and pairs by expert.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..device.exchange import Exchange, Post
from ..device.ptx import opaque, sigmoid, store_word, warp_max_u32
from ..order import Dynamic, Ordered, Output, Static, dependency_wait, release_dependents

COUNTERS = 16  # lanes that share the count for one candidate


class Gathering:
    """A token's logits and latent z, of which every rank has a share, as one thread sees them. A word is a logit, or two columns
    of z; a sender's words lie in its mailbox as in its own tensors, those of z behind those of the logits.
    """

    def __init__(self, config: Any, row: Any, token: Ordered, logits: Dynamic, gather: Any) -> None:
        z_own, z, *post = gather
        self.config, self.row = config, row
        self.exchange = Exchange(config.world, config.bound_ns, token, Post(*post))
        self.rank = self.exchange.post.rank
        self.logits, self.z_own, self.z = (recast(tensor.after(token), Uint32) for tensor in (logits, z_own, z))
        self.share, self.z_share = config.shares
        self.behind = config.tokens * self.share

    def send(self) -> None:
        """All words of this rank to all others."""
        words = []
        for own, share, behind in ((self.logits, self.share, 0), (self.z_own, self.z_share, self.behind)):
            for peer, i, inside in self._others(share):
                at = self.row * share + i
                words.append((self.exchange.box_of(peer), behind + at, own[at], inside))
        for word in words:  # all loads are on their way
            self.exchange.send(*word)

    def logit(self, expert: Any) -> Float32:
        """Of any expert."""
        owner, at = expert // self.share, self.row * self.share + expert % self.share
        own = self.logits[at]
        (word,) = self.exchange.receive([owner], at, owner != self.rank)
        return Uint32(select_(owner == self.rank, own, word)).bitcast(Float32)

    def write_latent(self) -> None:
        """The whole z of this token: its words have come while the choice was made."""
        first, behind = self.row * self.z_share, self.behind + self.row * self.z_share
        own, others = self._dealt(0, 1, self.z_share), self._others(self.z_share)
        words = [self.z_own[first + i] for _, i, _ in own]
        senders, indices = [peer for peer, *_ in others], [behind + i for _, i, _ in others]
        words += self.exchange.receive(senders, indices, others[0][2])
        for (peer, i, inside), word in zip(own + others, words, strict=True):
            at = self.z.iterator + ((self.row * self.config.world + peer) * self.z_share + i)
            store_word(at, word, inside)

    def _others(self, share: int) -> list[tuple[Any, Any, Any]]:
        return self._dealt(1, self.config.world - 1, share)

    def _dealt(self, after: int, ranks: int, share: int) -> list[tuple[Any, Any, Any]]:
        """`share` words of each of so many ranks, from so far after this one, dealt to the block's threads: rank, word of the
        share, and whether there is one. Threads past the end repeat the last.
        """
        thread = opaque(cute.arch.thread_idx()[0])  # a predicate must be a register, whatever is known about it
        count, threads, found = ranks * share, self.config.threads, []
        for i in range(-(-count // threads)):
            item = cutlass.min(thread + i * threads, count - 1)
            rank = (self.rank + after + item // share) % self.config.world
            found.append((rank, item % share, thread + i * threads < count))
        return found


@cute.kernel
def _topk(
    bias: Static,
    logits: Dynamic,
    num_tokens: Dynamic,
    ids: Output,
    weights: Output,
    groups: Any,
    gather: Any,
    config: cutlass.Constexpr,
):
    """One block for a token, one thread for an expert.

    The k-th largest of the warps' maxima is a bound that at least k experts reach; those that do (some 23 of 896) are listed,
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
    reached = allocator.allocate_tensor(Uint32, cute.make_layout(4), byte_alignment=16)
    chosen = allocator.allocate_tensor(Float32, cute.make_layout(32), byte_alignment=16)
    count = allocator.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
    masks = allocator.allocate_tensor(Uint32, cute.make_layout(2 * experts if config.grouped else 1), byte_alignment=16)
    offset = bias.early()[expert]
    if thread == 0:
        count[0] = Int32(0)
    if cutlass.const_expr(config.grouped):
        masks[expert * 2] = Uint32(0)
        masks[expert * 2 + 1] = Uint32(0)
    release_dependents()

    token = dependency_wait()
    live = row < num_tokens.after(token)[0]
    if cutlass.const_expr(config.world > 1):
        gathering = Gathering(config, row, token, logits, gather)
        gathering.send()
        logit = gathering.logit(expert)
    else:
        logit = logits.after(token)[row, expert]
    score = sigmoid(logit)
    key = sortable(score + offset)
    if thread >= experts:
        key = Uint32(0)
    scores[expert] = score
    highest = warp_max_u32(key)
    maxima[warp] = highest
    cute.arch.sync_threads()

    bound = Uint32(0)
    warps = cutlass.const_expr(config.threads // 32)
    if cutlass.const_expr(warps >= k):
        of_lane = maxima[cutlass.min(lane, warps - 1)]
        above = (lane < warps) & ((of_lane > highest) | ((of_lane == highest) & (lane < warp)))
        if (cute.arch.popc(cute.arch.vote_ballot_sync(above)) == k - 1) & (lane == 0):
            reached[0] = highest
        cute.arch.sync_threads()
        bound = reached[0]
    reaches = (key >= bound) & (thread < experts)
    mask = cute.arch.vote_ballot_sync(reaches)
    base = Int32(0)
    if (lane == 0) & (mask != 0):
        base = cute.arch.atomic_add(count.iterator, cute.arch.popc(mask), sem="relaxed", scope="cta")
    base = cute.arch.shuffle_sync(base, 0)
    if reaches:
        listed[base + popcount_below(mask, lane)] = (Uint64(key) << Uint64(32)) | Uint64(Uint32(0xFFFFFFFF) - Uint32(thread))
    cute.arch.sync_threads()

    candidates = count[0]
    out_ids = ids.after(token)
    at_once = cutlass.const_expr(config.threads // COUNTERS)
    for first in cutlass.range(0, candidates, at_once, unroll=1):
        candidate = first + thread // COUNTERS
        mine, place = listed[cutlass.min(candidate, candidates - 1)], Int32(0)
        for start in cutlass.range(0, candidates, COUNTERS, unroll=2):
            other = start + thread % COUNTERS
            before = (listed[cutlass.min(other, candidates - 1)] > mine) & (other < candidates)
            of_warp = Uint32(cute.arch.vote_ballot_sync(before)) >> Uint32(lane // COUNTERS * COUNTERS)
            place = place + Int32(cute.arch.popc(of_warp & Uint32((1 << COUNTERS) - 1)))
        if (place < k) & (candidate < candidates) & (thread % COUNTERS == 0):
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
        if thread == config.threads - 1:  # behind the barrier, so this block's ids are written: the count publishes them
            before = cute.arch.atomic_add(arrived.iterator, Int32(1), sem="acq_rel", scope="gpu")
            count[1] = Int32(before == config.tokens - 1)
        cute.arch.sync_threads()
        if count[1] != 0:
            if thread == 0:
                arrived[0] = Int32(0)  # for the next launch
            buffers = (out_ids, offsets, pairs, active, num_active)
            group_pairs(config, buffers, num_tokens.after(token)[0], masks, recast(scores, Int32), maxima)

    if cutlass.const_expr(config.world > 1):
        gathering.write_latent()
        gathering.exchange.arrive(config.tokens)


def recast(tensor: Any, dtype: Any) -> Any:
    """A tensor as a flat one of another type."""
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
    and the bits below a token's its place in the share. `masks` [2 E], all zero, `starts` [E], `totals` [32]: in shared memory.
    """
    ids, offsets, pairs, active, num_active = buffers
    thread, _, _ = cute.arch.thread_idx()
    lane, warp, experts, k = thread % 32, thread // 32, config.experts, config.top_k
    threads = cutlass.const_expr(config.threads)
    warps = cutlass.const_expr(threads // 32)
    turns = cutlass.const_expr(-(-config.tokens * k // threads))
    own_pairs = cute.make_rmem_tensor(turns, Int32)  # the experts of this thread's pairs
    for turn in cutlass.range_constexpr(turns):
        pair = thread + turn * threads
        expert = Int32(-1)
        if pair < live_tokens * k:
            load = "ld.relaxed.gpu.global.s32 {$w0}, [{$r0}];"  # other blocks wrote it during this launch
            expert = inline_ptx(load, write_only_types=[Int32], read_only_args=[ids.iterator + pair])
            chosen_by = pair // k
            word = masks.iterator + (expert * 2 + chosen_by // 32)
            inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[word, Uint32(1) << Uint32(chosen_by % 32)])
        own_pairs[turn] = expert
    cute.arch.sync_threads()
    own = Int32(0)
    if thread < experts:
        own = Int32(cute.arch.popc(masks[thread * 2])) + Int32(cute.arch.popc(masks[thread * 2 + 1]))
    # Both sums of an expert in one number: pairs above, active experts below.
    packed = own * 65536 + Int32(own > 0)
    upto = lanes_before(packed, lane)
    if lane == 31:
        totals[warp] = Uint32(upto)
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < warps:
        of_warp = Int32(totals[lane])
    earlier = cute.arch.warp_reduction_sum(Int32(select_(lane < warp, of_warp, Int32(0))))
    start_of_own = earlier + upto - packed
    if thread < experts:
        offsets[thread] = start_of_own // 65536
        starts[thread] = start_of_own // 65536
        if own > 0:
            active[start_of_own % 65536] = thread
    if thread == threads - 1:
        whole = earlier + upto
        offsets[experts] = whole // 65536
        num_active[0] = whole % 65536
    cute.arch.sync_threads()
    for turn in cutlass.range_constexpr(turns):
        pair, expert = thread + turn * threads, own_pairs[turn]
        if expert >= 0:
            chosen_by = pair // k
            below = Int32(popcount_below(masks[expert * 2 + chosen_by // 32], chosen_by % 32))
            if chosen_by >= 32:
                below = below + Int32(cute.arch.popc(masks[expert * 2]))
            pairs[starts[expert] + below] = pair


def sortable(value: Any) -> Any:
    """Unsigned number that orders as the fp32 value does. NaN of either sign is above all: who has it is chosen, and seen."""
    bits = value.bitcast(Uint32)
    ordered = Uint32(select_(bits >= Uint32(0x80000000), ~bits, bits | Uint32(0x80000000)))
    return Uint32(select_((bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000), Uint32(0xFFFFFFFF), ordered))


def topk(
    config: Any, bias: Static, logits: Dynamic, num_tokens: Dynamic, ids: Output, weights: Output, *others_and_stream: Any
) -> None:
    *others, stream = others_and_stream
    listed = 5 if config.grouped else 0
    groups, gather = tuple(others[:listed]), tuple(others[listed:])
    _topk(bias, logits, num_tokens, ids, weights, groups, gather, config).launch(
        grid=[config.tokens, 1, 1],
        block=[config.threads, 1, 1],
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=True,
    )
