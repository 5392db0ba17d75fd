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

// 2^(code - 127); code 0 is subnormal, and 255 (NaN in the format) is not finite.
K3_INLINE float scale_of(uint8_t code) {
    uint32_t u = code ? uint32_t(code) << 23 : 0x00400000u;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
}

// A token row as the decoded weights meet it: fp32 in general. `place` is where column i of a row of k columns stands in it: in each
// group of 32, the even columns before the odd ones.
template <class Tx>
struct Token {
    typedef float number;
    static int64_t pitch(int64_t k) { return k; }
    static int64_t place(int64_t i) { return (i & ~int64_t(31)) | (i & 1) << 4 | (i & 31) >> 1; }
};

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

// Rows of weights are taken 32 at a time, and of those, MX_ROWS that lie 32 / MX_ROWS rows apart: as many streams, each in order,
// where one alone would wait for memory. Where this block's codes and scales are read, those of the next one are fetched.
constexpr int MX_ROWS = K3_LEVEL >= 2 ? 4 : 2, MX_APART = GROUP / MX_ROWS;
struct Block {
    const uint8_t *codes, *scales;
};

// out[t * ldo + MX_APART r] = sum_k w[MX_APART r, k] x_t[k] for MX_ROWS rows and T token rows x_t.
template <int T>
static void mx_tile(Block w, Block next, const float* const* x, int64_t k, float* out, int64_t ldo) {
    const int64_t ldw = MX_APART * k / 2, lds = MX_APART * k / GROUP;
    vf acc[MX_ROWS][T] = {};
    for (int64_t group = 0; group < k / GROUP; ++group) {
        if (group % 4 == 0)
            for (int r = 0; r < MX_ROWS; ++r) __builtin_prefetch(next.codes + r * ldw + group * 16);
#pragma GCC unroll 4
        for (int half = 0; half < 16; half += W) {
            Nibbles row[MX_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < MX_ROWS; ++r) {
                row[r] = decode(w.codes + r * ldw + group * 16 + half);
                const float scale = scale_of(w.scales[r * lds + group]);
                row[r].even *= scale;
                row[r].odd *= scale;
            }
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                vf even = load(x[t] + group * GROUP + half), odd = load(x[t] + group * GROUP + 16 + half);
#pragma GCC unroll 4
                for (int r = 0; r < MX_ROWS; ++r) acc[r][t] = acc[r][t] + row[r].even * even + row[r].odd * odd;
            }
        }
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < MX_ROWS; ++r) out[t * ldo + MX_APART * r] = sum(acc[r][t]);
}

#if K3_LEVEL >= 3
// BF16 tokens meet BF16 weights, which E2M1 fits exactly. A vector of codes is 4 groups, one in each quarter; its 16-bit words hold
// 4 codes, so that four look-ups of (word >> 4 i) give the columns 4 j + i. `place` puts a token's columns in that order, 128 at a
// time, zeros behind the last. A quarter's sum then takes its group's scale in fp32: 2 instructions for 16 weights and no rounding.
template <>
struct Token<bf16> {
    typedef bf16 number;
    static int64_t pitch(int64_t k) { return (k + 127) / 128 * 128; }
    static int64_t place(int64_t i) { return (i & ~int64_t(127)) | (i & 3) << 5 | (i & 127) >> 2; }
};

// Twice the 16 values: the look-up's index has a fifth bit, which belongs to the next code.
alignas(64) constexpr uint16_t E2M1[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                           0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
K3_INLINE __m512bh e2m1(__m512i codes, __m512i table) { return (__m512bh)_mm512_permutexvar_epi16(codes, table); }

// The scales of 4 groups from their codes, each in all lanes of its quarter.
K3_INLINE vf quarter_scales(uint32_t codes) {
    const __m512i to_top = _mm512_set_epi32(0x03ffffff, 0x03ffffff, 0x03ffffff, 0x03ffffff, 0x02ffffff, 0x02ffffff, 0x02ffffff, 0x02ffffff, 0x01ffffff, 0x01ffffff,
                                            0x01ffffff, 0x01ffffff, 0x00ffffff, 0x00ffffff, 0x00ffffff, 0x00ffffff);
    const __m512i exponent = _mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(int(codes)), to_top), 1);
    return (vf)_mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000));
}

