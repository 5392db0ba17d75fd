// Router with top-k, and the routed MXFP4 experts: pairs grouped by expert, weights decoded in registers, sums in fp32.
#pragma once
#include "dense.h"

namespace k3 {
namespace K3_NAMESPACE {

// PyTorch's descending order: NaN first, then the larger.
K3_INLINE bool before(float a, float b) { return (a > b) || (a != a && b == b); }

static void choose(const Route& a, int64_t t) {
    float *score = a.scores + t * a.experts, *weight = a.weights + t * a.top_k, total = 0;
    int64_t* ids = a.ids + t * a.top_k;
    float keys[MOST_DIM];  // of the chosen so far, in order; abi.cpp holds top_k to it
    int64_t count = 0;
    for (int64_t e = 0; e < a.experts; ++e) {
        score[e] = sigmoid(score[e]);
        const float key = score[e] + a.bias[e];
        if (count == a.top_k && !before(key, keys[count - 1])) continue;
        int64_t place = count < a.top_k ? count++ : count - 1;
        for (; place > 0 && before(key, keys[place - 1]); --place) keys[place] = keys[place - 1], ids[place] = ids[place - 1];
        keys[place] = key, ids[place] = e;
    }
    for (int64_t k = 0; k < a.top_k; ++k) total += weight[k] = score[ids[k]];
    for (int64_t k = 0; k < a.top_k; ++k) weight[k] = (a.renormalise ? weight[k] / (total + 1e-20f) : weight[k]) * a.scaling;
}

template <class Tx>
static void route_typed(const Route& a) {
    const int64_t panels = (a.experts + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(a.threads) if (a.experts * a.k * 4 > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel) {
            const int64_t row = panel * PANEL, rows = least(PANEL, a.experts - row);
            product(a.gate + row * a.k, a.k, rows, static_cast<const Tx*>(a.x), a.ldx, a.tokens, a.k, a.scores + row, a.experts);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.tokens; ++t) choose(a, t);
    }
}
static void route(const Route& a) { return a.type == BF16 ? route_typed<bf16>(a) : route_typed<float>(a); }

// Where column i of a row stands in the order that decoding gives: in each group of 32, the even columns before the odd ones.
K3_INLINE int64_t spread(int64_t i) { return (i & ~int64_t(31)) | (i & 1) << 4 | (i & 31) >> 1; }

// 2^(code - 127); code 0 is subnormal, and 255 (NaN in the format) is not finite.
K3_INLINE float scale_of(uint8_t code) {
    uint32_t u = code ? uint32_t(code) << 23 : 0x00400000u;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}

// W bytes: the columns in their low and in their high nibbles.
struct Nibbles {
    vf even, odd;
};
K3_INLINE Nibbles decode(const uint8_t* p) {
    vb packed;
    __builtin_memcpy(&packed, p, sizeof packed);
    vu b = __builtin_convertvector(packed, vu);
#if K3_LEVEL >= 2
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    return {(vf)_mm512_permutexvar_ps((__m512i)b, table), (vf)_mm512_permutexvar_ps((__m512i)(b >> 4), table)};
#elif K3_LEVEL == 1
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    vu even = (vu)_mm256_permutevar8x32_ps(table, (__m256i)b), odd = (vu)_mm256_permutevar8x32_ps(table, (__m256i)(b >> 4));
    return {(vf)(even | ((b & 8) << 28)), (vf)(odd | ((b & 0x80) << 24))};
#else
    // Twice the value is an integer: 0 1 2 3 | 4 6 | 8 12 for exponents 0 and 1, 2, 3.
    auto value = [](vu n) {
        typedef int32_t vs __attribute__((vector_size(W * 4)));
        vu e = (n >> 1) & 3, m = n & 1;
        vu twice = e == 0 ? m : (m | 2) << (e - (e != 0 ? vu{} + 1 : vu{}));
        vu magnitude = (vu)(__builtin_convertvector((vs)twice, vf) * 0.5f);
        return (vf)(magnitude | ((n & 8) << 28));
    };
    return {value(b & 15), value(b >> 4)};
#endif
}

// out[t * ldo + r] = sum_k w[r, k] x_t[k] for R rows and T token rows x_t in spread order.
template <int R, int T>
static void mx_tile(const uint8_t* w, int64_t ldw, const uint8_t* s, int64_t lds, const float* const* x, int64_t k, float* out, int64_t ldo) {
    vf acc[R][T] = {};
    for (int64_t group = 0; group < k / GROUP; ++group) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) __builtin_prefetch(w + (R + r) * ldw + group * 16);
#pragma GCC unroll 4
        for (int half = 0; half < 16; half += W) {
            Nibbles row[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                row[r] = decode(w + r * ldw + group * 16 + half);
                const float scale = scale_of(s[r * lds + group]);
                row[r].even *= scale;
                row[r].odd *= scale;
            }
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                vf even = load(x[t] + group * GROUP + half), odd = load(x[t] + group * GROUP + 16 + half);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) acc[r][t] = acc[r][t] + row[r].even * even + row[r].odd * odd;
            }
        }
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) out[t * ldo + r] = sum(acc[r][t]);
}

