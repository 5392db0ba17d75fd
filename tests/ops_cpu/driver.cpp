// A program for the sanitizers: every operator, on every instruction set, with shapes and indices drawn at random, valid and not.
// Arrays are heap blocks of exactly the size an operator may touch, so that one element too many is a report. A call with a bad index
// must fail and write nothing; a good one must give finite numbers that agree between instruction sets.
//
//     driver SECONDS [SEED [dense|kda|mla|moe]]     prints the number of valid and of refused cases of each operator
//     driver steady [SEED]                          plays the same cases twice, and prints how often calls allocated each time
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" {
const char* k3_error();
int k3_available(int64_t);
const char* k3_name(int64_t);
int k3_set_level(int64_t);
int k3_linear(const void*, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t, int64_t);
int k3_gate_up(const void*, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t, float, float, int64_t, int64_t);
int k3_mix(float*, int64_t, const void*, const float*, const float*, void*, int64_t, int64_t, int64_t, int64_t, float, int64_t);
int k3_rms_norm(const void*, int64_t, const float*, void*, int64_t, int64_t, int64_t, float);
int k3_situ(const void*, int64_t, void*, int64_t, int64_t, int64_t, float, float, int64_t, int64_t);
int k3_kda(const void*, int64_t, void*, const int64_t*, int64_t, float*, int64_t, const void*, int64_t, int64_t, const float*, const void*, const float*,
           const float*, const float*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, const int64_t*, const uint8_t*, int64_t);
int k3_mla_rows(const void*, int64_t, const float*, const float*, void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int64_t, int64_t,
                int64_t, int64_t, int64_t, int64_t, int64_t, float);
