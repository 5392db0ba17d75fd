// MLA decode in the latent space: this step's cache rows, the absorbed query, attention over the paged cache, values and gate.
#pragma once
#include "dense.h"

namespace k3 {
namespace K3_NAMESPACE {

template <class T, class Tc>
static void mla_rows_typed(const MlaRows& a) {
    for (int64_t t = 0; t < a.tokens; ++t) {
        const T* x = static_cast<const T*>(a.packed) + t * a.ldx;
        norm_row(x, a.q_norm, a.q_rank, a.eps, static_cast<T*>(a.q) + t * a.q_rank);
        const int64_t slot = a.slots.at(t);
        if (slot < 0) continue;
        Tc* row = static_cast<Tc*>(a.cache) + slot / a.block * a.ld_block + slot % a.block * a.ld_row;
        norm_row(x + a.q_rank, a.kv_norm, a.latent, a.eps, row);
        const T* key = x + a.q_rank + a.latent;
        for (int64_t i = 0; i < a.shared; ++i) store(row + a.latent + i, widen(key[i]));
    }
}

template <class T>
static void mla_absorb_typed(const MlaAbsorb& a) {
    constexpr int64_t COLUMNS = 128, TILE = 16;
    const int64_t panels = (a.latent + COLUMNS - 1) / COLUMNS, width = a.latent + a.shared, in = a.nope + a.shared;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.heads * a.nope * a.latent * int64_t(sizeof(T)) > WORTH_THREADS)
    for (int64_t item = 0; item < a.heads * panels; ++item) {
        const int64_t head = item / panels, column = item % panels * COLUMNS, columns = least(COLUMNS, a.latent - column);
        const T* w = static_cast<const T*>(a.w_uk) + head * a.ld_head + column;
        float p[TILE * MOST_DIM], sums[TILE * COLUMNS];
        for (int64_t t = 0; t < a.tokens; t += TILE) {
            const int64_t tokens = least(TILE, a.tokens - t);
            for (int64_t i = 0; i < tokens; ++i) {
                const T* q = static_cast<const T*>(a.q) + ((t + i) * a.heads + head) * in;
                for (int64_t j = 0; j < a.nope; ++j) p[i * a.nope + j] = widen(q[j]);
                for (int64_t j = 0; j < columns; ++j) sums[i * COLUMNS + j] = 0;
            }
            weighted(p, a.nope, tokens, w, a.ld_row, a.nope, columns, sums, COLUMNS);
            for (int64_t i = 0; i < tokens; ++i) {
                const T* q = static_cast<const T*>(a.q) + ((t + i) * a.heads + head) * in;
                T* out = static_cast<T*>(a.out) + ((t + i) * a.heads + head) * width;
                for (int64_t j = 0; j < columns; ++j) store(out + column + j, sums[i * COLUMNS + j]);
                for (int64_t j = 0; j < a.shared && column == 0; ++j) out[a.latent + j] = q[a.nope + j];
            }
        }
    }
}

// One work item: rows [first, last) of one request for all heads, as unnormalised sums with their largest score and total.
template <class T, class Tc>
static void mla_part(const MlaAttend& a, int64_t t, int64_t first, int64_t last, float* sums, float* best, float* total) {
    const T* query = static_cast<const T*>(a.query) + t * a.heads * a.width;
    for (int64_t i = 0; i < a.heads * a.latent; ++i) sums[i] = 0;
    for (int64_t h = 0; h < a.heads; ++h) best[h] = -__builtin_inff(), total[h] = 0;
    for (int64_t at = first, n; at < last; at += n) {
        n = least(least(CONTEXT_TILE, a.block - at % a.block), last - at);
        const Index table = {static_cast<const char*>(a.table) + t * a.ld_table * a.table_bytes, a.table_bytes, 1};
        const Tc* rows = static_cast<const Tc*>(a.cache) + table.at(at / a.block) * a.ld_block + at % a.block * a.ld_row;
        float p[MOST_HEADS * CONTEXT_TILE];
        product(rows, a.ld_row, n, query, a.width, a.heads, a.width, p, CONTEXT_TILE);
        for (int64_t h = 0; h < a.heads; ++h) {
            float *score = p + h * CONTEXT_TILE, most = best[h], added = 0;
            for (int64_t j = 0; j < n; ++j) {
                score[j] *= a.scale;
                most = score[j] > most ? score[j] : most;
            }
            const float base = __builtin_isinf(most) ? 0.0f : most, shrink = exp(best[h] - base);
            for (int64_t j = n; j % W; ++j) score[j] = -__builtin_inff();
            for (int64_t j = 0; j < n; j += W) store(score + j, exp(load(score + j) - base));
            for (int64_t j = 0; j < n; ++j) added += score[j];
            total[h] = total[h] * shrink + added;
            best[h] = most;
            if (shrink != 1.0f)
                for (int64_t c = 0; c < a.latent; ++c) sums[h * a.latent + c] *= shrink;
        }
        weighted(p, CONTEXT_TILE, a.heads, rows, a.ld_row, n, a.latent, sums, a.latent);
    }
}

template <class T, class Tc>
static void mla_attend_typed(const MlaAttend& a) {
    const int64_t size = a.heads * a.latent;
    float *best = a.scratch + a.items * size, *total = best + a.items * a.heads;
#pragma omp parallel num_threads(a.threads) if (a.items > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.items; ++i) {
            const int64_t t = a.item[2 * i], first = a.item[2 * i + 1], last = least(first + a.split, a.lengths.at(t));
            mla_part<T, Tc>(a, t, first, last, a.scratch + i * size, best + i * a.heads, total + i * a.heads);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a.tokens * a.heads; ++row) {
            const int64_t t = row / a.heads, h = row % a.heads;
            float *out = a.out + row * a.latent, most = -__builtin_inff(), sum = 0;
            int64_t begin = 0, end;
            while (begin < a.items && a.item[2 * begin] < t) ++begin;
            for (end = begin; end < a.items && a.item[2 * end] == t; ++end)
                most = best[end * a.heads + h] > most ? best[end * a.heads + h] : most;
            for (int64_t c = 0; c < a.latent; ++c) out[c] = 0;
            const float base = __builtin_isinf(most) ? 0.0f : most;
            for (int64_t i = begin; i < end; ++i) {
                const float own = best[i * a.heads + h], factor = own == -__builtin_inff() ? 0.0f : exp(own - base);
                sum += total[i * a.heads + h] * factor;
                for (int64_t c = 0; c < a.latent; ++c) out[c] += a.scratch[i * size + h * a.latent + c] * factor;
            }
            const float inverse = sum == 0 ? 1.0f : 1.0f / sum;
            for (int64_t c = 0; c < a.latent; ++c) out[c] *= inverse;
        }
    }
}

