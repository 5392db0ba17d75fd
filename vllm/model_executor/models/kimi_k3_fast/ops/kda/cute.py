"""The KDA decode kernel: convolution, f_b, gate, recurrence and gated norm of one (request, head) in one cluster of CTAs.

The recurrent state of a (request, head) is 64 KB and is read and written once: that is the kernel's floor. A cluster splits its
V rows, so that a small batch still spreads over the machine. Eight lanes share a V row, each with 16 of its 128 keys, and hold
`rows` such rows in registers from the load to the store.

A CTA has up to eight tokens: one of each request it walks over, or the tokens of one request that are verified together. What
does not depend on the state is done for all of them at once while the first state is on its way (`_prepare`): the gates by the
tensor core, whose left operand, the head's f_b, each warp has loaded before the dependency wait; the convolution, a channel a
thread. Then the tokens go through the recurrence one by one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ..device.ptx import load_shared, mma_bf16, send_f32, store_shared
from ..device.vectors import load_words
from ..order import Dynamic, Output, Settled, Static, dependency_wait, release_dependents

D = 128  # key and value width of a head
LANES = 8  # lanes that share one V row
KEYS = D // LANES  # keys of the row that one lane holds: four groups of four, 32 apart, so that a load is 128 bytes wide
LOG2E = 1.4426950408889634
# Where the parts of a token's row of x that a CTA needs lie in shared memory, in elements; the pitch spreads tokens over banks.
Q, K, F_A, V, GATE, BETA, PITCH = 0, D, 2 * D, 3 * D, 4 * D, 5 * D, 5 * D + 16


def _pointer(tensor, offset, divisible_by=1):
    return tensor.iterator + cute.assume(offset, divby=divisible_by)


def _quad(pointer):
    """Four neighbouring floats of shared memory."""
    fragment = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), fragment)
    return fragment


def _piece(tensor, start, lane):
    """Four values of this lane's keys."""
    return _quad(tensor.iterator + cute.assume(start + lane * 4, divby=4))


def _store(fragment, pointer):
    cute.autovec_copy(fragment, cute.make_tensor(pointer, cute.make_layout(cute.size(fragment))))


def _shared(memory, dtype, count, align=16):
    return cute.make_tensor(memory.allocate_array(dtype, count, byte_alignment=align), cute.make_layout(count))


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


