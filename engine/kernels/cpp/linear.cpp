// Products with the weights of a linear layer, on a CPU. See engine/layers/linear.py.
//
// Each result is one sum in float32 over the input features, always in the same order. So it has the same bits for every
// number of rows or threads. bfloat16 is multiplied in tiles where there are any, with one row as with many. Weights lie
// in panels of neighbouring output features: [panels, size / depth, panel, depth]. Several heads, of which each multiplies
// inputs of its own, have their panels one after another.

#include "products.h"
#include "tiles.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t most_steps = 512;   // of a panel, which then stays in the fastest caches for many rows
constexpr int64_t most_chunk = 192;   // rows whose inputs stay in the next cache for many panels

// How inputs and weights are multiplied.
struct Float32 {
    using Input = float;
    using Stored = float;
    using Weights = Vector;
    static constexpr int64_t depth = 1;                        // input features that are multiplied at once
    static constexpr int most_rows = many_registers ? 12 : 6;  // whose sums and weights fit into the registers

    static Vector add_products(const float* x, Vector weights, Vector sums) { return multiply_add(*x, weights, sums); }
};

struct BFloat16Pairs {
    using Input = BFloat16;
    using Stored = BFloat16;
    static constexpr int64_t depth = 2;
    static constexpr int most_rows = many_registers ? 12 : 4;
#ifdef __AVX512BF16__
    using Weights = __m512bh;

    static Vector add_products(const BFloat16* x, Weights weights, Vector sums) {
        int32_t both;
        std::memcpy(&both, x, sizeof both);
        return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), weights);
    }
#else
    using Weights = Bits;

    static Vector add_products(const BFloat16* x, Weights weights, Vector sums) {
        sums = multiply_add(load(x[0]), (Vector)(weights << 16), sums);
        return multiply_add(load(x[1]), (Vector)(weights & 0xFFFF0000u), sums);
    }
#endif
};

// The same sums for many rows: inputs come as floats, and weights become floats once for all of them.
struct WidenedPairs {
    using Input = float;
    using Stored = BFloat16;
    static constexpr int64_t depth = 2;
    static constexpr int most_rows = Float32::most_rows;
};

// from: [pairs, panel, 2]; to: [2 pairs, panel].
inline void widen_weights(const BFloat16* from, int64_t pairs, float* to) {
    for (int64_t half = 0; half < 2 * pairs; ++half, from += 2 * lanes) {  // of a panel
        Bits both;
        std::memcpy(&both, from, sizeof both);
        float* target = to + half / 2 * 2 * panel + half % 2 * lanes;
        store_vector((Vector)(both << 16), target);
        store_vector((Vector)(both & 0xFFFF0000u), target + panel);
    }
}

template <typename Kind>
inline typename Kind::Weights load_weights(const typename Kind::Stored* from) {
    typename Kind::Weights weights;
    std::memcpy(&weights, from, sizeof weights);
    return weights;
}

// Adds products to sums. x: rows that begin every `stride` numbers; weight: [steps, panel, depth]; sums: [rows, panel].
template <typename Kind, int rows>
void multiply(const typename Kind::Input* __restrict__ x, int64_t stride, const typename Kind::Stored* __restrict__ weight,
              int64_t steps, float* __restrict__ sums) {
    constexpr int64_t depth = Kind::depth;
    Registers<rows> left, right;
    repeat<rows>([&](auto row) {
        left.template at<row>() = load_vector(sums + row * panel);
        right.template at<row>() = load_vector(sums + row * panel + lanes);
    });
    for (int64_t step = 0; step < steps; ++step) {
        const auto left_weights = load_weights<Kind>(weight + step * panel * depth);
        const auto right_weights = load_weights<Kind>(weight + (step * panel + lanes) * depth);
        repeat<rows>([&](auto row) {
            const typename Kind::Input* from = x + row * stride + step * depth;
            Vector &to_left = left.template at<row>(), &to_right = right.template at<row>();
            to_left = Kind::add_products(from, left_weights, to_left);
            to_right = Kind::add_products(from, right_weights, to_right);
        });
    }
    repeat<rows>([&](auto row) {
        store_vector(left.template at<row>(), sums + row * panel);
        store_vector(right.template at<row>(), sums + row * panel + lanes);
    });
}

template <typename Kind, int rows = Kind::most_rows>
void multiply_rows(int64_t count, const typename Kind::Input* x, int64_t stride, const typename Kind::Stored* weight,
                   int64_t steps, float* sums) {
    if constexpr (rows > 0) {
        if (count == rows) return multiply<Kind, rows>(x, stride, weight, steps, sums);
        multiply_rows<Kind, rows - 1>(count, x, stride, weight, steps, sums);
    }
}

// The same for any number of rows, in blocks of at most `block`.
template <typename Kind>
void multiply_chunk(int64_t count, int64_t block, const typename Kind::Input* x, int64_t stride,
                    const typename Kind::Stored* weight, int64_t steps, float* sums) {
    if constexpr (std::is_same_v<Kind, WidenedPairs>) {
        float wide[most_steps * panel];
        widen_weights(weight, steps, wide);
        multiply_chunk<Float32>(count, block, x, stride, wide, 2 * steps, sums);
    } else {
        for (int64_t row = 0; row < count; row += block)
            multiply_rows<Kind>(std::min(block, count - row), x + row * stride, stride, weight, steps, sums + row * panel);
    }
}

struct Call {
    const void *x, *weight;  // x: [rows, heads, size]; weight: see above
    const float* bias;       // [columns], for each head
    int64_t rows, heads, size, columns, threads;
    void* output;  // [rows, heads, columns]

    int64_t panels() const { return divide_up(columns, panel); }  // of a head
};

