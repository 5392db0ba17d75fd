// Arguments of the CPU kernels, checked by abi.cpp before a kernel sees them, and the table through which one instruction set is
// called. Sizes count elements and are 64 bit, so that no product of them wraps. Leading dimensions are element strides.
#pragma once
#include <cstddef>
#include <cstdint>

namespace k3 {

struct bf16 {
    uint16_t bits;
};
enum Type : int64_t { F32 = 0, BF16 = 1 };

// An index vector as it lies in memory: int32 or int64, with any stride (a column of a block table, for example).
struct Index {
    const void* data;
    int64_t bytes;   // of one entry: 4 or 8
    int64_t stride;  // in entries
    int64_t at(int64_t i) const {
        return bytes == 8 ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
    }
};

struct Situ {
    float beta, linear_beta;
    bool bounded;  // false: the up branch stays as it is
};

struct Linear {  // out [tokens, rows] = x [tokens, k] w^T, w [rows, k]; gate_up: rows pairs (i, rows + i) through SiTU
    const void *x, *w;
    void* out;
    Type x_type, w_type;
    int64_t ldx, ldw, tokens, rows, k;
    int threads;
    Situ situ;
};

struct Mix {  // sources [n, tokens, d] fp32, the last is the prefix; delta (or null) is added to it first, rounded to `type`
    float* sources;
    const void* delta;
    const float *score, *norm;  // norm null: no RMSNorm behind the mixture
    void* out;
    Type type;
    int64_t n, ld_source, tokens, d;
    float eps;
    int threads;
};

struct Norm {  // out [tokens, d] = RMSNorm(x) in `type`; SiTU: x [tokens, 2 d]
    const void* x;
    const float* weight;
    void* out;
    Type type;
    int64_t ldx, tokens, d;
    float eps;
    int threads;
    Situ situ;
};

struct Kda {
    const void* packed;  // [tokens, ldx]: q, k, v, gate, f_a, beta
    void *conv_state, *out;
    float* state;
    const float *conv, *decay, *dt_bias, *out_norm;
    const void* f_b;
    Index slots;
    Type type, conv_type;
    int64_t ldx, tokens, heads, dim, rank;
    int64_t conv_slot, conv_time, conv_channel, state_slot;  // strides
    float lower_bound;
    int threads;
    // Prompts: request r has the tokens [starts[r], starts[r + 1]) and goes on from its slot's state where `resumed`. In a decode
    // step `starts` is null, and each token is a request.
    int64_t requests;
    const int64_t* starts;
    const uint8_t* resumed;
};

struct MlaRows {  // RMSNorm of the query part to q [tokens, q_rank]; RMSNorm of the latent and the shared key into the cache
    const void* packed;
    const float *q_norm, *kv_norm;
    void *q, *cache;
    Index slots;
    Type type, cache_type;
    int64_t ldx, tokens, q_rank, latent, shared, block, ld_block, ld_row;
    float eps;
};

struct MlaAbsorb {  // out [tokens, heads, latent + shared] = [q_nope w_uk | q_pe]
    const void *q, *w_uk;
    void* out;
    Type type;
    int64_t tokens, heads, nope, latent, shared, ld_head, ld_row;
    int threads;
};

struct MlaAttend {
    const void *query, *cache;  // query [tokens, heads, width]
    float* out;                 // [tokens, heads, latent]
    Index lengths;
    const void* table;
    int64_t table_bytes, ld_table;
    Type type, cache_type;
    int64_t tokens, heads, width, latent, block, ld_block, ld_row;
    float scale;
    int threads;
    int64_t split, items;  // context rows of a work item; number of items
    float* scratch;        // mla_scratch(...) floats
    int64_t* item;         // [items, 2]: token, first row
};

struct MlaValue {  // out [tokens, heads * v] = (lat w_uv^T) sigmoid(gate)
    const float* lat;
    const void *w_uv, *gate;
    void* out;
    Type type;
    int64_t tokens, heads, v, latent, ld_head, ld_row, ld_gate;
    int threads;
};

struct Route {
    const void* x;
    const float *gate, *bias;
    int64_t* ids;
    float *weights, *scores;  // scores: scratch [tokens, experts]
    Type type;
    int64_t ldx, tokens, experts, k, top_k;
    bool renormalise;
    float scaling;
    int threads;
};

struct Experts {
    const void* x;
    void* out;
    const uint8_t *w13, *s13, *w2, *s2;
    const float* weights;  // [tokens, top_k]
    Type type;
    int64_t ldx, tokens, latent, width, top_k;
    int threads;
    Situ situ;
    // Pairs (token * top_k + slot) grouped by expert, made by abi.cpp.
    int64_t groups;
    const int64_t *expert, *first, *pairs;  // [groups], [groups + 1], [first[groups]]
    void *placed, *hidden;                  // scratch [tokens, latent], [pairs, width] in the kernels' order, in rows of 128 columns
    float* sums;                            // scratch [tokens, latent]
};

struct Kernels {
    void (*linear)(const Linear&);
    void (*gate_up)(const Linear&);
    void (*mix)(const Mix&);
    void (*rms_norm)(const Norm&);
    void (*situ)(const Norm&);
    void (*kda)(const Kda&);
    void (*mla_rows)(const MlaRows&);
    void (*mla_absorb)(const MlaAbsorb&);
    void (*mla_attend)(const MlaAttend&);
    void (*mla_value)(const MlaValue&);
    void (*route)(const Route&);
    void (*experts)(const Experts&);
};

// One for each translation unit of kernels.cpp; null where the compiler has no such instruction set.
namespace portable { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512bf16 { extern const Kernels kernels; }
#endif

constexpr int64_t MOST_TOKENS = 64, MOST_HEADS = 128, MOST_DIM = 512, MOST_KDA_DIM = 256, CONTEXT_TILE = 64, GROUP = 32;

// Floats of MlaAttend's scratch: each item keeps its sums, its largest score and its total for each head.
inline int64_t mla_scratch(int64_t items, int64_t heads, int64_t latent) { return items * heads * (latent + 2); }

}  // namespace k3
