// Rotary position embedding (Su et al., arXiv 2104.09864, in the half-split form of GPT-NeoX) on a CPU. See
// actors/model/native/rotary.py.

#include "numbers.h"

namespace {

constexpr int64_t few = 1 << 14;  // elements that one thread does faster than several

struct Shape {
    int64_t tokens, heads, kv_heads, head_dim, threads;
    int64_t query_token, query_head, key_token, key_head;  // strides
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

// cos, sin: [tokens, head_dim]; to_query: [tokens, heads, head_dim], to_key: [tokens, kv_heads, head_dim].
template <typename T>
void rotate(const Shape& shape, const T* query, const T* key, const T* cos, const T* sin, T* to_query, T* to_key) {
    const int64_t dim = shape.head_dim, all = shape.heads + shape.kv_heads;
#pragma omp parallel for num_threads(shape.threads) if (shape.tokens * all * dim > few)
    for (int64_t token = 0; token < shape.tokens; ++token) {
        const T *its_cos = cos + token * dim, *its_sin = sin + token * dim;
        for (int64_t head = 0; head < shape.heads; ++head)
            turn(query + token * shape.query_token + head * shape.query_head, its_cos, its_sin, dim,
                 to_query + (token * shape.heads + head) * dim);
        for (int64_t head = 0; head < shape.kv_heads; ++head)
            turn(key + token * shape.key_token + head * shape.key_head, its_cos, its_sin, dim,
                 to_key + (token * shape.kv_heads + head) * dim);
    }
}

}  // namespace

extern "C" void rotate_float32(const Shape* shape, const float* query, const float* key, const float* cos,
                               const float* sin, float* to_query, float* to_key) {
    rotate(*shape, query, key, cos, sin, to_query, to_key);
}

extern "C" void rotate_bfloat16(const Shape* shape, const BFloat16* query, const BFloat16* key, const BFloat16* cos,
                                const BFloat16* sin, BFloat16* to_query, BFloat16* to_key) {
    rotate(*shape, query, key, cos, sin, to_query, to_key);
}