constexpr int MX_ROWS = K3_LEVEL >= 2 ? 4 : 2;

template <int R, int T = 4>
static void mx_tiles(const uint8_t* w, int64_t ldw, const uint8_t* s, int64_t lds, const float* const* x, int64_t tokens, int64_t k, float* out, int64_t ldo) {
    for (; tokens >= T; tokens -= T, x += T, out += T * ldo) mx_tile<R, T>(w, ldw, s, lds, x, k, out, ldo);
    if constexpr (T > 1)
        if (tokens) mx_tiles<R, T - 1>(w, ldw, s, lds, x, tokens, k, out, ldo);
}

static void mx_product(const uint8_t* w, const uint8_t* s, int64_t rows, const float* const* x, int64_t tokens, int64_t k, float* out, int64_t ldo) {
    const int64_t ldw = k / 2, lds = k / GROUP;
    int64_t r = 0;
    for (; r + MX_ROWS <= rows; r += MX_ROWS) mx_tiles<MX_ROWS>(w + r * ldw, ldw, s + r * lds, lds, x, tokens, k, out + r, ldo);
    for (; r < rows; ++r) mx_tiles<1>(w + r * ldw, ldw, s + r * lds, lds, x, tokens, k, out + r, ldo);
}

// hidden = SiTU(w13 x) of one expert's rows [row, row + 32) for all its pairs.
static void experts_in(const Experts& a, int64_t group, int64_t row) {
    const int64_t expert = a.expert[group], rows = least(GROUP, a.width - row);
    const uint8_t *w = a.w13 + expert * a.width * a.latent, *s = a.s13 + expert * 2 * a.width * (a.latent / GROUP);
    auto product_from = [&](int64_t first, const float* const* x, int64_t n, float* out) {
        mx_product(w + first * (a.latent / 2), s + first * (a.latent / GROUP), rows, x, n, a.latent, out, GROUP);
    };
    for (int64_t from = a.first[group]; from < a.first[group + 1]; from += MOST_TOKENS) {
        const int64_t n = least(MOST_TOKENS, a.first[group + 1] - from);
        const float* x[MOST_TOKENS];
        float gate[MOST_TOKENS * GROUP], up[MOST_TOKENS * GROUP], act[GROUP];
        for (int64_t i = 0; i < n; ++i) x[i] = a.spread + a.pairs[from + i] / a.top_k * a.latent;
        product_from(row, x, n, gate);
        product_from(a.width + row, x, n, up);
        for (int64_t i = 0; i < n; ++i) {
            situ_row(gate + i * GROUP, up + i * GROUP, rows, a.situ, act);
            for (int64_t r = 0; r < rows; ++r) a.hidden[(from + i) * a.width + spread(row + r)] = act[r];
        }
    }
}

// out[:, row : row + rows] = sum over pairs of weight w2 hidden, experts in ascending order: no atomics, one order of summation.
template <class T>
static void experts_out(const Experts& a, int64_t row, int64_t rows) {
    float acc[MOST_TOKENS * PANEL] = {};
    for (int64_t group = 0; group < a.groups; ++group) {
        const int64_t at = a.expert[group] * a.latent + row;
        for (int64_t from = a.first[group]; from < a.first[group + 1]; from += MOST_TOKENS) {
            const int64_t n = least(MOST_TOKENS, a.first[group + 1] - from);
            const float* x[MOST_TOKENS];
            float y[MOST_TOKENS * PANEL];
            for (int64_t i = 0; i < n; ++i) x[i] = a.hidden + (from + i) * a.width;
            mx_product(a.w2 + at * (a.width / 2), a.s2 + at * (a.width / GROUP), rows, x, n, a.width, y, PANEL);
            for (int64_t i = 0; i < n; ++i) {
                const int64_t pair = a.pairs[from + i], token = pair / a.top_k;
                for (int64_t r = 0; r < rows; ++r) acc[token * PANEL + r] += a.weights[pair] * y[i * PANEL + r];
            }
        }
    }
    for (int64_t t = 0; t < a.tokens; ++t)
        for (int64_t r = 0; r < rows; ++r) store(static_cast<T*>(a.out) + t * a.latent + row + r, acc[t * PANEL + r]);
}

template <class T>
static void experts_typed(const Experts& a) {
    const int64_t blocks = a.width / GROUP;
#pragma omp parallel num_threads(a.threads) if (a.groups * a.width * a.latent > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.tokens; ++t)
            for (int64_t i = 0; i < a.latent; ++i) a.spread[t * a.latent + spread(i)] = widen(static_cast<const T*>(a.x)[t * a.ldx + i]);
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < a.groups * blocks; ++item) experts_in(a, item / blocks, item % blocks * GROUP);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a.latent; row += PANEL) experts_out<T>(a, row, least(PANEL, a.latent - row));
    }
}
static void experts(const Experts& a) { return a.type == BF16 ? experts_typed<bf16>(a) : experts_typed<float>(a); }

}  // namespace K3_NAMESPACE
}  // namespace k3