template <class T>
static void mla_value_typed(const MlaValue& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.heads * a.v * a.latent * int64_t(sizeof(T)) > WORTH_THREADS)
    for (int64_t h = 0; h < a.heads; ++h) {
        float sums[MOST_TOKENS * PANEL];
        for (int64_t row = 0; row < a.v; row += PANEL) {
            const int64_t rows = least(PANEL, a.v - row);
            const T* w = static_cast<const T*>(a.w_uv) + h * a.ld_head + row * a.ld_row;
            for (int64_t t = 0; t < a.tokens; t += MOST_TOKENS) {
                const int64_t tokens = least(MOST_TOKENS, a.tokens - t);
                product(w, a.ld_row, rows, a.lat + (t * a.heads + h) * a.latent, a.heads * a.latent, tokens, a.latent, sums, PANEL);
                for (int64_t i = 0; i < tokens; ++i)
                    for (int64_t r = 0; r < rows; ++r) {
                        const int64_t column = h * a.v + row + r;
                        const float gate = sigmoid(widen(static_cast<const T*>(a.gate)[(t + i) * a.ld_gate + column]));
                        store(static_cast<T*>(a.out) + (t + i) * a.heads * a.v + column, sums[i * PANEL + r] * gate);
                    }
            }
        }
    }
}

static void mla_rows(const MlaRows& a) {
    if (a.type == BF16) return a.cache_type == BF16 ? mla_rows_typed<bf16, bf16>(a) : mla_rows_typed<bf16, float>(a);
    return a.cache_type == BF16 ? mla_rows_typed<float, bf16>(a) : mla_rows_typed<float, float>(a);
}
static void mla_absorb(const MlaAbsorb& a) { return a.type == BF16 ? mla_absorb_typed<bf16>(a) : mla_absorb_typed<float>(a); }
static void mla_attend(const MlaAttend& a) {
    if (a.type == BF16) return a.cache_type == BF16 ? mla_attend_typed<bf16, bf16>(a) : mla_attend_typed<bf16, float>(a);
    return a.cache_type == BF16 ? mla_attend_typed<float, bf16>(a) : mla_attend_typed<float, float>(a);
}
static void mla_value(const MlaValue& a) { return a.type == BF16 ? mla_value_typed<bf16>(a) : mla_value_typed<float>(a); }

}  // namespace K3_NAMESPACE
}  // namespace k3