template <int T>
static void mx_tile(Block w, Block next, const bf16* const* x, int64_t k, float* out, int64_t ldo) {
    const int64_t ldw = MX_APART * k / 2, lds = MX_APART * k / GROUP;
    const __m512i table = _mm512_load_si512(E2M1);
    vf acc[MX_ROWS][T] = {};
    for (int64_t at = 0; at < k; at += 128) {
        const int64_t groups = least(4, (k - at) / GROUP);
        const __mmask64 real = groups == 4 ? ~__mmask64(0) : (__mmask64(1) << 16 * groups) - 1;
#pragma GCC unroll 4
        for (int r = 0; r < MX_ROWS; ++r) {
            __builtin_prefetch(next.codes + r * ldw + at / 2);
            const __m512i word = _mm512_maskz_loadu_epi8(real, w.codes + r * ldw + at / 2);
            const uint8_t* s = w.scales + r * lds + at / GROUP;
            uint32_t scales = 0;
            if (groups == 4)
                __builtin_memcpy(&scales, s, 4);
            else
                for (int64_t g = 0; g < groups; ++g) scales |= uint32_t(s[g]) << 8 * g;
            const vf scale = quarter_scales(scales);
            const __m512bh v0 = e2m1(word, table), v1 = e2m1(_mm512_srli_epi16(word, 4), table);
            const __m512bh v2 = e2m1(_mm512_srli_epi16(word, 8), table), v3 = e2m1(_mm512_srli_epi16(word, 12), table);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                const bf16* token = x[t] + at;
                __m512 one = _mm512_dpbf16_ps(_mm512_setzero_ps(), v0, (__m512bh)_mm512_loadu_si512(token));
                __m512 two = _mm512_dpbf16_ps(_mm512_setzero_ps(), v1, (__m512bh)_mm512_loadu_si512(token + 32));
                one = _mm512_dpbf16_ps(one, v2, (__m512bh)_mm512_loadu_si512(token + 64));
                two = _mm512_dpbf16_ps(two, v3, (__m512bh)_mm512_loadu_si512(token + 96));
                acc[r][t] += (vf)_mm512_add_ps(one, two) * scale;
            }
        }
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < MX_ROWS; ++r) out[t * ldo + MX_APART * r] = sum(acc[r][t]);
}
#endif

template <class Tx, int T = 4>
static void mx_tiles(Block w, Block next, const Tx* const* x, int64_t tokens, int64_t k, float* out, int64_t ldo) {
    for (; tokens >= T; tokens -= T, x += T, out += T * ldo) mx_tile<T>(w, next, x, k, out, ldo);
    if constexpr (T > 1)
        if (tokens) mx_tiles<Tx, T - 1>(w, next, x, tokens, k, out, ldo);
}

// out[t, r] = sum_k w[r, k] x_t[k] for a block of 32 rows; out [tokens, 32].
template <class Tx>
static void mx_product(Block w, Block next, const Tx* const* x, int64_t tokens, int64_t k, float* out) {
    for (int64_t byte = 0; byte < k; byte += 64) __builtin_prefetch(next.scales + byte);
    for (int64_t r = 0; r < MX_APART; ++r) {
        const int64_t codes = r * k / 2, scales = r * k / GROUP;
        mx_tiles<Tx>({w.codes + codes, w.scales + scales}, {next.codes + codes, next.scales}, x, tokens, k, out + r, GROUP);
    }
}

// Rows [row, row + 32) of expert e of a matrix [experts, rows, k].
K3_INLINE Block block_of(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k, int64_t e, int64_t row) {
    return {codes + (e * rows + row) * (k / 2), scales + (e * rows + row) * (k / GROUP)};
}

// The tokens' columns, and the hidden ones between the two products, in the order and type that the weights meet.
template <class T>
static void experts_place(const Experts& a, int64_t t) {
    typedef typename Token<T>::number Tx;
    const T* x = static_cast<const T*>(a.x) + t * a.ldx;
    Tx* placed = static_cast<Tx*>(a.placed) + t * Token<T>::pitch(a.latent);
    for (int64_t i = 0; i < Token<T>::pitch(a.latent); ++i) store(placed + Token<T>::place(i), i < a.latent ? widen(x[i]) : 0.0f);
}

