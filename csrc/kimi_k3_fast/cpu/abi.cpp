// The C ABI: every edge is checked here, before a pointer is read. A call returns 0, or 1 with a message for k3_error(): what was
// expected, what was found. Nothing is written by a call that fails. Tensors' shapes, dtypes and strides are the caller's to check,
// since only it knows them; the numbers derived from them, and every index, are checked here.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "args.h"

#define K3_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace k3;

thread_local char message[512];

[[gnu::format(printf, 1, 2)]] int fail(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    return 1;
}

std::atomic<int64_t> allocations;

// Memory that a thread keeps between calls: k3_reserve() makes it as large as a deployment's largest step needs.
class Scratch {
public:
    ~Scratch() { free(data_); }
    char* take(int64_t bytes) {
        if (bytes <= size_) return data_;
        free(data_);
        ++allocations;
        size_ = (bytes + 4095) / 4096 * 4096;
        data_ = static_cast<char*>(aligned_alloc(64, size_t(size_)));
        if (!data_) size_ = 0;
        return data_;
    }

private:
    char* data_ = nullptr;
    int64_t size_ = 0;
};
thread_local Scratch scratch;

constexpr int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr int64_t round128(int64_t columns) { return (columns + 127) / 128 * 128; }

enum Level { PORTABLE, AVX2, AVX512, AVX512_BF16, LEVELS };
const char* const names[LEVELS] = {"portable", "avx2", "avx512", "avx512bf16"};

bool available(int level) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (level) {
        case PORTABLE: return true;
        case AVX2: return avx2;
        case AVX512: return avx512;
        case AVX512_BF16: return avx512 && __builtin_cpu_supports("avx512bf16");
    }
    return false;
#else
    return level == PORTABLE;
#endif
}

const Kernels* kernels_of(int level) {
#if defined(__x86_64__)
    switch (level) {
        case AVX2: return &avx2::kernels;
        case AVX512: return &avx512::kernels;
        case AVX512_BF16: return &avx512bf16::kernels;
    }
#endif
    (void)level;
    return &portable::kernels;
}

int best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    int level = LEVELS - 1;
    while (!available(level)) --level;
    return level;
}

int level = best();
const Kernels* run = kernels_of(level);

// -- checks ------------------------------------------------------------------------------------------------------------------

struct Size {
    const char* name;
    int64_t value, low, high, multiple;
};

int check(const char* op, const Size* sizes, int count) {
    for (int i = 0; i < count; ++i) {
        const Size& s = sizes[i];
        if (s.value < s.low || s.value > s.high)
            return fail("%s: expected %s from %lld to %lld, found %lld", op, s.name, (long long)s.low, (long long)s.high, (long long)s.value);
        if (s.value % s.multiple)
            return fail("%s: expected %s a multiple of %lld, found %lld", op, s.name, (long long)s.multiple, (long long)s.value);
    }
    return 0;
}

// No dimension of a real tensor is larger, and the product of three stays within 63 bits.
constexpr int64_t ANY = int64_t(1) << 31, THREADS = 4096;

#define K3_CHECK(op, ...)                                                             \
    do {                                                                              \
        const Size sizes[] = {__VA_ARGS__};                                           \
        if (check(op, sizes, int(sizeof sizes / sizeof *sizes))) return 1;            \
    } while (0)
#define K3_SIZE(value, low, high) Size{#value, value, low, high, 1}
#define K3_TYPE(value) Size{#value, value, 0, 1, 1}

int check_index(const char* op, const char* name, const Index& index, int64_t count, int64_t low, int64_t high) {
    if (index.bytes != 4 && index.bytes != 8) return fail("%s: expected %s of 4 or 8 bytes, found %lld", op, name, (long long)index.bytes);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t value = index.at(i);
        if (value < low || value >= high)
            return fail("%s: expected %s in [%lld, %lld), found %lld in row %lld", op, name, (long long)low, (long long)high, (long long)value, (long long)i);
    }
    return 0;
}

// Two rows of one slot would write it at the same time.
int check_distinct(const char* op, const char* name, const Index& index, int64_t count, int64_t first_live) {
    for (int64_t i = 1; i < count; ++i)
        for (int64_t j = 0; j < i; ++j)
            if (index.at(i) >= first_live && index.at(i) == index.at(j))
                return fail("%s: expected distinct %s, found %lld in rows %lld and %lld", op, name, (long long)index.at(i), (long long)j, (long long)i);
    return 0;
}

