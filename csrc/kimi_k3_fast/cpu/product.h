// Products of a few token rows with many weight rows, and weighted sums of rows: what every kernel below is made of.
// A weight row is read once for up to TOKENS tokens; sums are kept in fp32.
#pragma once
#include "simd.h"

namespace k3 {
namespace K3_NAMESPACE {

constexpr int ROWS = 4, TOKENS = K3_LEVEL >= 2 ? 6 : 3;  // a tile's sums, one vector each, fill the registers but for a few

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// acc[r][t] += the products of columns [i, end), as far as whole vectors go; returns where it stopped. The rows R further on are
// fetched meanwhile: rows of a matrix seldom share a page, and the hardware prefetcher stops at its end.
template <class Tw, class Tx, int R, int T>
K3_INLINE int64_t accumulate(const Tw* w, int64_t ldw, const Tx* x, int64_t ldx, int64_t i, int64_t end, vf (&acc)[R][T]) {
#if K3_LEVEL >= 3
    if constexpr (same<Tw, bf16> && same<Tx, bf16>) {
        for (; i + 2 * W <= end; i += 2 * W) {
            __m512bh row[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                row[r] = (__m512bh)_mm512_loadu_si512(w + r * ldw + i);
                __builtin_prefetch(w + (R + r) * ldw + i);
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                __m512bh column = (__m512bh)_mm512_loadu_si512(x + t * ldx + i);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) acc[r][t] = (vf)_mm512_dpbf16_ps((__m512)acc[r][t], row[r], column);
            }
        }
    }
#endif
    for (; i + W <= end; i += W) {
        vf row[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            row[r] = load(w + r * ldw + i);
            __builtin_prefetch(w + (R + r) * ldw + i);
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            vf column = load(x + t * ldx + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[r][t] += row[r] * column;
        }
    }
    return i;
}

// out[t * ldo + r] = sum_k w[r, k] x[t, k] for R rows and T tokens. Sums over STRETCH columns are added to the total: narrow
// vectors would otherwise add too many terms one after another, and lose more than PyTorch does.
template <class Tw, class Tx, int R, int T>
static void tile(const Tw* w, int64_t ldw, const Tx* x, int64_t ldx, int64_t k, float* out, int64_t ldo) {
    constexpr int64_t STRETCH = 32 * W;
    vf total[R][T] = {};
    int64_t i = 0;
    while (i + W <= k) {
        vf acc[R][T] = {};
        i = accumulate<Tw, Tx, R, T>(w, ldw, x, ldx, i, least(i + STRETCH, k), acc);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) total[r][t] += acc[r][t];
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) {
            float last = sum(total[r][t]);
            for (int64_t j = i; j < k; ++j) last += widen(w[r * ldw + j]) * widen(x[t * ldx + j]);
            out[t * ldo + r] = last;
        }
}

template <class Tw, class Tx, int R, int T = TOKENS>
static void tiles(const Tw* w, int64_t ldw, const Tx* x, int64_t ldx, int64_t tokens, int64_t k, float* out, int64_t ldo) {
    for (; tokens >= T; tokens -= T, x += T * ldx, out += T * ldo) tile<Tw, Tx, R, T>(w, ldw, x, ldx, k, out, ldo);
    if constexpr (T > 1)
        if (tokens) tiles<Tw, Tx, R, T - 1>(w, ldw, x, ldx, tokens, k, out, ldo);
}

// out[t * ldo + r] = sum_k w[r, k] x[t, k] for any number of rows and tokens.
template <class Tw, class Tx>
static void product(const Tw* w, int64_t ldw, int64_t rows, const Tx* x, int64_t ldx, int64_t tokens, int64_t k, float* out, int64_t ldo) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) tiles<Tw, Tx, ROWS>(w + r * ldw, ldw, x, ldx, tokens, k, out + r, ldo);
    for (; r < rows; ++r) tiles<Tw, Tx, 1>(w + r * ldw, ldw, x, ldx, tokens, k, out + r, ldo);
}

// out[t, c] += sum_j p[t, j] rows[j, c] for T tokens and the columns [c, c + n W).
template <class Tr, int T, int N>
K3_INLINE void weighted_tile(const float* p, int64_t ldp, const Tr* rows, int64_t ldr, int64_t n, float* out, int64_t ldo) {
    vf acc[T][N];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
        for (int v = 0; v < N; ++v) acc[t][v] = load(out + t * ldo + v * W);
    for (int64_t j = 0; j < n; ++j) {
        vf row[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; ++v) row[v] = load(rows + j * ldr + v * W);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            for (int v = 0; v < N; ++v) acc[t][v] += p[t * ldp + j] * row[v];
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
        for (int v = 0; v < N; ++v) store(out + t * ldo + v * W, acc[t][v]);
}

template <class Tr, int T>
static void weighted_rows(const float* p, int64_t ldp, const Tr* rows, int64_t ldr, int64_t n, int64_t columns, float* out, int64_t ldo) {
    int64_t c = 0;
    for (; c + 4 * W <= columns; c += 4 * W) weighted_tile<Tr, T, 4>(p, ldp, rows + c, ldr, n, out + c, ldo);
    for (; c + W <= columns; c += W) weighted_tile<Tr, T, 1>(p, ldp, rows + c, ldr, n, out + c, ldo);
    for (; c < columns; ++c)
        for (int t = 0; t < T; ++t)
            for (int64_t j = 0; j < n; ++j) out[t * ldo + c] += p[t * ldp + j] * widen(rows[j * ldr + c]);
}

// out[t, c] += sum_j p[t, j] rows[j, c]; p [tokens, n] fp32, rows [n, columns].
template <class Tr>
static void weighted(const float* p, int64_t ldp, int64_t tokens, const Tr* rows, int64_t ldr, int64_t n, int64_t columns, float* out, int64_t ldo) {
    constexpr int T = K3_LEVEL >= 2 ? 4 : 2;
    int64_t t = 0;
    for (; t + T <= tokens; t += T) weighted_rows<Tr, T>(p + t * ldp, ldp, rows, ldr, n, columns, out + t * ldo, ldo);
    for (; t < tokens; ++t) weighted_rows<Tr, 1>(p + t * ldp, ldp, rows, ldr, n, columns, out + t * ldo, ldo);
}

// Work below this many bytes is done by the calling thread: waking the others costs more.
constexpr int64_t WORTH_THREADS = 1 << 15;

}  // namespace K3_NAMESPACE
}  // namespace k3
