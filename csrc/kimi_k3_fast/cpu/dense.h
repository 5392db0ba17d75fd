// Projections, gated projections, RMSNorm, SiTU and AttnRes.
#pragma once
#include "product.h"

namespace k3 {
namespace K3_NAMESPACE {

constexpr int64_t PANEL = 16;  // weight rows whose sums stand on the stack before they are written

template <class Tw, class Tx>
static void linear_typed(const Linear& a) {
    const Tw* w = static_cast<const Tw*>(a.w);
    const Tx* x = static_cast<const Tx*>(a.x);
    Tx* out = static_cast<Tx*>(a.out);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.k * int64_t(sizeof(Tw)) > WORTH_THREADS)
    for (int64_t panel = 0; panel < panels; ++panel) {
        float sums[MOST_TOKENS * PANEL];
        const int64_t row = panel * PANEL, rows = least(PANEL, a.rows - row);
        for (int64_t t = 0; t < a.tokens; t += MOST_TOKENS) {
            const int64_t tokens = least(MOST_TOKENS, a.tokens - t);
            product(w + row * a.ldw, a.ldw, rows, x + t * a.ldx, a.ldx, tokens, a.k, sums, PANEL);
            for (int64_t i = 0; i < tokens; ++i)
                for (int64_t r = 0; r < rows; ++r) store(out + (t + i) * a.rows + row + r, sums[i * PANEL + r]);
        }
    }
}

// SiTU of `count` gates and ups, contiguous.
template <class To>
static void situ_row(const float* gate, const float* up, int64_t count, const Situ& s, To* out) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + i, situ(load(gate + i), load(up + i), s));
    for (; i < count; ++i) store(out + i, situ(gate[i], up[i], s));
}

template <class T>
static void gate_up_typed(const Linear& a) {
    const T *w = static_cast<const T*>(a.w), *x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.k * int64_t(sizeof(T)) > WORTH_THREADS)
    for (int64_t panel = 0; panel < panels; ++panel) {
        float gate[MOST_TOKENS * PANEL], up[MOST_TOKENS * PANEL];
        const int64_t row = panel * PANEL, rows = least(PANEL, a.rows - row);
        for (int64_t t = 0; t < a.tokens; t += MOST_TOKENS) {
            const int64_t tokens = least(MOST_TOKENS, a.tokens - t);
            product(w + row * a.ldw, a.ldw, rows, x + t * a.ldx, a.ldx, tokens, a.k, gate, PANEL);
            product(w + (a.rows + row) * a.ldw, a.ldw, rows, x + t * a.ldx, a.ldx, tokens, a.k, up, PANEL);
            for (int64_t i = 0; i < tokens; ++i)
                situ_row(gate + i * PANEL, up + i * PANEL, rows, a.situ, out + (t + i) * a.rows + row);
        }
    }
}

template <class T>
static float sum_of_squares(const T* x, int64_t d) {
    vf acc = {};
    int64_t i = 0;
    for (; i + W <= d; i += W) {
        vf v = load(x + i);
        acc += v * v;
    }
    float total = sum(acc);
    for (; i < d; ++i) total += widen(x[i]) * widen(x[i]);
    return total;
}

// out = x rsqrt(mean(x^2) + eps) weight
template <class Tx, class To>
static void norm_row(const Tx* x, const float* weight, int64_t d, float eps, To* out) {
    const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(x, d) / float(d) + eps);
    int64_t i = 0;
    for (; i + W <= d; i += W) store(out + i, load(x + i) * inverse * load(weight + i));
    for (; i < d; ++i) store(out + i, widen(x[i]) * inverse * weight[i]);
}

template <class T>
static void rms_norm_typed(const Norm& a) {
    for (int64_t t = 0; t < a.tokens; ++t)
        norm_row(static_cast<const T*>(a.x) + t * a.ldx, a.weight, a.d, a.eps, static_cast<T*>(a.out) + t * a.d);
}

template <class T>
static void situ_typed(const Norm& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens * a.d * 8 > WORTH_THREADS)
    for (int64_t t = 0; t < a.tokens; ++t) {
        const T* x = static_cast<const T*>(a.x) + t * a.ldx;
        T* out = static_cast<T*>(a.out) + t * a.d;
        int64_t i = 0;
        for (; i + W <= a.d; i += W) store(out + i, situ(load(x + i), load(x + a.d + i), a.situ));
        for (; i < a.d; ++i) store(out + i, situ(widen(x[i]), widen(x[a.d + i]), a.situ));
    }
}

