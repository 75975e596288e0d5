// A product with bfloat16 weights and unrounded float32 results, on a CPU. See actors/model/native/output_layer.py.
//
// Each result is one sum over the inner dimension, in order. So it has the same bits for every number of rows or threads.

#include "numbers.h"

#include <algorithm>
#include <cmath>

#if defined(__AVX512BF16__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t panel = 64;  // columns whose weights lie together: [size / 2, panel, 2]

// Floats: sums of neighbouring columns. Pairs: two weights of each of these columns.
#ifdef __AVX512BF16__
using Floats = __m512;
using Pairs = __m512bh;
constexpr int64_t most_rows = 6, vectors = 4;  // whose sums and weights fit into the registers

inline Floats add_products(const BFloat16* x, Pairs weights, Floats sums) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), weights);
}
#else
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Pairs __attribute__((vector_size(32)));
constexpr int64_t most_rows = 4, vectors = 2;

// An explicit FMA, because the compiler may reorder other sums, and differently for each number of rows.
inline Floats add_product(float x, Floats weights, Floats sums) {
#ifdef __FMA__
    return _mm256_fmadd_ps(_mm256_set1_ps(x), weights, sums);
#else
    for (int64_t lane = 0; lane < 8; ++lane) sums[lane] = std::fma(x, weights[lane], sums[lane]);
    return sums;
#endif
}

inline Floats add_products(const BFloat16* x, Pairs weights, Floats sums) {
    sums = add_product(load(x[0]), reinterpret_cast<Floats>(weights << 16), sums);
    return add_product(load(x[1]), reinterpret_cast<Floats>(weights & 0xFFFF0000u), sums);
}
#endif

constexpr int64_t lanes = sizeof(Floats) / sizeof(float);

template <typename Vector>
inline Vector read(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// x: [rows, pairs, 2]; weight: [pairs, panel, 2]; bias: [panel]; output: [rows, panel].
template <int64_t rows>
void multiply(const BFloat16* x, const BFloat16* weight, const float* bias, int64_t pairs, float* output) {
    for (int64_t first = 0; first < panel; first += vectors * lanes) {
        Floats sums[rows][vectors];
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t v = 0; v < vectors; ++v) sums[row][v] = read<Floats>(bias + first + v * lanes);
        for (int64_t pair = 0; pair < pairs; ++pair) {
            Pairs weights[vectors];
            for (int64_t v = 0; v < vectors; ++v)
                weights[v] = read<Pairs>(weight + 2 * (pair * panel + first + v * lanes));
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t v = 0; v < vectors; ++v)
                    sums[row][v] = add_products(x + 2 * (row * pairs + pair), weights[v], sums[row][v]);
        }
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t v = 0; v < vectors; ++v)
                std::memcpy(output + row * panel + first + v * lanes, &sums[row][v], sizeof(Floats));
    }
}

template <int64_t rows = most_rows, typename... Arguments>
void multiply_rows(int64_t count, Arguments... arguments) {
    if constexpr (rows > 0) {
        if (count == rows) return multiply<rows>(arguments...);
        multiply_rows<rows - 1>(count, arguments...);
    }
}

}  // namespace

// x: [rows, size]; weight: [panels, size / 2, panel, 2]; bias: [panels, panel]; output: [rows, columns].
extern "C" void output_layer_bfloat16(const BFloat16* x, const BFloat16* weight, const float* bias, int64_t rows,
                                      int64_t size, int64_t columns, int64_t threads, float* output) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < columns; first += panel) {
        const int64_t width = std::min(panel, columns - first);
        for (int64_t row = 0; row < rows; row += most_rows) {
            float results[most_rows * panel];
            const int64_t count = std::min(most_rows, rows - row);
            multiply_rows(count, x + row * size, weight + first * size, bias + first, size / 2, results);
            for (int64_t i = 0; i < count; ++i)
                std::copy_n(results + i * panel, width, output + (row + i) * columns + first);
        }
    }
}