// hidden = SiTU(w13 x) of one expert's rows [row, row + 32) for all its pairs.
template <class T>
static void experts_in(const Experts& a, int64_t group, int64_t row) {
    typedef typename Token<T>::number Tx;
    const int64_t expert = a.expert[group], pitch = Token<T>::pitch(a.width);
    const Block gates = block_of(a.w13, a.s13, 2 * a.width, a.latent, expert, row), ups = block_of(a.w13, a.s13, 2 * a.width, a.latent, expert, a.width + row);
    const Block after = row + GROUP < a.width ? block_of(a.w13, a.s13, 2 * a.width, a.latent, expert, row + GROUP) : gates;
    for (int64_t from = a.first[group]; from < a.first[group + 1]; from += MOST_TOKENS) {
        const int64_t n = least(MOST_TOKENS, a.first[group + 1] - from);
        const Tx* x[MOST_TOKENS];
        float gate[MOST_TOKENS * GROUP], up[MOST_TOKENS * GROUP], act[GROUP];
        for (int64_t i = 0; i < n; ++i) x[i] = static_cast<const Tx*>(a.placed) + a.pairs[from + i] / a.top_k * Token<T>::pitch(a.latent);
        mx_product(gates, ups, x, n, a.latent, gate);
        mx_product(ups, after, x, n, a.latent, up);
        for (int64_t i = 0; i < n; ++i) {
            Tx* hidden = static_cast<Tx*>(a.hidden) + (from + i) * pitch;
            situ_row(gate + i * GROUP, up + i * GROUP, GROUP, a.situ, act);
            for (int64_t r = 0; r < GROUP; ++r) store(hidden + Token<T>::place(row + r), act[r]);
            for (int64_t column = a.width; column < pitch && row + GROUP == a.width; ++column) store(hidden + Token<T>::place(column), 0.0f);
        }
    }
}

// out[:, row : row + 32] = sum over pairs of weight w2 hidden, experts in ascending order: no atomics, one order of summation.
template <class T>
static void experts_out(const Experts& a, int64_t row) {
    typedef typename Token<T>::number Tx;
    for (int64_t t = 0; t < a.tokens; ++t)
        for (int64_t r = 0; r < GROUP; ++r) a.sums[t * a.latent + row + r] = 0;
    for (int64_t group = 0; group < a.groups; ++group) {
        const bool last = group + 1 == a.groups;
        const Block w = block_of(a.w2, a.s2, a.latent, a.width, a.expert[group], row);
        const Block next = block_of(a.w2, a.s2, a.latent, a.width, a.expert[last ? 0 : group + 1], last && row + GROUP < a.latent ? row + GROUP : row);
        for (int64_t from = a.first[group]; from < a.first[group + 1]; from += MOST_TOKENS) {
            const int64_t n = least(MOST_TOKENS, a.first[group + 1] - from);
            const Tx* x[MOST_TOKENS];
            float y[MOST_TOKENS * GROUP];
            for (int64_t i = 0; i < n; ++i) x[i] = static_cast<const Tx*>(a.hidden) + (from + i) * Token<T>::pitch(a.width);
            mx_product(w, next, x, n, a.width, y);
            for (int64_t i = 0; i < n; ++i) {
                const int64_t pair = a.pairs[from + i];
                float* sums = a.sums + pair / a.top_k * a.latent + row;
                for (int64_t r = 0; r < GROUP; ++r) sums[r] += a.weights[pair] * y[i * GROUP + r];
            }
        }
    }
    for (int64_t t = 0; t < a.tokens; ++t)
        for (int64_t r = 0; r < GROUP; ++r) store(static_cast<T*>(a.out) + t * a.latent + row + r, a.sums[t * a.latent + row + r]);
}

template <class T>
static void experts_typed(const Experts& a) {
    const int64_t blocks = a.width / GROUP;
#pragma omp parallel num_threads(a.threads) if (a.groups * a.width * a.latent > WORTH_THREADS)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a.tokens; ++t) experts_place<T>(a, t);
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < a.groups * blocks; ++item) experts_in<T>(a, item / blocks, item % blocks * GROUP);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a.latent; row += GROUP) experts_out<T>(a, row);
    }
}
static void experts(const Experts& a) { return a.type == BF16 ? experts_typed<bf16>(a) : experts_typed<float>(a); }

}  // namespace K3_NAMESPACE
}  // namespace k3