constexpr int64_t NO_BOUND = INT64_MIN;

// -- what the operators keep in their thread's memory ------------------------------------------------------------------------

constexpr int64_t MOST_RESERVED = 1 << 16;  // tokens
// MLA: enough items to even out unequal contexts, whatever the number of threads: the result does not depend on it. Shorter items
// than LEAST rows cost more to merge than they save.
constexpr int64_t LEAST = 256, ITEMS = 64;

int64_t attend_bytes(int64_t items, int64_t heads, int64_t latent) { return round64(mla_scratch(items, heads, latent) * 4) + items * 16 + 64; }
int64_t route_bytes(int64_t tokens, int64_t experts) { return tokens * experts * 4 + 64; }

// Pairs grouped by expert, and the kernels' columns.
struct ExpertsMemory {
    int64_t place = 0, expert, first, pairs, placed, sums, hidden, bytes;  // offsets
    ExpertsMemory(int64_t tokens, int64_t top_k, int64_t experts, int64_t latent, int64_t width) {
        const int64_t list = round64((tokens * top_k + 1) * 8), floats = round64(tokens * round128(latent) * 4);
        expert = round64((experts + 1) * 8);
        first = expert + list;
        pairs = first + list;
        placed = pairs + list;
        sums = placed + floats;
        hidden = sums + floats;
        bytes = hidden + round64(tokens * top_k * round128(width) * 4);
    }
};

}  // namespace

// -- the library -------------------------------------------------------------------------------------------------------------

K3_API const char* k3_error() { return message; }
K3_API int k3_available(int64_t wanted) { return wanted >= 0 && wanted < LEVELS && available(int(wanted)); }
K3_API const char* k3_name(int64_t wanted) { return wanted >= 0 && wanted < LEVELS ? names[wanted] : nullptr; }
K3_API int64_t k3_level() { return level; }
K3_API int k3_set_level(int64_t wanted) {
    if (!k3_available(wanted)) return fail("level: expected an instruction set of this machine (up to %d, %s), found %lld", best(), names[best()], (long long)wanted);
    level = int(wanted);
    run = kernels_of(level);
    return 0;
}
K3_API int64_t k3_allocations() { return allocations; }
K3_API int k3_reserve(int64_t tokens, int64_t heads, int64_t latent, int64_t experts, int64_t top_k, int64_t expert_in, int64_t width) {
    constexpr int64_t MOST = 1 << 24;  // no product of these wraps
    K3_CHECK("reserve", K3_SIZE(tokens, 0, MOST_RESERVED), K3_SIZE(heads, 0, MOST_HEADS), K3_SIZE(latent, 0, MOST), K3_SIZE(experts, 0, MOST), K3_SIZE(top_k, 0, MOST_DIM), K3_SIZE(expert_in, 0, MOST),
             K3_SIZE(width, 0, MOST));
    const int64_t wanted[] = {attend_bytes(ITEMS + tokens, heads, latent), route_bytes(tokens, experts), ExpertsMemory(tokens, top_k, experts, expert_in, width).bytes};
    for (const int64_t bytes : wanted)
        if (!scratch.take(bytes)) return fail("reserve: expected %lld bytes of memory, found less", (long long)bytes);
    return 0;
}

// -- operators ---------------------------------------------------------------------------------------------------------------

K3_API int k3_linear(const void* x, int64_t ldx, const void* w, int64_t ldw, void* out, int64_t type, int64_t tokens, int64_t rows, int64_t k, int64_t threads) {
    K3_CHECK("linear", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(rows, 1, ANY), K3_SIZE(k, 1, ANY), K3_SIZE(ldx, k, ANY), K3_SIZE(ldw, k, ANY), K3_SIZE(threads, 1, THREADS));
    run->linear({x, w, out, Type(type), Type(type), ldx, ldw, tokens, rows, k, int(threads), {}});
    return 0;
}

K3_API int k3_gate_up(const void* x, int64_t ldx, const void* w, int64_t ldw, void* out, int64_t type, int64_t tokens, int64_t width, int64_t k, float beta, float linear_beta, int64_t bounded, int64_t threads) {
    K3_CHECK("gate_up", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(width, 1, ANY / 2), K3_SIZE(k, 1, ANY), K3_SIZE(ldx, k, ANY), K3_SIZE(ldw, k, ANY), K3_SIZE(threads, 1, THREADS));
    run->gate_up({x, w, out, Type(type), Type(type), ldx, ldw, tokens, width, k, int(threads), {beta, linear_beta, bounded != 0}});
    return 0;
}