// One token of AttnRes: p = softmax_j(rsqrt(mean(s_j^2) + eps) <s_j, score>), the mixture sum_j p_j s_j, and the norm behind it.
template <class T>
static void mix_token(const Mix& a, int64_t t) {
    constexpr int64_t MOST = 64;  // sources; abi.cpp holds n to it
    float p[MOST], best = -__builtin_inff(), total = 0;
    float* prefix = a.sources + (a.n - 1) * a.ld_source + t * a.d;
    if (a.delta) {
        const T* delta = static_cast<const T*>(a.delta) + t * a.d;
        for (int64_t i = 0; i < a.d; ++i) prefix[i] = rounded(prefix[i] + widen(delta[i]), static_cast<T*>(nullptr));
    }
    for (int64_t j = 0; j < a.n && a.n > 1; ++j) {
        const float* s = a.sources + j * a.ld_source + t * a.d;
        vf square = {}, dot = {};
        int64_t i = 0;
        for (; i + W <= a.d; i += W) {
            vf v = load(s + i);
            square += v * v;
            dot += v * load(a.score + i);
        }
        float squares = sum(square), dots = sum(dot);
        for (; i < a.d; ++i) {
            squares += s[i] * s[i];
            dots += s[i] * a.score[i];
        }
        p[j] = dots / __builtin_sqrtf(squares / float(a.d) + a.eps);
        best = p[j] > best ? p[j] : best;
    }
    for (int64_t j = 0; j < a.n && a.n > 1; ++j) total += p[j] = exp(p[j] - best);
    if (a.n == 1) p[0] = total = 1;
    for (int64_t j = 0; j < a.n; ++j) p[j] /= total;

    // The mixture is made twice, for its norm and for its value, instead of being kept: the sources are in the cache by now.
    auto mixture = [&](int64_t i) {
        vf m = load(a.sources + t * a.d + i) * p[0];
        for (int64_t j = 1; j < a.n; ++j) m += load(a.sources + j * a.ld_source + t * a.d + i) * p[j];
        return m;
    };
    auto mixture_tail = [&](int64_t i) {
        float m = 0;
        for (int64_t j = 0; j < a.n; ++j) m += a.sources[j * a.ld_source + t * a.d + i] * p[j];
        return m;
    };
    float inverse = 1;
    if (a.norm) {
        vf acc = {};
        int64_t i = 0;
        for (; i + W <= a.d; i += W) {
            vf m = mixture(i);
            acc += m * m;
        }
        float squares = sum(acc);
        for (; i < a.d; ++i) squares += mixture_tail(i) * mixture_tail(i);
        inverse = 1.0f / __builtin_sqrtf(squares / float(a.d) + a.eps);
    }
    T* out = static_cast<T*>(a.out) + t * a.d;
    int64_t i = 0;
    for (; i + W <= a.d; i += W) store(out + i, a.norm ? mixture(i) * inverse * load(a.norm + i) : mixture(i));
    for (; i < a.d; ++i) store(out + i, mixture_tail(i) * inverse * (a.norm ? a.norm[i] : 1.0f));
}

template <class T>
static void mix_typed(const Mix& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.tokens > 1 && a.n * a.tokens * a.d * 4 > WORTH_THREADS)
    for (int64_t t = 0; t < a.tokens; ++t) mix_token<T>(a, t);
}

static void linear(const Linear& a) {
    if (a.w_type == BF16) return linear_typed<bf16, bf16>(a);
    linear_typed<float, float>(a);
}
static void gate_up(const Linear& a) { return a.w_type == BF16 ? gate_up_typed<bf16>(a) : gate_up_typed<float>(a); }
static void rms_norm(const Norm& a) { return a.type == BF16 ? rms_norm_typed<bf16>(a) : rms_norm_typed<float>(a); }
static void situ(const Norm& a) { return a.type == BF16 ? situ_typed<bf16>(a) : situ_typed<float>(a); }
static void mix(const Mix& a) { return a.type == BF16 ? mix_typed<bf16>(a) : mix_typed<float>(a); }

}  // namespace K3_NAMESPACE
}  // namespace k3
