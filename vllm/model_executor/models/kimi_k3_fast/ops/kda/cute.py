"""The KDA decode kernel: convolution, f_b, gate, recurrence and gated norm of one (request, head) in one cluster of CTAs.

The recurrent state of a (request, head) is 64 KB and is read and written once: that is the kernel's floor. A cluster splits its
V rows, so
that a small batch still spreads over the machine. Eight lanes share a V row, each with 16 of its 128 keys, and hold `rows` such
rows in
registers from the load to the store: the state never passes through shared memory. The f_b weights of the head are static and
are fetched
before the dependency wait; a CTA keeps them for all the requests it walks over.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from ..device.vectors import load_words, prefetch_l2, unpack_bf16
from ..order import Dynamic, Output, Static, dependency_wait, release_dependents

D = 128  # key and value width of a head
LANES = 8  # lanes that share one V row
KEYS = D // LANES  # keys of the row that one lane holds: four groups of four, 32 apart, so that a load is 128 bytes wide
LOG2E = 1.4426950408889634


def _pointer(tensor, offset, divisible_by=1):
    return tensor.iterator + cute.assume(offset, divby=divisible_by)


def _load(pointer, count, dtype):
    """`count` neighbouring elements into registers, as wide as the pointer's alignment allows."""
    fragment = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), fragment)
    return fragment


def _store(fragment, pointer):
    cute.autovec_copy(fragment, cute.make_tensor(pointer, cute.make_layout(cute.size(fragment))))


def _copy(atom, source, destination, count):
    """One asynchronous copy from global to shared memory."""
    cute.copy(atom, cute.make_tensor(source, cute.make_layout(count)), cute.make_tensor(destination, cute.make_layout(count)))


def _exp(x):
    return cute.math.exp2(x * Float32(LOG2E), fastmath=True)


def _sigmoid(x):
    return cute.arch.rcp_approx(Float32(1.0) + _exp(-x))


def _silu(x):
    return x * _sigmoid(x)


def _decay(raw, a, c):
    """e^g of one key channel. `raw`: f_b's output plus dt_bias; `a`: e^A_log of the head."""
    if c.lower_bound is not None:
        return _exp(Float32(c.lower_bound) * _sigmoid(a * raw))
    softplus = cute.math.log2(Float32(1.0) + _exp(cutlass.min(raw, Float32(20.0))), fastmath=True) * Float32(1.0 / LOG2E)
    return _exp(-a * cutlass.max(softplus, raw))  # softplus(z) >= z, and equal to it in float32 above 20


def _sum_lanes(value, threads=LANES):
    return cute.arch.warp_reduction_sum(value, threads_in_group=threads)


def _fetch_inputs(raw, f_a, gate_beta, x, token, column, lane, head, own_value, c):
    """What this thread reads of a token's row: raw inputs of its channels, two pieces of f_a, its output gate and beta.

    Into registers, so that the next row's are on their way while this one's are worked on.
    """
    width = c.heads * D
    for i in range(cute.size(column)):
        raw[i] = x[token, column[i]]
    start = Int64(token) * x.stride[0] + 4 * width + lane * 8
    for half in range(2):
        words = load_words(_pointer(x, start + half * 64, 8))
        for e in range(4):
            f_a[half, e] = words[e]
    gate_beta[0] = x[token, 3 * width + head * D + own_value]
    gate_beta[1] = x[token, 4 * width + D + head]