int k3_mla_absorb(const void*, const void*, int64_t, int64_t, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int k3_mla_attend(const void*, const void*, int64_t, int64_t, int64_t, int64_t, int64_t, const void*, int64_t, int64_t, int64_t, const void*, int64_t,
                  int64_t, float*, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t);
int k3_mla_value(const float*, const void*, int64_t, int64_t, const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int k3_route(const void*, int64_t, const float*, const float*, int64_t*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t);
int k3_experts(const void*, int64_t, const int64_t*, const float*, const uint8_t*, const uint8_t*, const uint8_t*, const uint8_t*, void*, int64_t, int64_t,
               int64_t, int64_t, int64_t, int64_t, float, float, int64_t, int64_t);
}

namespace {

std::atomic<bool> counting;  // while an operator runs
std::atomic<int64_t> allocations;
void* counted(void* memory) {
    if (counting) ++allocations;
    return memory;
}

}  // namespace

#ifndef __SANITIZE_ADDRESS__
// In front of the C library's, for everything in this process: the kernels and the OpenMP runtime under them.
extern "C" {
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t), *__libc_memalign(size_t, size_t);
void* malloc(size_t size) { return counted(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void* realloc(void* memory, size_t size) { return counted(__libc_realloc(memory, size)); }
void* aligned_alloc(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
}
#endif

namespace {

std::mt19937_64 random_bits;
bool steady = false;
struct Count {
    int64_t valid, refused;
};
std::map<std::string, Count> cases;

int64_t between(int64_t low, int64_t high) { return low + int64_t(random_bits() % uint64_t(high - low + 1)); }
bool one_in(int64_t n) { return between(1, n) == 1; }
// A server's threads stay; the runtime may keep other memory for another number of them.
int64_t any_threads() {
    const int64_t drawn = between(1, 3);
    return steady ? 2 : drawn;
}

// A heap block of fp32 or bf16 numbers, exactly as long as said.
struct Numbers {
    int64_t type, count;
    std::unique_ptr<uint8_t[]> bytes;
    Numbers(int64_t type, int64_t count, float scale = 1) : type(type), count(count), bytes(new uint8_t[size_t(count * (type ? 2 : 4))]) {
        std::normal_distribution<float> normal(0, scale);
        for (int64_t i = 0; i < count; ++i) {
            const float x = normal(random_bits);
            uint32_t u;
            memcpy(&u, &x, 4);
            if (type) {
                const uint16_t narrow = uint16_t(u >> 16);
                memcpy(bytes.get() + 2 * i, &narrow, 2);
            } else {
                memcpy(bytes.get() + 4 * i, &u, 4);
            }
        }
    }
    void* data() { return bytes.get(); }
    float* floats() { return reinterpret_cast<float*>(bytes.get()); }
    float at(int64_t i) const {
        uint32_t u = 0;
        if (type) {
            uint16_t narrow;
            memcpy(&narrow, bytes.get() + 2 * i, 2);
            u = uint32_t(narrow) << 16;
        } else {
            memcpy(&u, bytes.get() + 4 * i, 4);
        }
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
    Numbers copy() const {
        Numbers made(type, 0);
        made.count = count;
        made.bytes.reset(new uint8_t[size_t(count * (type ? 2 : 4))]);
        memcpy(made.bytes.get(), bytes.get(), size_t(count * (type ? 2 : 4)));
        return made;
    }
    bool same(const Numbers& other) const { return memcmp(bytes.get(), other.bytes.get(), size_t(count * (type ? 2 : 4))) == 0; }
};

[[noreturn]] void stop(const char* op, const char* what) {
    fprintf(stderr, "%s: %s (last message: %s)\n", op, what, k3_error());
    exit(1);
}

void agree(const char* op, const Numbers& first, const Numbers& found) {
    double most = 0, error = 0;
    for (int64_t i = 0; i < first.count; ++i) {
        if (!std::isfinite(found.at(i))) stop(op, "expected finite numbers");
        most = std::fmax(most, std::fabs(first.at(i)));
        error = std::fmax(error, std::fabs(first.at(i) - found.at(i)));
    }
    if (error > most * (first.type ? 0.03 : 1e-3) + 1e-6) stop(op, "instruction sets disagree");
}

// Runs `call(outputs)` on every instruction set from the same outputs, and compares. With `bad`, expects a refusal that changes nothing.
template <class Call>
void everywhere(const char* op, std::vector<Numbers*> outputs, bool bad, Call call) {
    std::vector<Numbers> before, first;
    ++(bad ? cases[op].refused : cases[op].valid);
    for (Numbers* out : outputs) before.push_back(out->copy());
    for (int64_t level = 0; k3_available(level); ++level) {
        if (k3_set_level(level)) stop(op, "set_level failed");
        for (size_t i = 0; i < outputs.size(); ++i) *outputs[i] = before[i].copy();
        counting = true;
        const int failed = call();
        counting = false;
        if (bad != (failed != 0)) stop(op, bad ? "expected a refusal" : "expected a result");
        for (size_t i = 0; i < outputs.size(); ++i) {
            if (bad && !outputs[i]->same(before[i])) stop(op, "a refused call wrote");
            if (!bad && level == 0) first.push_back(outputs[i]->copy());
            if (!bad) agree(op, first[i], *outputs[i]);
        }
    }
}

int64_t any_type() { return between(0, 1); }

void dense() {
    const int64_t type = any_type(), tokens = between(0, 9), rows = between(1, 40), k = between(1, 90), threads = any_threads();
    Numbers x(type, tokens * k), w(type, 2 * rows * k), out(type, tokens * rows), wide(type, tokens * 2 * rows);
    const bool bad = one_in(8), bounded = one_in(2);
    everywhere("linear", {&out}, bad, [&] { return k3_linear(x.data(), bad ? k - 1 : k, w.data(), k, out.data(), type, tokens, rows, k, threads); });
    everywhere("gate_up", {&out}, bad, [&] { return k3_gate_up(x.data(), k, w.data(), bad ? k - 1 : k, out.data(), type, tokens, rows, k, 4, 25, bounded, threads); });
    everywhere("situ", {&out}, bad, [&] { return k3_situ(wide.data(), bad ? 2 * rows - 1 : 2 * rows, out.data(), type, tokens, rows, 4, 25, 1, threads); });
    Numbers norm(0, k), normed(type, tokens * k);
    everywhere("rms_norm", {&normed}, bad, [&] { return k3_rms_norm(x.data(), bad ? k - 1 : k, norm.floats(), normed.data(), type, tokens, k, 1e-5f); });
    const int64_t n = between(1, 5);
    const bool near = bad && n > 1 && tokens;
    Numbers sources(0, n * tokens * k), score(0, k);
    everywhere("mix", {&normed, &sources}, near, [&] {
        return k3_mix(sources.floats(), near ? tokens * k - 1 : tokens * k, x.data(), score.floats(), norm.floats(), normed.data(), type, n, tokens, k, 1e-5f, threads);
    });
}

// An index vector in memory: 4 or 8 bytes an entry, entries apart, nothing behind the last.
struct Entries {
    int64_t bytes = one_in(2) ? 4 : 8, stride = between(1, 3);
    std::unique_ptr<uint8_t[]> memory;
    explicit Entries(const std::vector<int64_t>& values) {
        if (values.empty()) return;
        for (const int64_t value : values)
            if (value != int32_t(value)) bytes = 8;
        memory.reset(new uint8_t[size_t(((int64_t(values.size()) - 1) * stride + 1) * bytes)]);
        for (size_t i = 0; i < values.size(); ++i) {
            const int32_t narrow = int32_t(values[i]);
            memcpy(memory.get() + int64_t(i) * stride * bytes, bytes == 8 ? static_cast<const void*>(&values[i]) : &narrow, size_t(bytes));
        }
    }
};

// Distinct indices in [0, count); with `bad`, one of them is out of range or there twice.
std::vector<int64_t> distinct(int64_t tokens, int64_t count, int64_t low, bool bad) {
    std::vector<int64_t> all, chosen(size_t(tokens), -1);
    for (int64_t i = low; i < count; ++i) all.push_back(i);
    std::shuffle(all.begin(), all.end(), random_bits);
    for (size_t i = 0; i < chosen.size(); ++i)
        if (i < all.size() && !one_in(4)) chosen[i] = all[i];
    if (bad) chosen[size_t(between(0, tokens - 1))] = one_in(2) ? count : INT64_MAX - between(0, 5);
    return chosen;
}

void kda() {
    const int64_t type = any_type(), conv_type = any_type(), tokens = one_in(3) ? between(5, 40) : between(1, 4), heads = between(1, 2), dim = 16 * between(1, 3), rank = between(1, 20);
    const int64_t width = heads * dim, ldx = 4 * width + rank + heads + between(0, 3), count = between(1, 6), threads = any_threads();
    const bool bad = one_in(3), channel_first = one_in(2);
    Numbers packed(type, tokens * ldx), conv_state(conv_type, count * 9 * width), state(0, count * width * dim, 0.3f), out(type, tokens * width);
    Numbers conv(0, 12 * width), f_b(type, width * rank), decay(0, heads), bias(0, width), norm(0, dim);
    const int64_t strides[2][3] = {{9 * width, 3 * width, 1}, {9 * width, 1, 3}};
    const Entries slots(distinct(tokens, count, 1, bad));
    auto run = [&](const Entries& slots, int64_t requests, const int64_t* starts, const uint8_t* resumed) {
        return k3_kda(packed.data(), ldx, conv_state.data(), strides[channel_first], conv_type, state.floats(), width * dim, slots.memory.get(), slots.bytes, slots.stride, conv.floats(),
                      f_b.data(), decay.floats(), bias.floats(), norm.floats(), out.data(), type, tokens, heads, dim, rank, count, -5, requests, starts, resumed, threads);
    };
    everywhere("kda", {&out, &state, &conv_state}, bad, [&] { return run(slots, -1, nullptr, nullptr); });

    // The same tokens as prompts: some requests without tokens, some without a slot, some that go on.
    const int64_t requests = between(1, 4);
    std::unique_ptr<int64_t[]> starts(new int64_t[size_t(requests + 1)]);
    std::unique_ptr<uint8_t[]> resumed(new uint8_t[size_t(requests)]);
    for (int64_t r = 0; r <= requests; ++r) starts[size_t(r)] = r == 0 ? 0 : r == requests ? tokens : between(0, tokens);
    std::sort(starts.get(), starts.get() + requests + 1);
    for (int64_t r = 0; r < requests; ++r) resumed[size_t(r)] = one_in(2);
    const int64_t fault = one_in(3) ? between(1, 3) : 0;
    const Entries owners(distinct(requests, count, 1, fault == 1));
    if (fault == 2) starts[size_t(one_in(2) ? 0 : requests)] += one_in(2) ? 1 : -1;
    if (fault == 3) starts[size_t(between(0, requests))] = one_in(2) ? tokens + between(1, 9) : -between(1, 9);
    everywhere("kda_prompt", {&out, &state, &conv_state}, fault, [&] { return run(owners, requests, starts.get(), resumed.get()); });
}

void mla() {
    const int64_t type = any_type(), cache_type = any_type(), tokens = between(1, 4), heads = between(1, 5), latent = between(1, 40), shared = between(0, 9);
    const int64_t q_rank = between(1, 20), block = between(1, 20), columns = between(1, 20), blocks = between(1, 30), width = latent + shared, threads = any_threads();
    Numbers packed(type, tokens * (q_rank + width)), q_norm(0, q_rank), kv_norm(0, latent), q(type, tokens * q_rank), cache(cache_type, blocks * block * width);
    const bool bad = one_in(3);
    const Entries slots(distinct(tokens, blocks * block, 0, bad));
    everywhere("mla_rows", {&q, &cache}, bad, [&] {
        return k3_mla_rows(packed.data(), q_rank + width, q_norm.floats(), kv_norm.floats(), q.data(), cache.data(), cache_type, blocks, block, block * width, width, slots.memory.get(), slots.bytes,
                           slots.stride, type, tokens, q_rank, latent, shared, 1e-5f);
    });
    Numbers query(type, tokens * heads * width), out(0, tokens * heads * latent);
    std::vector<int32_t> table(size_t(tokens * columns)), lengths(static_cast<size_t>(tokens));
    for (int32_t& id : table) id = int32_t(between(0, blocks - 1));
    for (int32_t& length : lengths) length = int32_t(between(0, columns * block));
    if (bad && one_in(2)) {
        lengths[0] = int32_t(one_in(2) ? columns * block + 1 : -1);
    } else if (bad) {
        lengths[0] = 1;
        table[0] = int32_t(one_in(2) ? blocks : -1);
    }
    everywhere("mla_attend", {&out}, bad, [&] {
        return k3_mla_attend(query.data(), cache.data(), cache_type, blocks, block, block * width, width, table.data(), 4, columns, columns, lengths.data(), 4, 1, out.floats(), type,
                             tokens, heads, width, latent, 0.1f, threads);
    });
    const int64_t nope = between(1, 20), value = between(1, 20);
    Numbers w_uk(type, heads * nope * latent), w_uv(type, heads * value * latent), asked(type, tokens * heads * (nope + shared)), absorbed(type, tokens * heads * width);
    everywhere("mla_absorb", {&absorbed}, bad, [&] {
        return k3_mla_absorb(asked.data(), w_uk.data(), nope * latent, bad ? latent - 1 : latent, absorbed.data(), type, tokens, heads, nope, latent, shared, threads);
    });
    Numbers lat(0, tokens * heads * latent), gate(type, tokens * heads * value), y(type, tokens * heads * value);
    everywhere("mla_value", {&y}, bad, [&] {
        return k3_mla_value(lat.floats(), w_uv.data(), value * latent, latent, gate.data(), bad ? heads * value - 1 : heads * value, y.data(), type, tokens, heads, value, latent, threads);
    });
}

void moe() {
    const int64_t type = any_type(), tokens = between(1, 9), experts = between(1, 12), top_k = between(1, experts), latent = 32 * between(1, 3), width = 32 * between(1, 3);
    const int64_t threads = any_threads();
    Numbers x(type, tokens * latent), gate(0, experts * latent, 0.1f), bias(0, experts), weights(0, tokens * top_k), out(type, tokens * latent);
    std::unique_ptr<int64_t[]> ids(new int64_t[size_t(tokens * top_k)]);
    everywhere("route", {&weights}, false, [&] {
        return k3_route(x.data(), latent, gate.floats(), bias.floats(), ids.get(), weights.floats(), type, tokens, experts, latent, top_k, 1, 1, threads);
    });
    const bool bad = one_in(3);
    if (bad)
        everywhere("route", {&weights}, true, [&] {
            return k3_route(x.data(), latent, gate.floats(), bias.floats(), ids.get(), weights.floats(), type, tokens, experts, latent, experts + 1, 1, 1, threads);
        });
    for (int64_t i = 0; i < tokens * top_k; ++i) {
        if (ids[size_t(i)] < 0 || ids[size_t(i)] >= experts) stop("route", "expected ids of experts");
        if (one_in(5)) ids[size_t(i)] = -between(1, 9);
    }
    if (bad) ids[size_t(between(0, tokens * top_k - 1))] = one_in(2) ? experts : INT64_MAX;
    std::vector<std::unique_ptr<uint8_t[]>> bytes;
    for (const int64_t count : {experts * width * latent, experts * 2 * width * latent / 32, experts * latent * width / 2, experts * latent * width / 32}) {
        bytes.emplace_back(new uint8_t[size_t(count)]);
        const bool scale = bytes.size() % 2 == 0;
        for (int64_t i = 0; i < count; ++i) bytes.back()[size_t(i)] = uint8_t(scale ? between(118, 124) : between(0, 255));
    }
    everywhere("experts", {&out}, bad, [&] {
        return k3_experts(x.data(), latent, ids.get(), weights.floats(), bytes[0].get(), bytes[1].get(), bytes[2].get(), bytes[3].get(), out.data(), type, tokens, top_k, experts, latent, width,
                          4, 25, 1, threads);
    });
}

}  // namespace

struct Group {
    const char* name;
    void (*run)();
};
constexpr Group groups[] = {{"dense", dense}, {"kda", kda}, {"mla", mla}, {"moe", moe}};

int main(int count, char** arguments) {
    const std::string first = count > 1 ? arguments[1] : "1", only = count > 3 ? arguments[3] : "";
    const uint64_t seed = count > 2 ? strtoull(arguments[2], nullptr, 10) : 1;
    steady = first == "steady";
    if (steady) {
        for (int pass = 0; pass < 2; ++pass) {
            random_bits.seed(seed);
            allocations = 0;
            for (int64_t round = 0; round < 20; ++round)
                for (const Group& group : groups) group.run();
            printf("%lld\n", (long long)allocations);
        }
        return 0;
    }
    random_bits.seed(seed);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(atof(first.c_str()));
    do
        for (const Group& group : groups)
            if (only.empty() || only == group.name) group.run();
    while (std::chrono::steady_clock::now() < end);
    for (const auto& [op, made] : cases) printf("%s %lld %lld\n", op.c_str(), (long long)made.valid, (long long)made.refused);
}
