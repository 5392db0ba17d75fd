// Vectors of one instruction set, in the compiler's own vector types: one source serves every width. K3_LEVEL says which: 0 portable,
// 1 AVX2 with FMA, 2 AVX-512 (F, BW, VL, DQ), 3 with AVX-512-BF16. Everything here stands in the level's namespace and is inlined:
// a function shared between translation units would be linked in whichever instruction set came first.
#pragma once
#include <cstdint>
#if K3_LEVEL >= 1
#include <immintrin.h>
#endif
#include "args.h"

#define K3_INLINE static inline __attribute__((always_inline))

namespace k3 {
namespace K3_NAMESPACE {

constexpr int W = K3_LEVEL >= 2 ? 16 : K3_LEVEL == 1 ? 8 : 4;
typedef float vf __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));

K3_INLINE vf broadcast(float x) { return x - vf{}; }
K3_INLINE vu bits(vf x) { return (vu)x; }
K3_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

K3_INLINE float widen(float x) { return x; }
K3_INLINE float widen(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float y;
    __builtin_memcpy(&y, &wide, 4);
    return y;
}
K3_INLINE vf load(const float* p) {
    vf x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
K3_INLINE vf load(const bf16* p) {
    vh x;
    __builtin_memcpy(&x, p, sizeof x);
    return (vf)(__builtin_convertvector(x, vu) << 16);
}

// Rounded to nearest even; a NaN stays one.
K3_INLINE void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }
K3_INLINE void store(bf16* p, vf x) {
    vu u = bits(x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vh narrow = __builtin_convertvector((vu)(x == x ? rounded : (u >> 16) | 0x40), vh);
    __builtin_memcpy(p, &narrow, sizeof narrow);
}
K3_INLINE void store(float* p, float x) { *p = x; }
K3_INLINE void store(bf16* p, float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    p->bits = uint16_t(x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40);
}
K3_INLINE float rounded(float x, float*) { return x; }
K3_INLINE float rounded(float x, bf16*) {
    bf16 y;
    store(&y, x);
    return widen(y);
}

K3_INLINE float sum(vf x) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 part[W / 4];
    __builtin_memcpy(part, &x, sizeof x);
    v4 s = part[0];
    for (int i = 1; i < W / 4; ++i) s += part[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// e^x = 2^n (1 + m), with m = e^r - 1 from the Taylor series on |r| <= ln(2) / 2, where its eighth term is below half an ulp.
struct Exp {
    vf m, low, high;  // 2^n = low * high: n may be beyond one factor's range
};
K3_INLINE Exp exp_parts(vf x) {
    x = x < -104.0f ? broadcast(-104.0f) : x;
    x = x > 89.0f ? broadcast(89.0f) : x;
    const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vf t = x * 1.44269504f + magic, n = t - magic;
    vf r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vf p = broadcast(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * (r * r) + r;
    typedef int32_t vs __attribute__((vector_size(W * 4)));
    vs k = (vs)(bits(t) - bits(magic)), half = k >> 1;
    return {p, (vf)((vu)(half + 127) << 23), (vf)((vu)(k - half + 127) << 23)};
}
K3_INLINE vf exp(vf x) {
    Exp e = exp_parts(x);
    return (e.m * e.low + e.low) * e.high;
}
K3_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// tanh(|x|) = -m / (2 + m) with m = e^(-2|x|) - 1, which keeps its relative precision where x is small.
K3_INLINE vf tanh(vf x) {
    vu sign = bits(x) & 0x80000000u;
    vf a = (vf)(bits(x) & 0x7fffffffu);
    Exp e = exp_parts(a * -2.0f);
    vf scale = e.low * e.high, m = e.m * scale + (scale - 1.0f);
    return (vf)(bits(-m / (2.0f + m)) | sign);
}
K3_INLINE vf situ(vf gate, vf up, const Situ& s) {
    vf bounded = s.bounded ? s.linear_beta * tanh(up / s.linear_beta) : up;
    return s.beta * tanh(gate / s.beta) * sigmoid(gate) * bounded;
}

// The same for one number: the tail of a row, through the vector code so that both give the same bits.
K3_INLINE float sigmoid(float x) { return sigmoid(broadcast(x))[0]; }
K3_INLINE float exp(float x) { return exp(broadcast(x))[0]; }
K3_INLINE float situ(float gate, float up, const Situ& s) { return situ(broadcast(gate), broadcast(up), s)[0]; }

}  // namespace K3_NAMESPACE
}  // namespace k3