K3_API int k3_mix(float* sources, int64_t ld_source, const void* delta, const float* score, const float* norm, void* out, int64_t type, int64_t n, int64_t tokens, int64_t d, float eps, int64_t threads) {
    K3_CHECK("attn_res", K3_TYPE(type), K3_SIZE(n, 1, 64), K3_SIZE(tokens, 0, ANY), K3_SIZE(d, 1, ANY), K3_SIZE(threads, 1, THREADS));
    if (n > 1 && ld_source < tokens * d) return fail("attn_res: expected sources %lld elements apart or more, found %lld", (long long)(tokens * d), (long long)ld_source);
    run->mix({sources, delta, score, norm, out, Type(type), n, ld_source, tokens, d, eps, int(threads)});
    return 0;
}

K3_API int k3_rms_norm(const void* x, int64_t ldx, const float* weight, void* out, int64_t type, int64_t tokens, int64_t d, float eps) {
    K3_CHECK("rms_norm", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(d, 1, ANY), K3_SIZE(ldx, d, ANY));
    run->rms_norm({x, weight, out, Type(type), ldx, tokens, d, eps, 1, {}});
    return 0;
}

K3_API int k3_situ(const void* x, int64_t ldx, void* out, int64_t type, int64_t tokens, int64_t d, float beta, float linear_beta, int64_t bounded, int64_t threads) {
    K3_CHECK("situ", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(d, 1, ANY / 2), K3_SIZE(ldx, 2 * d, ANY), K3_SIZE(threads, 1, THREADS));
    run->situ({x, nullptr, out, Type(type), ldx, tokens, d, 0, int(threads), {beta, linear_beta, bounded != 0}});
    return 0;
}

// `requests` < 0: a decode step. Otherwise tokens [starts[r], starts[r + 1]) are request r's, resumed[r] says whether it has a past.
K3_API int k3_kda(const void* packed, int64_t ldx, void* conv_state, const int64_t* conv_strides, int64_t conv_type, float* state, int64_t state_slot, const void* slots, int64_t slot_bytes, int64_t slot_stride,
                  const float* conv, const void* f_b, const float* decay, const float* dt_bias, const float* out_norm, void* out, int64_t type, int64_t tokens, int64_t heads, int64_t dim, int64_t rank,
                  int64_t num_slots, float lower_bound, int64_t requests, const int64_t* starts, const uint8_t* resumed, int64_t threads) {
    K3_CHECK("kda", K3_TYPE(type), K3_TYPE(conv_type), K3_SIZE(tokens, 0, ANY), K3_SIZE(heads, 1, ANY), Size{"dim", dim, 16, MOST_KDA_DIM, 16}, K3_SIZE(rank, 1, ANY), K3_SIZE(num_slots, 0, ANY),
             K3_SIZE(requests, -1, ANY), K3_SIZE(threads, 1, THREADS));
    if (ldx < 4 * heads * dim + rank + heads) return fail("kda: expected packed rows of %lld or more, found %lld", (long long)(4 * heads * dim + rank + heads), (long long)ldx);
    if (state_slot < heads * dim * dim) return fail("kda: expected states %lld elements apart or more, found %lld", (long long)(heads * dim * dim), (long long)state_slot);
    const bool prompts = requests >= 0;
    if (prompts) {
        // Beyond, the factors of a chunk would leave fp32's range.
        if (!(lower_bound >= -10 && lower_bound <= 0)) return fail("kda: expected a decay bound from -10 to 0, found %g", double(lower_bound));
        if (starts[0] != 0 || starts[requests] != tokens) return fail("kda: expected starts from 0 to %lld, found %lld to %lld", (long long)tokens, (long long)starts[0], (long long)starts[requests]);
        for (int64_t r = 0; r < requests; ++r)
            if (starts[r] > starts[r + 1]) return fail("kda: expected ascending starts, found %lld before %lld in row %lld", (long long)starts[r], (long long)starts[r + 1], (long long)r);
    }
    const Index index = {slots, slot_bytes, slot_stride};
    const int64_t rows = prompts ? requests : tokens;
    if (check_index("kda", "slots", index, rows, NO_BOUND, num_slots) || check_distinct("kda", "slots", index, rows, 1)) return 1;
    run->kda({packed, conv_state, out, state, conv, decay, dt_bias, out_norm, f_b, index, Type(type), Type(conv_type), ldx, tokens, heads, dim, rank, conv_strides[0], conv_strides[1], conv_strides[2],
              state_slot, lower_bound, int(threads), rows, prompts ? starts : nullptr, resumed});
    return 0;
}

