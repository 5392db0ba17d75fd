// One KDA decode step: conv, gate, recurrence and gated norm of one head of one request at a time, the state read and written once.
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
    scale_row(q, d, 1.0f / __builtin_sqrtf(sum_of_squares(q, d) + 1e-6f) / __builtin_sqrtf(float(d)));
    scale_row(k, d, 1.0f / __builtin_sqrtf(sum_of_squares(k, d) + 1e-6f));

    product(static_cast<const T*>(a.f_b) + head * d * a.rank, a.rank, d, packed + 4 * width, 0, 1, a.rank, decay, d);
    for (int64_t i = 0; i < d; i += W) {
        vf z = load(decay + i) + load(a.dt_bias + head * d + i);
        store(decay + i, exp(a.lower_bound * sigmoid(a.decay[head] * z)));
    }
    const float beta = sigmoid(widen(packed[4 * width + a.rank + head]));
    vf kq = {};
    for (int64_t i = 0; i < d; i += W) kq += load(k + i) * load(q + i);

    float* state = a.state + slot * a.state_slot + head * d * d;
    for (int64_t r = 0; r < d; r += 4) kda_rows<4>(state + r * d, d, decay, q, k, v + r, beta, sum(kq), o + r);

    const T* gate = packed + 3 * width + head * d;
    const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(o, d) / float(d) + 1e-5f);
    for (int64_t i = 0; i < d; i += W) store(out + i, load(o + i) * inverse * load(a.out_norm + i) * sigmoid(load(gate + i)));
}

template <class T, class Tc>
static void kda_typed(const Kda& a) {
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