@cute.jit
def _fetch_state(copy, state, source: Int64, buffer, own_state, slot: Int32, only: cutlass.Constexpr):
    """Start copying V rows `only` of this thread, from the state's element `source` on, to their places in `buffer`: one group
    each, empty where there is no slot."""
    for p in only:
        if slot > 0:
            for j in cutlass.range_constexpr(KEYS // 4):
                piece = p * D + j * 32
                _copy(copy, _pointer(state, source + piece, 4), buffer + cute.assume(own_state + piece, divby=4), 4)
        cute.arch.cp_async_commit_group()


def _source_slot(slots, accepted, row, c):
    """The slot that a request's recurrence starts from; 0 for a padded row, whose `accepted` means nothing, and past the last."""
    inside = cutlass.min(row, c.requests - 1)
    window = cutlass.min(cutlass.max(accepted[inside] - 1, 0), c.slots_per_row - 1) if c.slots_per_row > 1 else 0
    return cutlass.select_((row < c.requests) & (slots[inside, 0] > 0), slots[inside, window], Int32(0))


def _take(s, p, buffer, own_state):
    """V row p of this thread from shared memory to registers."""
    for j in range(KEYS // 4):
        quad = _load(buffer + cute.assume(own_state + (p * D + j * 32), divby=4), 4, Float32)
        for e in range(4):
            s[p, j * 4 + e] = quad[e]


@cute.jit
def _ask_window(conv_state, slot: Int32, window: Int32, head: Int32, thread: Int32, width: cutlass.Constexpr):
    """Ask for the three taps of the head's 3 x 128 channels to come into L2."""
    if thread < 18 and slot > 0:
        at = thread // 6 * width + head * D + thread % 2 * 64
        offset = Int64(slot) * conv_state.stride[0] + (window + thread % 6 // 2) * conv_state.stride[1] + at
        prefetch_l2(conv_state.iterator + offset)


def _send(destination, value, barrier, rank):
    """Store one float into shared memory of a CTA of the cluster and count its bytes on that CTA's barrier."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
        read_only_args=[
            cute.arch.map_dsmem_ptr(destination, rank).toint(),
            value,
            cute.arch.map_dsmem_ptr(barrier, rank).toint(),
        ],
    )


@cute.kernel
def _kda(
    x: Dynamic,
    conv_weight: Static,
    f_b: Static,
    a_log: Static,
    dt_bias: Static,
    norm_weight: Static,
    slots: Dynamic,
    accepted: Dynamic | None,
    starts: Dynamic | None,
    conv_state: Dynamic,
    state: Dynamic,
    y: Output,
    c: cutlass.Constexpr,
):
    if cutlass.const_expr(c.early_release):
        release_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, row_group, _ = cute.arch.block_idx()
    head, part = block // c.split, block % c.split
    lane, group, warp = thread % LANES, thread // LANES, thread // 32
    values = D // c.split  # V rows of this CTA
    rows = values * LANES // c.threads  # V rows of one thread
    passes = D * LANES // c.threads  # f_b rows of one thread
    warps = c.threads // 32
    channels = 2 * D + values  # q, k and this CTA's part of v
    tasks = (channels + c.threads - 1) // c.threads
    width = c.heads * D

    smem = cutlass.memory.SmemAllocator()
    f_b_smem = cute.make_tensor(smem.allocate_array(BFloat16, D * D, byte_alignment=128), cute.make_layout(D * D))
    state_smem = cute.make_tensor(
        smem.allocate_array(Float32, c.stages * values * D, byte_alignment=128), cute.make_layout(c.stages * values * D)
    )
    taps_smem = cute.make_tensor(
        smem.allocate_array(Float32, tasks * c.threads * 4, byte_alignment=16), cute.make_layout(tasks * c.threads * 4)
    )
    qkv_smem = cute.make_tensor(smem.allocate_array(Float32, 3 * D, byte_alignment=16), cute.make_layout(3 * D))
    decay_smem = cute.make_tensor(smem.allocate_array(Float32, D, byte_alignment=16), cute.make_layout(D))
    squares_smem = cute.make_tensor(
        smem.allocate_array(Float32, 2 * c.split * warps, byte_alignment=16), cute.make_layout(2 * c.split * warps)
    )
    arrived = smem.allocate_array(Int64, 2, byte_alignment=8)
    if cutlass.const_expr(c.split > 1):
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(arrived + 1, 1)
            cute.arch.mbarrier_init_fence()
        # paired with the wait below: no peer is written to before it has started and made its barriers
        cute.arch.cluster_arrive()

    # -- static: weights on their way before the dependency wait ----------------------------------------
    copy = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=128)
    copy_state = cute.make_copy_atom(
        cute.nvgpu.cpasync.CopyG2SOp(cute.nvgpu.cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
    )
    for i in cutlass.range_constexpr(D * D // 8 // c.threads):
        chunk = cute.assume((i * c.threads + thread) * 8, divby=8)
        _copy(copy, _pointer(f_b.early(), head * (D * D) + chunk, 8), f_b_smem.iterator + chunk, 8)
    column = cute.make_rmem_tensor(tasks, Int32)  # of x, of the conv weights and of the conv state alike
    for i in cutlass.range_constexpr(tasks):
        channel = cutlass.min(i * c.threads + thread, channels - 1)
        section = channel // D
        column[i] = section * width + head * D + channel % D
        if channel >= 2 * D:
            column[i] = 2 * width + head * D + part * values + channel - 2 * D
        own_taps = _pointer(taps_smem, (i * c.threads + thread) * 4, 4)
        _copy(copy_state, _pointer(conv_weight.early(), column[i] * 4, 4), own_taps, 4)
    cute.arch.cp_async_commit_group()
    a = _exp(a_log.early()[head])
    gate_channel = cutlass.min(lane, passes - 1) * (c.threads // LANES) + group  # the f_b row whose gate this thread computes
    bias = dt_bias.early()[head * D + gate_channel]
    own_value = part * values + group * rows + lane % rows  # the V row that this thread writes out
    norm = Float32(norm_weight.early()[own_value])

    # -- dynamic ----------------------------------------
    token_ready = dependency_wait()
    if cutlass.const_expr(not c.early_release):
        release_dependents()
    x, y, slots = x.after(token_ready), y.after(token_ready), slots.after(token_ready)
    conv_state, state = conv_state.after(token_ready), state.after(token_ready)
    if cutlass.const_expr(c.split > 1):
        cute.arch.cluster_wait()

    several, walks = c.slots_per_row > 1, c.rows_per_cta > 1
    if cutlass.const_expr(several):
        accepted, starts = accepted.after(token_ready), starts.after(token_ready)
    raw_inputs = cute.make_rmem_tensor(tasks, BFloat16)
    f_a = cute.make_rmem_tensor((2, 4), Uint32)
    gate_beta = cute.make_rmem_tensor(2, BFloat16)
    step_count = Int32(0)
    own_state = (group * rows) * D + lane * 4
    own_part = head * (D * D) + part * values * D + own_state

    # The state goes through shared memory, each thread its own part, because a compiler cannot delay that kind of load. A V row
    # is a group of copies: the first is worked on and stored while the others arrive, and its place is free for a later request
    # as soon as it is in registers, so that memory works all the time.
    if cutlass.const_expr(not several):
        _fetch_inputs(raw_inputs, f_a, gate_beta, x, row_group, column, lane, head, own_value, c)
    for ahead in cutlass.range_constexpr(c.stages):
        early_slot = _source_slot(slots, accepted, row_group + ahead * c.row_groups, c)
        early_source = Int64(early_slot) * state.stride[0] + own_part
        early_buffer = state_smem.iterator + ahead * values * D
        _fetch_state(copy_state, state, early_source, early_buffer, own_state, early_slot, range(rows))

    for step in cutlass.range(c.rows_per_cta, unroll=1):
        row = row_group + step * c.row_groups
        if row < c.requests:
            slot, source_slot, window = slots[row, 0], _source_slot(slots, accepted, row, c), Int32(0)
            buffer_start = state_smem.iterator
            if cutlass.const_expr(c.stages > 1):
                buffer_start = state_smem.iterator + cute.assume(step % c.stages * (values * D), divby=4)
            first, count = row * c.queries, Int32(c.queries)
            if cutlass.const_expr(several):
                window = accepted[row] - 1
                first = starts[row]
                count = starts[row + 1] - first
                # Padded tokens belong to no row: the rows share them out, so that their output is defined.
                end = starts[c.requests]
                for i in cutlass.range(c.queries, unroll=1):
                    token = end + row * c.queries + i
                    if token < c.tokens and thread < values:
                        y[token, head * D + part * values + thread] = BFloat16(0.0)
            following = cutlass.min(row + c.row_groups, c.requests - 1)
            later_slot = _source_slot(slots, accepted, row + c.stages * c.row_groups, c)
            later_source = Int64(later_slot) * state.stride[0] + own_part

            if slot <= 0 or count <= 0:
                for i in cutlass.range(count, unroll=1):
                    y[first + i, head * D + part * values + thread % values] = BFloat16(0.0)
                cute.arch.cp_async_wait_group(0)
                if cutlass.const_expr(walks):
                    _fetch_state(copy_state, state, later_source, buffer_start, own_state, later_slot, range(rows))
                if cutlass.const_expr(walks and not several):
                    _fetch_inputs(raw_inputs, f_a, gate_beta, x, following, column, lane, head, own_value, c)
            else:
                # Registers of this branch alone, or they would be carried through the other one.
                s = cute.make_rmem_tensor((rows, KEYS), Float32)
                history = cute.make_rmem_tensor((tasks, 3), Float32)
                if cutlass.const_expr(several):
                    _fetch_inputs(raw_inputs, f_a, gate_beta, x, first, column, lane, head, own_value, c)
                for i in cutlass.range_constexpr(tasks):
                    for j in cutlass.range_constexpr(3):
                        history[i, j] = Float32(conv_state[slot, window + j, column[i]])
                cute.arch.cp_async_wait_group(c.stages * rows)  # f_b; the states may still be on their way
                cute.arch.sync_threads()

                for i in cutlass.range(count, unroll=1):
                    token = first + i
                    gate, beta = _sigmoid(Float32(gate_beta[0])), _sigmoid(Float32(gate_beta[1]))
                    target = slot
                    if cutlass.const_expr(several):
                        target = slots[row, i]

                    # Short convolution over the three raw inputs of the state and this one, then SiLU.
                    for t in cutlass.range_constexpr(tasks):
                        raw = Float32(raw_inputs[t])
                        taps = _load(_pointer(taps_smem, (t * c.threads + thread) * 4, 4), 4, Float32)
                        mixed = taps[0] * history[t, 0] + taps[1] * history[t, 1] + taps[2] * history[t, 2] + taps[3] * raw
                        history[t, 0] = history[t, 1]
                        history[t, 1] = history[t, 2]
                        history[t, 2] = raw
                        if t * c.threads + thread < channels:
                            qkv_smem[t * c.threads + thread] = _silu(mixed)

                    # f_b: eight lanes a row; lane l keeps row l and computes its gate.
                    f_a_low = [value for e in range(4) for value in unpack_bf16(f_a[0, e])]
                    f_a_high = [value for e in range(4) for value in unpack_bf16(f_a[1, e])]
                    own = Float32(0.0)
                    for p in cutlass.range_constexpr(passes):
                        at = (p * (c.threads // LANES) + group) * D + lane * 8
                        w_low = _load(_pointer(f_b_smem, at, 8), 8, BFloat16).load().to(Float32)
                        w_high = _load(_pointer(f_b_smem, at + 64, 8), 8, BFloat16).load().to(Float32)
                        dot = Float32(0.0)
                        for e in cutlass.range_constexpr(8):
                            dot += f_a_low[e] * w_low[e]
                            dot += f_a_high[e] * w_high[e]
                        dot = _sum_lanes(dot)
                        if lane == p:
                            own = dot
                    if lane < passes:
                        decay_smem[gate_channel] = _decay(Float32(BFloat16(own)) + bias, a, c)

                    # The next inputs are on their way while this token goes through the recurrence.
                    coming = following
                    if cutlass.const_expr(several):
                        coming = cutlass.min(token + 1, first + count - 1)
                    if cutlass.const_expr(several or walks):
                        _fetch_inputs(raw_inputs, f_a, gate_beta, x, coming, column, lane, head, own_value, c)
                    cute.arch.sync_threads()

                    # q and k to unit length, q also by d^-1/2.
                    q = cute.make_rmem_tensor(KEYS, Float32)
                    k = cute.make_rmem_tensor(KEYS, Float32)
                    decay = cute.make_rmem_tensor(KEYS, Float32)
                    for j in cutlass.range_constexpr(KEYS // 4):
                        quad_q = _load(_pointer(qkv_smem, j * 32 + lane * 4, 4), 4, Float32)
                        quad_k = _load(_pointer(qkv_smem, D + j * 32 + lane * 4, 4), 4, Float32)
                        quad_d = _load(_pointer(decay_smem, j * 32 + lane * 4, 4), 4, Float32)
                        for e in cutlass.range_constexpr(4):
                            q[j * 4 + e], k[j * 4 + e], decay[j * 4 + e] = quad_q[e], quad_k[e], quad_d[e]
                    q_square, k_square, k_dot_q = Float32(0.0), Float32(0.0), Float32(0.0)
                    for e in cutlass.range_constexpr(KEYS):
                        q_square += q[e] * q[e]
                        k_square += k[e] * k[e]
                        k_dot_q += k[e] * q[e]
                    q_scale = cute.math.rsqrt(_sum_lanes(q_square) + Float32(1e-6)) * Float32(D**-0.5)
                    k_scale = cute.math.rsqrt(_sum_lanes(k_square) + Float32(1e-6))
                    k_dot_q = _sum_lanes(k_dot_q) * q_scale * k_scale
                    for e in cutlass.range_constexpr(KEYS):
                        q[e] = q[e] * q_scale
                        k[e] = k[e] * k_scale

                    if cutlass.const_expr(several) and i == 0:
                        s.fill(0.0)
                        cute.arch.cp_async_wait_group((c.stages - 1) * rows)
                        if source_slot > 0:
                            for p in cutlass.range_constexpr(rows):
                                _take(s, p, buffer_start, own_state)
                        if cutlass.const_expr(walks):
                            _fetch_state(copy_state, state, later_source, buffer_start, own_state, later_slot, range(rows))
                    if cutlass.const_expr(walks):
                        _ask_window(conv_state, slots[following, 0], Int32(0), head, thread, width)

                    # Recurrence. With S' the decayed state: u = beta (v - S' k), o = S' q + u (k . q), S = S' + u k.
                    square = Float32(0.0)
                    own_o = Float32(0.0)
                    target_offset = Int64(target) * state.stride[0] + own_part
                    for p in cutlass.range_constexpr(rows):
                        if cutlass.const_expr(not several):
                            cute.arch.cp_async_wait_group(c.stages * rows - 1 if walks else rows - 1 - p)
                            _take(s, p, buffer_start, own_state)
                            if cutlass.const_expr(walks):
                                _fetch_state(copy_state, state, later_source, buffer_start, own_state, later_slot, (p,))
                        s_k, s_q = Float32(0.0), Float32(0.0)
                        for e in cutlass.range_constexpr(KEYS):
                            s[p, e] = s[p, e] * decay[e]
                            s_k += s[p, e] * k[e]
                            s_q += s[p, e] * q[e]
                        u = beta * (qkv_smem[2 * D + group * rows + p] - _sum_lanes(s_k))
                        o = _sum_lanes(s_q) + u * k_dot_q
                        square += o * o
                        if lane == p:
                            own_o = o
                        for e in cutlass.range_constexpr(KEYS):
                            s[p, e] = s[p, e] + u * k[e]
                        if target > 0:
                            for j in cutlass.range_constexpr(KEYS // 4):
                                quad = cute.make_rmem_tensor(4, Float32)
                                for e in cutlass.range_constexpr(4):
                                    quad[e] = s[p, j * 4 + e]
                                _store(quad, _pointer(state, target_offset + (p * D + j * 32), 4))

                    # Gated RMSNorm over all V rows of the head: every warp of the cluster sends every CTA its sum of squares. A
                    # CTA that has received step n from all can be at most one step behind any of them, so two buffers and
                    # barriers are enough.
                    for offset in cutlass.range_constexpr(2):
                        square += cute.arch.shuffle_sync_bfly(square, offset=LANES << offset)
                    buffer = step_count % 2
                    place = (buffer * c.split + part) * warps + warp
                    barrier = arrived + buffer
                    if cutlass.const_expr(c.split > 1):
                        if thread == 0:
                            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * c.split * warps)
                        if thread % 32 < c.split:
                            _send(squares_smem.iterator + place, square, barrier, thread % 32)
                    elif thread % 32 == 0:
                        squares_smem[place] = square
                    if cutlass.const_expr(c.split > 1):
                        cute.arch.mbarrier_wait(barrier, step_count // 2 % 2)
                    else:
                        cute.arch.sync_threads()
                    total = Float32(0.0)
                    for w in cutlass.range_constexpr(c.split * warps):
                        total += squares_smem[buffer * (c.split * warps) + w]
                    step_count += 1
                    scale = cute.math.rsqrt(total * Float32(1.0 / D) + Float32(c.norm_eps))
                    if lane < rows:
                        y[token, head * D + own_value] = BFloat16(own_o * scale * norm * gate)

                    # The window's new entry. All CTAs of the head have read the window: their sums have arrived. q and k channels
                    # are common to them and written by the first.
                    for t in cutlass.range_constexpr(tasks):
                        if t * c.threads + thread < channels and (part == 0 or t * c.threads + thread >= 2 * D):
                            if i == 0:
                                conv_state[slot, 0, column[t]] = BFloat16(history[t, 0])
                                conv_state[slot, 1, column[t]] = BFloat16(history[t, 1])
                            conv_state[slot, 2 + i, column[t]] = BFloat16(history[t, 2])
    cute.arch.cp_async_wait_group(0)


def _launch(c, *tensors, stream):
    grid = [c.heads * c.split, c.row_groups, 1]
    _kda(*tensors, c).launch(
        grid=grid,
        block=[c.threads, 1, 1],
        cluster=[c.split, 1, 1],
        stream=stream,
        use_pdl=True,
        preferred_smem_carveout=100,
        min_blocks_per_mp={128: 3, 256: 2}.get(c.threads, 1),  # blocks hide one another's latencies
    )


def bf16_kda_decode(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, conv_state, state, y, stream):
    _launch(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, None, None, conv_state, state, y, stream=stream)


def bf16_kda_verify(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, accepted, starts, conv_state, state, y, stream):
    _launch(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, accepted, starts, conv_state, state, y, stream=stream)
