// Attention of few new tokens per row over KV slots, on a CPU. See actors/model/native/attention.py.
//
// Each row reads its own columns. Each kv head is read once for all query heads and tokens that share it. Scores, softmax
// and sums are float32. The compiler vectorises the inner loops for the machine.

#include "numbers.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr float masked_score = -1e30f;
constexpr float least = -80.0f;  // its exponential counts as 0: denormal numbers are slow

struct Shape {
    int64_t rows, heads, kv_heads, head_dim, capacity, width, length, threads;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
};

template <typename T, int64_t D>
class Attention {
    const Shape& shape;
    const int64_t dim, shared;
    std::vector<float> queries, scores, sums, line;

  public:
    explicit Attention(const Shape& shape)
        : shape(shape), dim(D ? D : shape.head_dim), shared(shape.heads / shape.kv_heads) {
        const int64_t count = shared * shape.width;
        queries.resize(count * dim);
        scores.resize(count * shape.length);
        sums.resize(count * dim);
        line.resize(dim);
    }

    // Attends with one kv head of one row: `tokens` tokens read `end` columns.
    void run(const T* query, const T* keys, const T* values, const T* mask, int64_t tokens, int64_t end, float scale,
             T* output) {
        const int64_t dim = D ? D : this->dim, count = shared * tokens;
        for (int64_t i = 0; i < count; ++i) {
            const T* from = query + i / shared * shape.query_token + i % shared * shape.query_head;
            for (int64_t d = 0; d < dim; ++d) queries[i * dim + d] = load(from[d]) * scale;
        }
        for (int64_t column = 0; column < end; ++column) {
            for (int64_t d = 0; d < dim; ++d) line[d] = load(keys[column * dim + d]);
            for (int64_t i = 0; i < count; ++i) {
                float score = 0;
                for (int64_t d = 0; d < dim; ++d) score += queries[i * dim + d] * line[d];
                scores[i * shape.length + column] = score;
            }
        }
        for (int64_t i = 0; i < count; ++i) soften(&scores[i * shape.length], mask + i / shared * shape.length, end);
        std::fill_n(sums.begin(), count * dim, 0.0f);
        for (int64_t column = 0; column < end; ++column) {
            for (int64_t d = 0; d < dim; ++d) line[d] = load(values[column * dim + d]);
            for (int64_t i = 0; i < count; ++i) {
                const float weight = scores[i * shape.length + column];
                for (int64_t d = 0; d < dim; ++d) sums[i * dim + d] += weight * line[d];
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            T* to = output + (i / shared * shape.heads + i % shared) * dim;
            for (int64_t d = 0; d < dim; ++d) store(sums[i * dim + d], to + d);
        }
    }

  private:
    // Turns scores into probabilities; the mask is 0 where a column is visible.
    static void soften(float* scores, const T* mask, int64_t end) {
        float best = masked_score;
        for (int64_t column = 0; column < end; ++column) {
            scores[column] = load(mask[column]) < 0 ? masked_score : scores[column];
            best = std::max(best, scores[column]);
        }
        float total = 0;
        for (int64_t column = 0; column < end; ++column) {
            const float below = scores[column] - best;
            scores[column] = below < least ? 0.0f : exponential(below);
            total += scores[column];
        }
        const float factor = 1 / total;
        for (int64_t column = 0; column < end; ++column) scores[column] *= factor;
    }
};

template <typename T, int64_t D>
void attend(const Shape& shape, const T* query, const T* key, const T* value, T* keys, T* values, const int64_t* slots,
            const int64_t* columns, const int64_t* rows, const int64_t* offsets, const int64_t* ends, const T* mask,
            float scale, T* output) {
    const int64_t dim = D ? D : shape.head_dim, tokens = offsets[shape.rows], shared = shape.heads / shape.kv_heads;
#pragma omp parallel num_threads(shape.threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * shape.kv_heads; ++i) {
            const int64_t token = i / shape.kv_heads, head = i % shape.kv_heads;
            const int64_t offset = ((slots[token] * shape.kv_heads + head) * shape.capacity + columns[token]) * dim;
            std::copy_n(key + token * shape.key_token + head * shape.key_head, dim, keys + offset);
            std::copy_n(value + token * shape.value_token + head * shape.value_head, dim, values + offset);
        }
        Attention<T, D> attention(shape);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < shape.rows * shape.kv_heads; ++i) {
            const int64_t row = i / shape.kv_heads, head = i % shape.kv_heads, first = offsets[row];
            const int64_t offset = (rows[row] * shape.kv_heads + head) * shape.capacity * dim;
            attention.run(query + first * shape.query_token + head * shared * shape.query_head, keys + offset,
                          values + offset, mask + row * shape.width * shape.length, offsets[row + 1] - first, ends[row],
                          scale, output + (first * shape.heads + head * shared) * dim);
        }
    }
}

template <typename T, typename... Arguments>
void choose_dim(const Shape& shape, Arguments... arguments) {
    switch (shape.head_dim) {
        case 64: return attend<T, 64>(shape, arguments...);
        case 128: return attend<T, 128>(shape, arguments...);
        default: return attend<T, 0>(shape, arguments...);
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                               \
    extern "C" void NAME(const Shape* shape, const T* query, const T* key, const T* value, T* keys, T* values,        \
                         const int64_t* slots, const int64_t* columns, const int64_t* rows, const int64_t* offsets,   \
                         const int64_t* ends, const T* mask, float scale, T* output) {                                \
        choose_dim<T>(*shape, query, key, value, keys, values, slots, columns, rows, offsets, ends, mask, scale,      \
                      output);                                                                                        \
    }

EXPORT(attend_float32, float)
EXPORT(attend_bfloat16, BFloat16)