@cute.jit
def _fetch_state(copy, state, source: Int64, buffer, own_state, slot: Int32, only: cutlass.Constexpr):
    """Start copying V rows `only` of this thread, from the state's element `source` on, to their places in `buffer`: one group
    each, empty where there is no slot. The copies read L2, so the state may be one that is `Settled`."""
    for p in only:
        if slot > 0:
            for j in cutlass.range_constexpr(KEYS // 4):
                piece = p * D + j * 32
                from_ = cute.make_tensor(_pointer(state, source + piece, 4), cute.make_layout(4))
                to = cute.make_tensor(buffer + cute.assume(own_state + piece, divby=4), cute.make_layout(4))
                cute.copy(copy, from_, to)
        cute.arch.cp_async_commit_group()


def _fetch_states(copy, state, sources, buffers, own_state, slots, at):
    """Start copying this thread's parts of the states that find a place, one after the other in `buffers`."""
    for n, (source, slot) in enumerate(zip(sources, slots, strict=True)):
        _fetch_state(copy, state, source, buffers.iterator + n * at.values * D, own_state, slot, range(at.rows))


def _source_slot(slots, accepted, row, c):
    """The slot that a request's recurrence starts from; 0 for a padded row, whose `accepted` means nothing, and past the last."""
    inside = cutlass.min(row, c.requests - 1)
    window = cutlass.min(cutlass.max(accepted[inside] - 1, 0), c.slots_per_row - 1) if c.slots_per_row > 1 else 0
    return cutlass.select_((row < c.requests) & (slots[inside, 0] > 0), slots[inside, window], Int32(0))


def _take(s, p, buffer, own_state):
    """V row p of this thread from shared memory to registers."""
    for j in range(KEYS // 4):
        quad = _quad(buffer + cute.assume(own_state + (p * D + j * 32), divby=4))
        for e in range(4):
            s[p, j * 4 + e] = quad[e]


class _Place:
    """Where a thread stands: its head and part of the V rows; of the channels it convolves, `column` is each one's place in x,
    in the conv weights and in the conv state alike."""

    def __init__(self, c):
        self.thread, _, _ = cute.arch.thread_idx()
        block, self.row_group, _ = cute.arch.block_idx()
        self.head, self.part = block // c.split, block % c.split
        self.lane, self.group, self.warp = self.thread % LANES, self.thread // LANES, self.thread // 32
        self.quad, self.pair = self.thread % 32 // 4, self.thread % 4  # of the tensor core's operands
        self.values = D // c.split  # V rows of this CTA
        self.rows = self.values * LANES // c.threads  # V rows of one thread
        self.warps = c.threads // 32
        self.channels = 2 * D + self.values  # q, k and this CTA's part of v
        self.tasks = (self.channels + c.threads - 1) // c.threads
        self.width = c.heads * D
        self.own_value = self.part * self.values + self.group * self.rows + self.lane % self.rows  # the V row it writes out
        self.column, self.place = [], []  # `place`: in a token's inputs in shared memory
        for i in range(self.tasks):
            channel = cutlass.min(i * c.threads + self.thread, self.channels - 1)
            common = channel // D * self.width + self.head * D + channel % D
            own = 2 * self.width + self.head * D + self.part * self.values + channel - 2 * D
            self.column.append(cutlass.select_(channel >= 2 * D, own, common))
            self.place.append(channel + cutlass.select_(channel >= 2 * D, Int32(V - 2 * D), Int32(0)))


class _Weights:
    """What a thread keeps of the head's weights, on its way before the dependency wait: its rows of f_b as left operands of the
    tensor core (a lane has eight neighbouring keys of two rows, for two steps), their biases, and its channels' taps."""

    def __init__(self, at, conv_weight, f_b, a_log, dt_bias, norm_weight):
        self.tiles = D // 16 // at.warps  # tiles of 16 rows of a warp
        first = [(at.warp * self.tiles + t) * 16 + at.quad for t in range(self.tiles)]
        self.gate_rows = [[row, row + 8] for row in first]
        start = at.head * (D * D) + at.pair * 8
        self.f_b = [
            [[load_words(_pointer(f_b, start + row * D + j * 32, 8)) for row in rows] for j in range(4)]
            for rows in self.gate_rows
        ]
        self.bias = [[dt_bias[at.head * D + row] for row in rows] for rows in self.gate_rows]
        self.taps = [[w.bitcast(Float32) for w in load_words(_pointer(conv_weight, column * 4, 4))] for column in at.column]
        self.a_log = a_log[at.head]
        self.norm = norm_weight[at.own_value]


def _gates(inputs, at, weights, tokens):
    """f_b f_a of all tokens: [tile][i], i as the tensor core orders it: row quad + 8 (i // 2), token 2 pair + i % 2. The tensor
    core's column n is token n; columns past the last token repeat it."""
    start = cutlass.min(at.quad, tokens - 1) * PITCH + F_A + at.pair * 8
    f_a = [load_shared(_pointer(inputs, start + j * 32, 8)) for j in range(4)]
    halves = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(weights.tiles)]  # half of the keys each: shorter chains
    for j in range(4):
        for s in (0, 2):
            for t in range(weights.tiles):
                top, bottom = weights.f_b[t][j]
                mma_bf16(halves[t][j % 2], (top[s], bottom[s], top[s + 1], bottom[s + 1]), f_a[j][s], f_a[j][s + 1])
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in halves]