K3_API int k3_mla_rows(const void* packed, int64_t ldx, const float* q_norm, const float* kv_norm, void* q, void* cache, int64_t cache_type, int64_t blocks, int64_t block, int64_t ld_block, int64_t ld_row, const void* slots,
                       int64_t slot_bytes, int64_t slot_stride, int64_t type, int64_t tokens, int64_t q_rank, int64_t latent, int64_t shared, float eps) {
    K3_CHECK("mla_rows", K3_TYPE(type), K3_TYPE(cache_type), K3_SIZE(tokens, 0, ANY), K3_SIZE(q_rank, 1, ANY), K3_SIZE(latent, 1, ANY), K3_SIZE(shared, 0, ANY), K3_SIZE(blocks, 0, ANY), K3_SIZE(block, 1, ANY),
             Size{"ldx", ldx, q_rank + latent + shared, ANY, 1}, Size{"ld_row", ld_row, latent + shared, ANY, 1});
    const Index index = {slots, slot_bytes, slot_stride};
    if (check_index("mla_rows", "slot_mapping", index, tokens, NO_BOUND, blocks * block) || check_distinct("mla_rows", "slot_mapping", index, tokens, 0)) return 1;
    run->mla_rows({packed, q_norm, kv_norm, q, cache, index, Type(type), Type(cache_type), ldx, tokens, q_rank, latent, shared, block, ld_block, ld_row, eps});
    return 0;
}

K3_API int k3_mla_absorb(const void* q, const void* w_uk, int64_t ld_head, int64_t ld_row, void* out, int64_t type, int64_t tokens, int64_t heads, int64_t nope, int64_t latent, int64_t shared, int64_t threads) {
    K3_CHECK("mla_absorb", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(heads, 1, ANY), K3_SIZE(nope, 1, MOST_DIM), K3_SIZE(latent, 1, ANY), K3_SIZE(shared, 0, ANY), K3_SIZE(ld_row, latent, ANY),
             K3_SIZE(threads, 1, THREADS));
    run->mla_absorb({q, w_uk, out, Type(type), tokens, heads, nope, latent, shared, ld_head, ld_row, int(threads)});
    return 0;
}

K3_API int k3_mla_attend(const void* query, const void* cache, int64_t cache_type, int64_t blocks, int64_t block, int64_t ld_block, int64_t ld_row, const void* table, int64_t table_bytes, int64_t ld_table, int64_t columns,
                         const void* lengths, int64_t length_bytes, int64_t length_stride, float* out, int64_t type, int64_t tokens, int64_t heads, int64_t width, int64_t latent, float scale, int64_t threads) {
    K3_CHECK("mla_attend", K3_TYPE(type), K3_TYPE(cache_type), K3_SIZE(tokens, 0, ANY), K3_SIZE(heads, 1, MOST_HEADS), K3_SIZE(width, 1, ANY), K3_SIZE(latent, 1, width), K3_SIZE(blocks, 0, ANY), K3_SIZE(block, 1, ANY),
             K3_SIZE(columns, 0, ANY), K3_SIZE(ld_row, width, ANY), K3_SIZE(threads, 1, THREADS));
    const Index index = {lengths, length_bytes, length_stride};
    if (check_index("mla_attend", "lengths", index, tokens, 0, columns * block + 1)) return 1;
    int64_t total = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        const Index row = {static_cast<const char*>(table) + t * ld_table * table_bytes, table_bytes, 1};
        if (check_index("mla_attend", "block ids", row, (index.at(t) + block - 1) / block, 0, blocks)) return 1;
        total += index.at(t);
    }
    int64_t split = (total / ITEMS + CONTEXT_TILE) / CONTEXT_TILE * CONTEXT_TILE, items = 0;
    if (split < LEAST) split = LEAST;
    for (int64_t t = 0; t < tokens; ++t) items += (index.at(t) + split - 1) / split;
    const int64_t floats = round64(mla_scratch(items, heads, latent) * 4);
    char* memory = scratch.take(attend_bytes(items, heads, latent));
    if (!memory) return fail("mla_attend: expected %lld bytes of memory, found less", (long long)floats);
    int64_t *item = reinterpret_cast<int64_t*>(memory + floats), i = 0;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t first = 0; first < index.at(t); first += split) item[i++] = t, item[i++] = first;
    run->mla_attend({query, cache, out, index, table, table_bytes, ld_table, Type(type), Type(cache_type), tokens, heads, width, latent, block, ld_block, ld_row, scale, int(threads), split, items,
                     reinterpret_cast<float*>(memory), item});
    return 0;
}

