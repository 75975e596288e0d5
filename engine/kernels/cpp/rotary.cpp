// Rotary position embedding (Su et al., arXiv 2104.09864, in the half-split form of GPT-NeoX) on a CPU. See
// engine/layers/rotary.py.

#include "numbers.h"

namespace {

constexpr int64_t few = 1 << 14;  // elements that one thread does faster than several

struct Call {
    int64_t tokens, heads, kv_heads, head_dim, threads;
    int64_t query_token, query_head, key_token, key_head;  // strides
    const void *query, *key, *cos, *sin;                   // [tokens, head_dim] in the last two
    void *to_query, *to_key;                               // [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
};

// Each product and the sum are rounded, as in transformers.
template <typename T>
void turn(const T* __restrict__ from, const T* __restrict__ cos, const T* __restrict__ sin, int64_t dim,
          T* __restrict__ to) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; ++d) {
        const float first = load(from[d]), second = load(from[half + d]);
        store(rounded<T>(first * load(cos[d])) - rounded<T>(second * load(sin[d])), to + d);
        store(rounded<T>(second * load(cos[half + d])) + rounded<T>(first * load(sin[half + d])), to + half + d);
    }
}

template <typename T>
void rotate(const Call& call) {
    const int64_t dim = call.head_dim, all = call.heads + call.kv_heads;
    const auto *query = static_cast<const T*>(call.query), *key = static_cast<const T*>(call.key);
    auto *to_query = static_cast<T*>(call.to_query), *to_key = static_cast<T*>(call.to_key);
#pragma omp parallel for num_threads(call.threads) if (call.tokens * all * dim > few)
    for (int64_t token = 0; token < call.tokens; ++token) {
        const T* cos = static_cast<const T*>(call.cos) + token * dim;
        const T* sin = static_cast<const T*>(call.sin) + token * dim;
        for (int64_t head = 0; head < call.heads; ++head)
            turn(query + token * call.query_token + head * call.query_head, cos, sin, dim,
                 to_query + (token * call.heads + head) * dim);
        for (int64_t head = 0; head < call.kv_heads; ++head)
            turn(key + token * call.key_token + head * call.key_head, cos, sin, dim,
                 to_key + (token * call.kv_heads + head) * dim);
    }
}

}  // namespace

extern "C" void rotate_float32(const Call* call) { rotate<float>(*call); }
extern "C" void rotate_bfloat16(const Call* call) { rotate<BFloat16>(*call); }