template <typename Kind, typename Output>
void linear(const Call& call, const typename Kind::Input* x) {
    constexpr int64_t depth = Kind::depth;
    const int64_t rows = call.rows, heads = call.heads, size = call.size, columns = call.columns;
    const auto* weight = static_cast<const typename Kind::Stored*>(call.weight);
    auto* output = static_cast<Output*>(call.output);
    const int64_t chunk = part(rows, most_chunk), block = part(chunk, Kind::most_rows);
    const int64_t all_steps = size / depth, some_steps = part(all_steps, most_steps / depth);
    const int64_t panels = call.panels(), all_panels = heads * panels;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t task = 0; task < divide_up(rows, chunk) * all_panels; ++task) {
        const int64_t first = task / all_panels * chunk, index = task % all_panels, column = index % panels * panel;
        const int64_t count = std::min(chunk, rows - first), width = std::min(panel, columns - column);
        const int64_t row_of_head = first * heads + index / panels;
        float sums[most_chunk * panel];
        for (int64_t row = 0; row < count; ++row)
            std::fill_n(std::copy_n(call.bias + column, width, sums + row * panel), panel - width, 0.0f);
        for (int64_t step = 0; step < all_steps; step += some_steps)
            multiply_chunk<Kind>(count, block, x + row_of_head * size + step * depth, heads * size,
                                 weight + index * panel * size + step * panel * depth,
                                 std::min(some_steps, all_steps - step), sums);
        for (int64_t row = 0; row < count; ++row) {
            Output* to = output + (row_of_head + row * heads) * columns + column;
            for (int64_t i = 0; i < width; ++i) store(sums[row * panel + i], to + i);
        }
    }
}

#ifdef HAS_TILES
// Writes a row's results. A whole panel is a constant number, for which the compiler needs no loop.
template <typename Output>
inline void finish_row(const float* sums, const float* bias, int64_t width, Output* output) {
    if (width == panel) {
        for (int64_t i = 0; i < panel; ++i) store(sums[i] + bias[i], output + i);
    } else {
        for (int64_t i = 0; i < width; ++i) store(sums[i] + bias[i], output + i);
    }
}

// Panels stay in the fastest cache while the rows of a chunk pass by.
template <typename Output>
void linear_by_tiles(const Call& call) {
    constexpr int64_t block = 2 * tiles::rows;
    static_assert(panel == 2 * tiles::columns);
    const int64_t rows = call.rows, heads = call.heads, size = tiles::packed_row(call.size), columns = call.columns;
    const auto* weight = static_cast<const BFloat16*>(call.weight);
    const int64_t rows_of_head = divide_up(rows, tiles::rows) * tiles::rows;  // packed
    BFloat16* const x = tiles::packed_memory(heads * rows_of_head, call.size);
    const int64_t chunk = divide_up(part(rows, most_chunk), block) * block;
    const int64_t panels = call.panels(), all_panels = heads * panels;
    const int64_t pairs = call.size / 2, some_pairs = divide_up(part(pairs, tiles::most_pairs), tiles::pairs) * tiles::pairs;
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows * heads; ++row)
            tiles::pack_row(static_cast<const BFloat16*>(call.x) + row * call.size, call.size,
                            row % heads * rows_of_head + row / heads, x);
        int64_t configured = 0;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < divide_up(rows, chunk) * all_panels; ++task) {
            const int64_t first = task / all_panels * chunk, count = std::min(chunk, rows - first);
            const int64_t index = task % all_panels, head = index / panels;
            const int64_t column = index % panels * panel, width = std::min(panel, columns - column);
            const BFloat16* rows_to_multiply = x + (head * rows_of_head + first) * size;
            alignas(64) float sums[most_chunk * panel];
            for (int64_t pair = 0; pair < pairs; pair += some_pairs) {
                for (int64_t row = 0; row < count; row += block) {
                    const int64_t these = std::min(block, count - row);
                    if (these != configured) tiles::configure(configured = these);
                    const auto multiply = these > tiles::rows ? tiles::multiply<true> : tiles::multiply<false>;
                    multiply(rows_to_multiply + row * size + 2 * pair * tiles::rows, size,
                             weight + index * panel * call.size + 2 * pair * panel, std::min(some_pairs, pairs - pair),
                             sums + row * panel, pair == 0);
                }
            }
            for (int64_t row = 0; row < count; ++row)
                finish_row(sums + row * panel, call.bias + column, width,
                           static_cast<Output*>(call.output) + ((first + row) * heads + head) * columns + column);
        }
        if (configured) _tile_release();
    }
}
#endif

template <typename Output>
void linear_bfloat16(const Call& call) {
    const auto* x = static_cast<const BFloat16*>(call.x);
#ifdef HAS_TILES
    if (tiles::are_allowed()) return linear_by_tiles<Output>(call);
#endif
#ifndef __AVX512BF16__
    if (call.rows > 2 * BFloat16Pairs::most_rows) {
        const int64_t count = call.rows * call.heads * call.size;
        std::vector<float> wide(count);
#pragma omp parallel for num_threads(call.threads)
        for (int64_t i = 0; i < count; ++i) wide[i] = load(x[i]);
        return linear<WidenedPairs, Output>(call, wide.data());
    }
#endif
    linear<BFloat16Pairs, Output>(call, x);
}

}  // namespace

// The number of output features in a panel; 0 if products would be slow here.
extern "C" int64_t linear_panel() { return has_fma ? panel : 0; }

extern "C" void linear_float32(const Call* call) { linear<Float32, float>(*call, static_cast<const float*>(call->x)); }
extern "C" void linear_bfloat16(const Call* call) { linear_bfloat16<BFloat16>(*call); }
extern "C" void linear_bfloat16_to_float32(const Call* call) { linear_bfloat16<float>(*call); }