K3_API int k3_mla_value(const float* lat, const void* w_uv, int64_t ld_head, int64_t ld_row, const void* gate, int64_t ld_gate, void* out, int64_t type, int64_t tokens, int64_t heads, int64_t v, int64_t latent, int64_t threads) {
    K3_CHECK("mla_value", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(heads, 1, ANY), K3_SIZE(v, 1, ANY), K3_SIZE(latent, 1, ANY), K3_SIZE(ld_row, latent, ANY), Size{"ld_gate", ld_gate, heads * v, ANY, 1},
             K3_SIZE(threads, 1, THREADS));
    run->mla_value({lat, w_uv, gate, out, Type(type), tokens, heads, v, latent, ld_head, ld_row, ld_gate, int(threads)});
    return 0;
}

K3_API int k3_route(const void* x, int64_t ldx, const float* gate, const float* bias, int64_t* ids, float* weights, int64_t type, int64_t tokens, int64_t experts, int64_t k, int64_t top_k, int64_t renormalise, float scaling, int64_t threads) {
    K3_CHECK("route", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(experts, 1, ANY), K3_SIZE(k, 1, ANY), K3_SIZE(ldx, k, ANY), K3_SIZE(threads, 1, THREADS));
    K3_CHECK("route", K3_SIZE(top_k, 1, experts < MOST_DIM ? experts : MOST_DIM));
    char* memory = scratch.take(route_bytes(tokens, experts));
    if (!memory) return fail("route: expected %lld bytes of memory, found less", (long long)(tokens * experts * 4));
    run->route({x, gate, bias, ids, weights, reinterpret_cast<float*>(memory), Type(type), ldx, tokens, experts, k, top_k, renormalise != 0, scaling, int(threads)});
    return 0;
}

K3_API int k3_experts(const void* x, int64_t ldx, const int64_t* ids, const float* weights, const uint8_t* w13, const uint8_t* s13, const uint8_t* w2, const uint8_t* s2, void* out, int64_t type, int64_t tokens, int64_t top_k,
                      int64_t experts, int64_t latent, int64_t width, float beta, float linear_beta, int64_t bounded, int64_t threads) {
    K3_CHECK("experts", K3_TYPE(type), K3_SIZE(tokens, 0, ANY), K3_SIZE(top_k, 1, ANY), K3_SIZE(experts, 1, ANY), Size{"latent", latent, GROUP, ANY, GROUP}, Size{"width", width, GROUP, ANY / 2, GROUP},
             K3_SIZE(ldx, latent, ANY), K3_SIZE(threads, 1, THREADS));
    const Index index = {ids, 8, 1};
    const int64_t slots = tokens * top_k;
    if (check_index("experts", "ids", index, slots, NO_BOUND, experts)) return 1;
    const ExpertsMemory at(tokens, top_k, experts, latent, width);
    char* memory = scratch.take(at.bytes);
    if (!memory) return fail("experts: expected memory for %lld pairs, found less", (long long)slots);
    int64_t *place = reinterpret_cast<int64_t*>(memory + at.place), *expert = reinterpret_cast<int64_t*>(memory + at.expert);  // place: where an expert's next pair goes
    int64_t *first = reinterpret_cast<int64_t*>(memory + at.first), *pairs = reinterpret_cast<int64_t*>(memory + at.pairs);
    memset(place, 0, size_t(experts) * 8);
    for (int64_t i = 0; i < slots; ++i)
        if (ids[i] >= 0) ++place[ids[i]];
    int64_t groups = 0, total = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t count = place[e];
        place[e] = total;
        if (!count) continue;
        expert[groups] = e;
        first[groups++] = total;
        total += count;
    }
    first[groups] = total;
    for (int64_t i = 0; i < slots; ++i)
        if (ids[i] >= 0) pairs[place[ids[i]]++] = i;
    run->experts({x, out, w13, s13, w2, s2, weights, Type(type), ldx, tokens, latent, width, top_k, int(threads), {beta, linear_beta, bounded != 0}, groups, expert, first, pairs,
                  memory + at.placed, memory + at.hidden, reinterpret_cast<float*>(memory + at.sums)});
    return 0;
}
