// KDA: conv, gate, recurrence and gated norm of one head of one request at a time. A decode step reads and writes its state once; the
// tokens of a prompt are taken CHUNK at a time.
#pragma once
#include "dense.h"

namespace k3 {
namespace K3_NAMESPACE {

// The head's raw inputs of q, k and v through the short conv and SiLU; moves the window on.
template <class T, class Tc>
static void kda_conv(const Kda& a, const T* packed, int64_t slot, int64_t head, float* out) {
    const int64_t width = a.heads * a.dim;
    for (int64_t part = 0; part < 3; ++part) {
        const int64_t channel = part * width + head * a.dim;
        const T* x = packed + channel;
        const float* taps = a.conv + channel * 4;
        Tc* window = static_cast<Tc*>(a.conv_state) + slot * a.conv_slot + channel * a.conv_channel;
        float* y = out + part * a.dim;
        for (int64_t c = 0; c < a.dim; ++c) {
            Tc *w0 = window + c * a.conv_channel, *w1 = w0 + a.conv_time, *w2 = w1 + a.conv_time, newest;
            store(&newest, widen(x[c]));
            y[c] = widen(*w0) * taps[4 * c] + widen(*w1) * taps[4 * c + 1] + widen(*w2) * taps[4 * c + 2] + widen(newest) * taps[4 * c + 3];
            *w0 = *w1;
            *w1 = *w2;
            *w2 = newest;
        }
        for (int64_t c = 0; c < a.dim; c += W) {
            vf v = load(y + c);
            store(y + c, v * sigmoid(v));
        }
    }
}

static void scale_row(float* x, int64_t d, float factor) {
    for (int64_t i = 0; i < d; i += W) store(x + i, load(x + i) * factor);
}

// S <- S diag(decay); u = beta (v - S k); S <- S + u k^T; o = S q, for R rows of S at a time: S q = (S diag) q + u (k.q).
template <int R>
K3_INLINE void kda_rows(float* state, int64_t d, const float* decay, const float* q, const float* k, const float* v, float beta, float kq, float* o) {
    vf seen[R] = {}, asked[R] = {};
    for (int64_t i = 0; i < d; i += W) {
        vf g = load(decay + i), ki = load(k + i), qi = load(q + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            vf s = load(state + r * d + i) * g;
            seen[r] += s * ki;
            asked[r] += s * qi;
        }
    }
    vf u[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        float update = beta * (v[r] - sum(seen[r]));
        u[r] = broadcast(update);
        o[r] = sum(asked[r]) + update * kq;
    }
    for (int64_t i = 0; i < d; i += W) {
        vf g = load(decay + i), ki = load(k + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(state + r * d + i, load(state + r * d + i) * g + u[r] * ki);
    }
}

// log decays [tokens, dim] of one head, never positive: lower_bound sigmoid(e^A_log (f_b f_a + dt_bias)).
template <class T>
static void kda_log_decay(const Kda& a, int64_t head, const T* packed, int64_t tokens, float* out) {
    const int64_t d = a.dim;
    product(static_cast<const T*>(a.f_b) + head * d * a.rank, a.rank, d, packed + 4 * a.heads * d, a.ldx, tokens, a.rank, out, d);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < d; i += W) {
            vf z = load(out + t * d + i) + load(a.dt_bias + head * d + i);
            store(out + t * d + i, a.lower_bound * sigmoid(a.decay[head] * z));
        }
}

template <class T>
static float kda_beta(const Kda& a, int64_t head, const T* packed) { return sigmoid(widen(packed[4 * a.heads * a.dim + a.rank + head])); }

static void kda_normalise(float* q, float* k, int64_t d) {
    scale_row(q, d, 1.0f / __builtin_sqrtf(sum_of_squares(q, d) + 1e-6f) / __builtin_sqrtf(float(d)));
    scale_row(k, d, 1.0f / __builtin_sqrtf(sum_of_squares(k, d) + 1e-6f));
}

// RMSNorm of a head's output, times the sigmoid of its gate.
template <class T>
static void kda_out(const Kda& a, int64_t head, const T* packed, const float* o, T* out) {
    const T* gate = packed + (3 * a.heads + head) * a.dim;
    const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(o, a.dim) / float(a.dim) + 1e-5f);
    for (int64_t i = 0; i < a.dim; i += W) store(out + i, load(o + i) * inverse * load(a.out_norm + i) * sigmoid(load(gate + i)));
}

template <class T, class Tc>
static void kda_head(const Kda& a, int64_t t, int64_t head) {
    const int64_t d = a.dim, width = a.heads * d, slot = a.slots.at(t);
    const T* packed = static_cast<const T*>(a.packed) + t * a.ldx;
    T* out = static_cast<T*>(a.out) + t * width + head * d;
    if (slot <= 0) {
        for (int64_t i = 0; i < d; ++i) store(out + i, 0.0f);
        return;
    }
    float mixed[3 * MOST_KDA_DIM], decay[MOST_KDA_DIM], o[MOST_KDA_DIM];
    float *q = mixed, *k = mixed + d, *v = mixed + 2 * d;
    kda_conv<T, Tc>(a, packed, slot, head, mixed);
    kda_normalise(q, k, d);
    kda_log_decay(a, head, packed, 1, decay);
    vf kq = {};
    for (int64_t i = 0; i < d; i += W) {
        store(decay + i, exp(load(decay + i)));
        kq += load(k + i) * load(q + i);
    }
    float* state = a.state + slot * a.state_slot + head * d * d;
    const float beta = kda_beta(a, head, packed);
    for (int64_t r = 0; r < d; r += 4) kda_rows<4>(state + r * d, d, decay, q, k, v + r, beta, sum(kq), o + r);
    kda_out(a, head, packed, o, out);
}

// -- prompts -----------------------------------------------------------------------------------------------------------------
// With G_t the sum of the log decays of a chunk up to token t, and S the state before it, the recurrence of the chunk's tokens is
//     (I + A) U = diag(beta) (V - (K e^G) S^T),  A[t, s] = beta_t sum_i k_t[i] k_s[i] e^(G_t - G_s)[i] for s < t
//     O = (Q e^G) S^T + P U,  P[t, s] = sum_i q_t[i] k_s[i] e^(G_t - G_s)[i] for s <= t
//     S <- S e^(G_end) + U^T (K e^(G_end - G))
// A and P are products of k_t e^(G_t - G_m) with k_s e^(G_m - G_s), m the middle token: at the decay's bound of -5 a token both
// exponents stay within 8 * 5 = 40, where fp32 loses nothing. From the chunk's start they would reach 80.
constexpr int64_t CHUNK = 16;

// A head's buffers. `asked`: first of k, then of q, with the decay from the chunk's start; `turned`: the same from its middle.
struct KdaChunk {
    float raw[3][CHUNK + 3][MOST_KDA_DIM];  // inputs of the conv: the three before the chunk, then its own
    float taps[3][4][MOST_KDA_DIM];
    float mixed[3][CHUNK * MOST_KDA_DIM], total[CHUNK * MOST_KDA_DIM];  // q, k, v; G
    float asked[2 * CHUNK * MOST_KDA_DIM], turned[2 * CHUNK * MOST_KDA_DIM], back[CHUNK * MOST_KDA_DIM], ahead[CHUNK * MOST_KDA_DIM];
    float seen[2 * CHUNK * MOST_KDA_DIM], updates[MOST_KDA_DIM * CHUNK], dots[2 * CHUNK * CHUNK], beta[CHUNK];
};

// q, k and v of the chunk's tokens, from its raw inputs, which then become the next chunk's past.
template <class T, class Tc>
static void kda_chunk_conv(const Kda& a, int64_t head, const T* packed, int64_t n, KdaChunk& c) {
    const int64_t d = a.dim;
    for (int64_t part = 0; part < 3; ++part) {
        for (int64_t t = 0; t < n; ++t) {
            const T* x = packed + t * a.ldx + (part * a.heads + head) * d;
            for (int64_t i = 0; i < d; ++i) c.raw[part][3 + t][i] = rounded(widen(x[i]), static_cast<Tc*>(nullptr));
        }
        for (int64_t t = 0; t < n; ++t)
            for (int64_t i = 0; i < d; i += W) {
                vf y = {};
                for (int64_t j = 0; j < 4; ++j) y += load(c.raw[part][t + j] + i) * load(c.taps[part][j] + i);
                store(c.mixed[part] + t * d + i, y * sigmoid(y));
            }
        for (int64_t j = 0; j < 3; ++j)
            for (int64_t i = 0; i < d; i += W) store(c.raw[part][j] + i, load(c.raw[part][n + j] + i));
    }
}

// The factors of q and k that carry the decays between the chunk's start, its tokens and its end. Leaves e^(G_end) in `total`.
static void kda_chunk_decays(int64_t d, int64_t n, KdaChunk& c) {
    const float *q = c.mixed[0], *k = c.mixed[1];
    for (int64_t i = 0; i < d; i += W) {
        for (int64_t t = 1; t < n; ++t) store(c.total + t * d + i, load(c.total + t * d + i) + load(c.total + (t - 1) * d + i));
        const vf middle = load(c.total + n / 2 * d + i), end = load(c.total + (n - 1) * d + i);
        for (int64_t t = 0; t < n; ++t) {
            const vf g = load(c.total + t * d + i), kt = load(k + t * d + i), qt = load(q + t * d + i);
            const vf start = exp(g), turn = exp(g - middle);
            store(c.asked + t * d + i, kt * start);
            store(c.asked + (n + t) * d + i, qt * start);
            store(c.turned + t * d + i, kt * turn);
            store(c.turned + (n + t) * d + i, qt * turn);
            store(c.back + t * d + i, kt / turn);
            store(c.ahead + t * d + i, kt * exp(end - g));
        }
        store(c.total + i, exp(end));  // G is not needed any more
    }
}

// u_t in place of v_t, and o_t in place of what q_t asked of the state, token by token.
static void kda_chunk_solve(int64_t d, int64_t n, KdaChunk& c) {
    float *u = c.mixed[2], *o = c.seen + n * d;
    for (int64_t t = 0; t < n; ++t)
        for (int64_t i = 0; i < d; i += W) {
            vf update = load(u + t * d + i) - load(c.seen + t * d + i), out = load(o + t * d + i);
            for (int64_t s = 0; s < t; ++s) {
                const vf earlier = load(u + s * d + i);
                update -= earlier * c.dots[t * CHUNK + s];
                out += earlier * c.dots[(n + t) * CHUNK + s];
            }
            update *= c.beta[t];
            store(u + t * d + i, update);
            store(o + t * d + i, out + update * c.dots[(n + t) * CHUNK + t]);
        }
}

template <class T, class Tc>
static void kda_chunk(const Kda& a, int64_t head, int64_t at, int64_t n, float* state, KdaChunk& c) {
    const int64_t d = a.dim;
    const T* packed = static_cast<const T*>(a.packed) + at * a.ldx;
    kda_chunk_conv<T, Tc>(a, head, packed, n, c);
    kda_log_decay(a, head, packed, n, c.total);
    for (int64_t t = 0; t < n; ++t) {
        kda_normalise(c.mixed[0] + t * d, c.mixed[1] + t * d, d);
        c.beta[t] = kda_beta(a, head, packed + t * a.ldx);
    }
    kda_chunk_decays(d, n, c);
    product(state, d, d, c.asked, d, 2 * n, d, c.seen, d);
    product(c.back, d, n, c.turned, d, 2 * n, d, c.dots, CHUNK);
    kda_chunk_solve(d, n, c);
    for (int64_t r = 0; r < d; ++r) {
        for (int64_t t = 0; t < n; ++t) c.updates[r * CHUNK + t] = c.mixed[2][t * d + r];
        for (int64_t i = 0; i < d; i += W) store(state + r * d + i, load(state + r * d + i) * load(c.total + i));
    }
    weighted(c.updates, CHUNK, d, c.ahead, d, n, d, state, d);
    for (int64_t t = 0; t < n; ++t) kda_out(a, head, packed + t * a.ldx, c.seen + (n + t) * d, static_cast<T*>(a.out) + ((at + t) * a.heads + head) * d);
}

// All tokens of one request, for one head. A request that is not resumed starts from zero, whatever its slot holds.
template <class T, class Tc>
static void kda_prompt_head(const Kda& a, int64_t request, int64_t head) {
    const int64_t d = a.dim, slot = a.slots.at(request), begin = a.starts[request], end = a.starts[request + 1];
    if (slot <= 0 || begin == end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t i = 0; i < d; ++i) store(static_cast<T*>(a.out) + (t * a.heads + head) * d + i, 0.0f);
        return;
    }
    KdaChunk c;
    float* state = a.state + slot * a.state_slot + head * d * d;
    Tc* past = static_cast<Tc*>(a.conv_state) + slot * a.conv_slot;
    const bool resumed = a.resumed[request];
    for (int64_t i = 0; i < d * d && !resumed; ++i) state[i] = 0;
    for (int64_t part = 0; part < 3; ++part)
        for (int64_t i = 0; i < d; ++i) {
            const int64_t channel = (part * a.heads + head) * d + i;
            for (int64_t j = 0; j < 4; ++j) c.taps[part][j][i] = a.conv[channel * 4 + j];
            for (int64_t j = 0; j < 3; ++j) c.raw[part][j][i] = resumed ? widen(past[j * a.conv_time + channel * a.conv_channel]) : 0.0f;
        }
    for (int64_t at = begin; at < end; at += CHUNK) kda_chunk<T, Tc>(a, head, at, least(CHUNK, end - at), state, c);
    for (int64_t part = 0; part < 3; ++part)
        for (int64_t i = 0; i < d; ++i)
            for (int64_t j = 0; j < 3; ++j) store(past + j * a.conv_time + ((part * a.heads + head) * d + i) * a.conv_channel, c.raw[part][j][i]);
}

template <class T, class Tc>
static void kda_typed(const Kda& a) {
    if (a.starts) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads)
        for (int64_t i = 0; i < a.heads * a.requests; ++i) kda_prompt_head<T, Tc>(a, i / a.heads, i % a.heads);
        return;
    }
    // Heads outside: the threads' shares of f_b and of the parameters stay small.
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t i = 0; i < a.heads * a.tokens; ++i) kda_head<T, Tc>(a, i % a.tokens, i / a.tokens);
}

static void kda(const Kda& a) {
    if (a.type == BF16) return a.conv_type == BF16 ? kda_typed<bf16, bf16>(a) : kda_typed<bf16, float>(a);
    return a.conv_type == BF16 ? kda_typed<float, bf16>(a) : kda_typed<float, float>(a);
}

}  // namespace K3_NAMESPACE
}  // namespace k3