class _Inputs:
    """The piece of 16 bytes of a token's row that this thread copies: q and k of the head, f_a, the beta of eight heads, and the
    CTA's part of v and of the output gate."""

    def __init__(self, at, x, c):
        own = at.values // 8  # pieces of a part of v
        p = at.thread
        behind = p - 49  # what is left for v and the gate
        gate = behind >= own
        columns = (2 + Int32(gate)) * at.width + at.head * D + at.part * at.values + (behind - Int32(gate) * own) * 8
        columns = cutlass.select_(p == 48, 4 * at.width + D + at.head // 8 * 8, columns)
        columns = cutlass.select_(p < 48, 4 * at.width + (p - 32) * 8, columns)
        self.column = cutlass.select_(p < 32, p // 16 * at.width + at.head * D + p % 16 * 8, columns)
        place = V + Int32(gate) * (GATE - V) + (behind - Int32(gate) * own) * 8
        self.place = cutlass.select_(p < 48, p * 8, cutlass.select_(p == 48, Int32(BETA), place))
        self.wanted = p < 49 + 2 * own

    def load(self, x, source):
        """Of the tokens `source`, into registers: copies into shared memory would be waited for behind those of the states."""
        column = cutlass.select_(self.wanted, self.column, Int32(0))
        return [load_words(_pointer(x, Int64(token) * x.stride[0] + column, 8)) for token in source]

    def put(self, words, inputs):
        for n, piece in enumerate(words):
            store_shared(_pointer(inputs, n * PITCH + self.place, 8), piece, self.wanted)


class _Prepared:
    """Shared memory for each token: its inputs, and what the recurrence needs: q, k, v after convolution, and decays."""

    def __init__(self, memory, at, tokens):
        self.tokens = tokens
        self.inputs = _shared(memory, BFloat16, tokens * PITCH)
        self.qkv = _shared(memory, Float32, tokens * at.channels)
        self.decay = _shared(memory, Float32, tokens * D)


@cute.jit
def _prepare_decays(to, at, weights, acc, a, c: cutlass.Constexpr):
    decays = to.decay
    if cutlass.const_expr(to.tokens == 1):
        # All columns of the product are the one token's: a lane takes one of the four rows it holds.
        tile = at.pair // 2 % weights.tiles
        lower = at.pair % 2 == 1
        own, bias, row = acc[0][0], weights.bias[0][0], weights.gate_rows[0][0]
        for t in cutlass.range_constexpr(weights.tiles):
            for half in cutlass.range_constexpr(2):
                chosen = (tile == t) & (lower == (half == 1))
                own = cutlass.select_(chosen, acc[t][2 * half], own)
                bias = cutlass.select_(chosen, weights.bias[t][half], bias)
                row = cutlass.select_(chosen, weights.gate_rows[t][half], row)
        decays[row] = _decay(Float32(BFloat16(own)) + bias, a, c)
    else:
        for p in cutlass.range_constexpr(2):
            token = at.pair * 2 + p
            if token < to.tokens:
                for t in cutlass.range_constexpr(weights.tiles):
                    for half in cutlass.range_constexpr(2):
                        raw = Float32(BFloat16(acc[t][2 * half + p])) + weights.bias[t][half]
                        decays[token * D + weights.gate_rows[t][half]] = _decay(raw, a, c)


@cute.jit
def _prepare_channels(to, at, taps, windows, c: cutlass.Constexpr):
    """Short convolution over three earlier inputs and this one, then SiLU. `windows`: of each request and channel, the three
    inputs before this step."""
    inputs, qkv = to.inputs, to.qkv
    raws = [[inputs[n * PITCH + place] for place in at.place] for n in range(to.tokens)]
    histories = _histories(windows, raws, c.slots_per_row > 1)
    for n in cutlass.range_constexpr(to.tokens):
        for t in cutlass.range_constexpr(at.tasks):
            old, w = histories[n][t], taps[t]
            mixed = w[0] * Float32(old[0]) + w[1] * Float32(old[1]) + w[2] * Float32(old[2]) + w[3] * Float32(raws[n][t])
            if t * c.threads + at.thread < at.channels:
                qkv[n * at.channels + t * c.threads + at.thread] = _silu(mixed)


def _histories(windows, raws, several):
    """Of each token and channel, the three inputs before it: its request's window, or what is left of it and earlier tokens."""
    if not several:
        return windows
    line = [[*window, *(raw[t] for raw in raws)] for t, window in enumerate(windows[0])]
    return [[inputs[n : n + 3] for inputs in line] for n in range(len(raws))]


@cute.kernel
def _kda(
    x: Dynamic,
    conv_weight: Static,
    f_b: Static,
    a_log: Static,
    dt_bias: Static,
    norm_weight: Static,
    slots: Settled,
    accepted: Settled | None,
    starts: Settled | None,
    conv_state: Settled,
    state: Settled,
    y: Output,
    c: cutlass.Constexpr,
):
    release_dependents()
    at = _Place(c)
    thread, head, part, lane, group = at.thread, at.head, at.part, at.lane, at.group
    values, rows, warps, channels = at.values, at.rows, at.warps, at.channels
    row_group, warp, tasks = at.row_group, at.warp, at.tasks
    several = c.slots_per_row > 1  # verify: the tokens are one request's; else one of each request that the CTA walks over
    tokens = c.queries if several else c.rows_per_cta
    walks = tokens > 1 and not several

    memory = cutlass.memory.SmemAllocator()
    state_smem = _shared(memory, Float32, c.stages * values * D, 128)
    prepared = _Prepared(memory, at, tokens)
    squares_smem = _shared(memory, Float32, 2 * c.split * warps)
    arrived = memory.allocate_array(Int64, 2, byte_alignment=8)
    if cutlass.const_expr(c.split > 1):
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(arrived + 1, 1)
            cute.arch.mbarrier_init_fence()
        # paired with the wait below: no peer is written to before it has started and made its barriers
        cute.arch.cluster_arrive()

    copy = cute.make_copy_atom(
        cute.nvgpu.cpasync.CopyG2SOp(cute.nvgpu.cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
    )
    weights = _Weights(at, conv_weight.early(), f_b.early(), a_log.early(), dt_bias.early(), norm_weight.early())

    own_state = (group * rows) * D + lane * 4
    own_part = head * (D * D) + part * values * D + own_state

    # -- settled: the state and its place are of the step before ----------------------------------------
    old_slots, old_windows, old_state = slots.early(), conv_state.early(), state.early()
    old_accepted, old_starts = (accepted.early(), starts.early()) if several else (None, None)

    # Which tokens: their rows of x, and the slot and place of the window before them.
    row = at.row_group
    first, count, window = row, Int32(1), Int32(0)
    if cutlass.const_expr(several):
        first = old_starts[row]
        count = old_starts[row + 1] - first
        window = cutlass.min(cutlass.max(old_accepted[row] - 1, 0), c.slots_per_row - 1)

    # The state goes through shared memory, each thread its own part, because a compiler cannot delay that kind of load. A V row
    # is a group of copies: the first is worked on and stored while the others arrive, and its place is free for a later request
    # as soon as it is in registers, so that memory works all the time.
    # Where blocks come in waves it starts behind the inputs, which would queue behind it in all waves but the first.
    early_slots = [_source_slot(old_slots, old_accepted, row + ahead * c.row_groups, c) for ahead in range(c.stages)]
    early_sources = [Int64(slot) * old_state.stride[0] + own_part for slot in early_slots]
    if cutlass.const_expr(not c.in_waves):
        _fetch_states(copy, old_state, early_sources, state_smem, own_state, early_slots, at)

    first_slot = old_slots[row, 0]
    windows = []
    for n in cutlass.range_constexpr(1 if several else tokens):
        window_slot = cutlass.max(old_slots[cutlass.min(row + n * c.row_groups, c.requests - 1), 0], 0)
        windows.append([[old_windows[window_slot, window + j, column] for j in range(3)] for column in at.column])

    # -- dynamic ----------------------------------------
    token_ready = dependency_wait()
    x, y, slots = x.after(token_ready), y.after(token_ready), slots.after(token_ready)
    conv_state, state = conv_state.after(token_ready), state.after(token_ready)
    if cutlass.const_expr(several):
        accepted, starts = accepted.after(token_ready), starts.after(token_ready)
    source = [first + n * (1 if several else c.row_groups) for n in range(tokens)]
    source = [cutlass.min(cutlass.max(token, 0), c.tokens - 1) for token in source]  # past the last: a row that is not used
    piece = _Inputs(at, x, c)
    words = piece.load(x, source)
    if cutlass.const_expr(c.in_waves):
        _fetch_states(copy, old_state, early_sources, state_smem, own_state, early_slots, at)
    piece.put(words, prepared.inputs)
    cute.arch.sync_threads()
    gate_products = _gates(prepared.inputs, at, weights, tokens)
    _prepare_decays(prepared, at, weights, gate_products, _exp(weights.a_log), c)
    _prepare_channels(prepared, at, weights.taps, windows, c)
    inputs_smem, qkv_smem, decay_smem = prepared.inputs, prepared.qkv, prepared.decay
    norm, own_value, column = Float32(weights.norm), at.own_value, at.column
    cute.arch.sync_threads()
    if cutlass.const_expr(c.split > 1):
        cute.arch.cluster_wait()

    if cutlass.const_expr(several):
        # Padded tokens belong to no row: the rows share them out, so that their output is defined.
        end = starts[c.requests]
        for i in cutlass.range(c.queries, unroll=1):
            padded = end + row * c.queries + i
            if padded < c.tokens and thread < values:
                y[padded, head * D + part * values + thread] = BFloat16(0.0)

    step_count = Int32(0)
    for step in cutlass.range(1 if several else c.rows_per_cta, unroll=1):
        row = row_group + step * c.row_groups
        if row < c.requests:
            slot, source_slot = slots[row, 0] if walks else first_slot, _source_slot(slots, accepted, row, c)
            buffer_start = state_smem.iterator
            if cutlass.const_expr(c.stages > 1):
                buffer_start = state_smem.iterator + cute.assume(step % c.stages * (values * D), divby=4)
            if cutlass.const_expr(not several):
                first = row
            later_slot = _source_slot(slots, accepted, row + c.stages * c.row_groups, c)
            later_source = Int64(later_slot) * state.stride[0] + own_part

            if slot <= 0 or count <= 0:
                for i in cutlass.range(count, unroll=1):
                    y[first + i, head * D + part * values + thread % values] = BFloat16(0.0)
                cute.arch.cp_async_wait_group(0)
                if cutlass.const_expr(walks):
                    _fetch_state(copy, state, later_source, buffer_start, own_state, later_slot, range(rows))
            else:
                # Registers of this branch alone, or they would be carried through the other one.
                s = cute.make_rmem_tensor((rows, KEYS), Float32)
                for i in cutlass.range(count, unroll=1):
                    token = first + i
                    number = i if several else step  # of the token in shared memory
                    target = slot
                    if cutlass.const_expr(several):
                        target = slots[row, i]
                    # What the window becomes: read again, as registers for it would be taken all the time.
                    newest, older = [], []
                    for t in cutlass.range_constexpr(tasks):
                        newest.append(inputs_smem[number * PITCH + at.place[t]])
                        older.append([conv_state[slot, window + 1 + j, column[t]] for j in range(2)])

                    # q and k to unit length, q also by d^-1/2.
                    q = cute.make_rmem_tensor(KEYS, Float32)
                    k = cute.make_rmem_tensor(KEYS, Float32)
                    decay = cute.make_rmem_tensor(KEYS, Float32)
                    for j in cutlass.range_constexpr(KEYS // 4):
                        quad_q = _piece(qkv_smem, number * channels + j * 32, lane)
                        quad_k = _piece(qkv_smem, number * channels + D + j * 32, lane)
                        quad_d = _piece(decay_smem, number * D + j * 32, lane)
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
                    beta = _sigmoid(Float32(inputs_smem[number * PITCH + BETA + head % 8]))
                    own_gate = inputs_smem[number * PITCH + GATE + group * rows + lane % rows]
                    gate = _sigmoid(Float32(own_gate))

                    if cutlass.const_expr(several) and i == 0:
                        s.fill(0.0)
                        cute.arch.cp_async_wait_group(0)
                        if source_slot > 0:
                            for p in cutlass.range_constexpr(rows):
                                _take(s, p, buffer_start, own_state)

                    # Recurrence. With S' the decayed state: u = beta (v - S' k), o = S' q + u (k . q), S = S' + u k.
                    square = Float32(0.0)
                    own_o = Float32(0.0)
                    target_offset = Int64(target) * state.stride[0] + own_part
                    for p in cutlass.range_constexpr(rows):
                        if cutlass.const_expr(not several):
                            cute.arch.cp_async_wait_group(c.stages * rows - 1 if walks else rows - 1 - p)
                            _take(s, p, buffer_start, own_state)
                            if cutlass.const_expr(walks):
                                _fetch_state(copy, state, later_source, buffer_start, own_state, later_slot, (p,))
                        s_k, s_q = Float32(0.0), Float32(0.0)
                        for e in cutlass.range_constexpr(KEYS):
                            s[p, e] = s[p, e] * decay[e]
                            s_k += s[p, e] * k[e]
                            s_q += s[p, e] * q[e]
                        u = beta * (qkv_smem[number * channels + 2 * D + group * rows + p] - _sum_lanes(s_k))
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
                        send_f32(squares_smem.iterator + place, square, barrier, thread % 32, thread % 32 < c.split)
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
                                conv_state[slot, 0, column[t]] = older[t][0]
                                conv_state[slot, 1, column[t]] = older[t][1]
                            conv_state[slot, 2 + i, column[t]] = newest[t]
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
        min_blocks_per_mp=c.resident,
    )


def bf16_kda_decode(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, conv_state, state, y, stream):
    _launch(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, None, None, conv_state, state, y, stream=stream)


def bf16_kda_verify(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, accepted, starts, conv_state, state, y, stream):
    _launch(c, x, conv_weight, f_b, a_log, dt_bias, norm_weight, slots, accepted, starts, conv_state, state, y, stream=stream)
