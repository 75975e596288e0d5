// Products with weights of 4 or 8 bits in groups, whatever form inputs are multiplied in.
//
// A weight is scale · (code − zero) + offset, with a scale and an offset for each group of input features. A group's codes
// are multiplied as they are; its sum is then scaled, so weights are never rounded. Each result is one sum in float32,
// always in the same order: it has the same bits for every number of rows or threads.
//
// Codes lie in words of 32 bits, of one output feature: [panels, size / codes in a word, panel]. The halves of a word hold
// the even and the odd ones, so that a mask makes two numbers of bfloat16 out of it, or four of 8 bits.

#pragma once

#include "products.h"

#include <algorithm>

constexpr int64_t most_inputs = 1024;  // input features whose codes stay in the fastest cache for many rows
constexpr int64_t most_chunk = 192;    // rows whose inputs stay in the next cache for many panels
constexpr int64_t few = 1 << 14;       // numbers that one thread reads faster than several

struct QuantizedMatrix {
    const uint32_t* codes;
    const void *scales, *offsets;  // [panels, size / group, panel]; offsets: null if they are zero
    const float* table;            // the 16 numbers that codes of 4 bits stand for; null if they are integers
    // floats: codes are numbers of type float8_e4m3fn. rounds_inputs: to 8 bits.
    int64_t bits, floats, rounds_inputs, zero, group, size;
    Number scale_kind;
};

struct QuantizedCall {
    QuantizedMatrix weight;
    const void* x;      // [rows, size]
    const float* bias;  // [columns]
    Number x_kind, output_kind;
    int64_t rows, columns, threads;
    void* output;  // [rows, columns]
};

void multiply_rounded(const QuantizedCall& call);  // with inputs rounded to 8 bits

template <int from, int to>
inline Bits moved(Bits bits) {
    if constexpr (to >= from) return bits << (to - from);
    return bits >> (from - to);
}

// Where an input's code begins in its word.
template <int bits>
constexpr int place(int input) { return input % 2 * 16 + input / 2 * bits; }

// Scales or offsets of a panel's groups, as floats or halves.
struct Scales {
    const void* numbers;
    bool wide;

    Scales from(int64_t index) const {  // null stays null
        const int64_t bytes = index * (wide ? sizeof(float) : sizeof(uint16_t));
        return {numbers ? static_cast<const char*>(numbers) + bytes : nullptr, wide};
    }

    Vector load(int64_t index) const {
        if (wide) return load_vector(static_cast<const float*>(numbers) + index);
        const auto* halves = static_cast<const uint16_t*>(numbers) + index;
#if defined(__AVX512F__)
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#elif defined(__AVX2__) && defined(__F16C__)
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#else
        Vector result;
        for (int64_t lane = 0; lane < lanes; ++lane) result[lane] = widen_half(halves[lane]);
        return result;
#endif
    }
};

inline Bits load_words(const uint32_t* from) {
    Bits words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

// Brings words into the cache that are needed a little later. Between products the processor sees them too late.
inline void fetch_ahead(const uint32_t* words) {
    constexpr int64_t ahead = 32 * panel, line = 16;
    for (int64_t word = 0; word < panel; word += line) __builtin_prefetch(words + ahead + word);
}

// Some groups of a panel.
struct Groups {
    const uint32_t* codes;
    Scales scales, offsets;
    int64_t count, words;  // words: of a group
    float zero;
    const float* table;
};

// What a group's products begin with, so that weights may be larger than they should be by `shift`, what they come to, and
// what its inputs add up to. Inputs that are multiplied as integers have their own.
inline Vector begun(float total, float shift) { return spread(-shift * total); }
inline Vector finished(Vector products, float) { return products; }
inline float inputs(float total) { return total; }

// Adds products to sums. x: rows that begin every `stride` numbers; totals: what is known of each group's inputs, in rows
// that begin every `all_groups`; sums: [rows, panel].
template <typename Kind, int bits, int rows>
void multiply(const typename Kind::Input* __restrict__ x, int64_t stride,
              const typename Kind::Total* __restrict__ totals, int64_t all_groups, const Groups& groups,
              float* __restrict__ sums) {
    constexpr int in_word = 32 / bits;
    const float shift = Kind::template shift<bits> + groups.zero;
    const uint32_t* words = groups.codes;
    for (int64_t group = 0; group < groups.count; ++group) {
        Registers<rows> left, right;
        repeat<rows>([&](auto row) {
            left.template at<row>() = right.template at<row>() = begun(totals[row * all_groups + group], shift);
        });
        for (int64_t word = 0; word < groups.words; ++word, words += panel, x += in_word) {
            fetch_ahead(words);
            const Bits left_words = load_words(words), right_words = load_words(words + lanes);
            repeat<in_word / Kind::depth>([&](auto step) {
                const auto left_weights = Kind::template weights<bits, step>(left_words, groups.table);
                const auto right_weights = Kind::template weights<bits, step>(right_words, groups.table);
                repeat<rows>([&](auto row) {
                    const typename Kind::Input* from = x + row * stride + step * Kind::depth;
                    Vector &to_left = left.template at<row>(), &to_right = right.template at<row>();
                    to_left = Kind::template add_products<bits>(from, left_weights, to_left);
                    to_right = Kind::template add_products<bits>(from, right_weights, to_right);
                });
            });
        }
        for (int64_t half = 0; half < panel; half += lanes) {
            const Vector scales = groups.scales.load(group * panel + half);
            const Vector offsets = groups.offsets.numbers ? groups.offsets.load(group * panel + half) : Vector{};
            repeat<rows>([&](auto row) {
                float* to = sums + row * panel + half;
                const typename Kind::Total& total = totals[row * all_groups + group];
                const Vector products = half ? right.template at<row>() : left.template at<row>();
                Vector sum = multiply_add(finished(products, total), scales, load_vector(to));
                if (groups.offsets.numbers) sum = multiply_add(inputs(total), offsets, sum);
                store_vector(sum, to);
            });
        }
    }
}

template <typename Kind, int bits, int rows = Kind::most_rows>
void multiply_rows(int64_t count, const typename Kind::Input* x, int64_t stride, const typename Kind::Total* totals,
                   int64_t all_groups, const Groups& groups, float* sums) {
    if constexpr (rows > 0) {
        if (count == rows) return multiply<Kind, bits, rows>(x, stride, totals, all_groups, groups, sums);
        multiply_rows<Kind, bits, rows - 1>(count, x, stride, totals, all_groups, groups, sums);
    }
}

inline void store_result(float value, void* output, Number kind, int64_t index) {
    if (kind == Number::float32) return store(value, static_cast<float*>(output) + index);
    store(value, static_cast<BFloat16*>(output) + index);
}

// Multiplies rows of inputs. totals: [rows, size / group].
template <typename Kind, int bits>
void multiply_all(const QuantizedCall& call, const typename Kind::Input* x, const typename Kind::Total* totals) {
    const QuantizedMatrix& weight = call.weight;
    const int64_t rows = call.rows, size = weight.size, columns = call.columns, all_groups = size / weight.group;
    const int64_t chunk = part(rows, most_chunk), block = part(chunk, Kind::most_rows);
    const int64_t some_groups = std::max<int64_t>(most_inputs / weight.group, 1), panels = divide_up(columns, panel);
    const bool wide = weight.scale_kind == Number::float32;
    const Scales scales = {weight.scales, wide}, offsets = {weight.offsets, wide};
    const int64_t words = weight.group * bits / 32;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t task = 0; task < divide_up(rows, chunk) * panels; ++task) {
        const int64_t first = task / panels * chunk, index = task % panels, column = index * panel;
        const int64_t count = std::min(chunk, rows - first), width = std::min(panel, columns - column);
        float sums[most_chunk * panel];
        for (int64_t row = 0; row < count; ++row)
            std::fill_n(std::copy_n(call.bias + column, width, sums + row * panel), panel - width, 0.0f);
        for (int64_t group = 0; group < all_groups; group += some_groups) {
            const int64_t begin = (index * all_groups + group) * panel;  // of the groups' scales
            const Groups groups = {weight.codes + begin * words, scales.from(begin), offsets.from(begin),
                                   std::min(some_groups, all_groups - group), words, static_cast<float>(weight.zero),
                                   weight.table};
            for (int64_t row = 0; row < count; row += block)
                multiply_rows<Kind, bits>(std::min(block, count - row), x + (first + row) * size + group * weight.group,
                                          size, totals + (first + row) * all_groups + group, all_groups, groups,
                                          sums + row * panel);
        }
        for (int64_t row = 0; row < count; ++row)
            for (int64_t i = 0; i < width; ++i)
                store_result(sums[row * panel + i], call.output, call.output_kind, (first + row) * columns + column + i);
    }
}

template <typename Kind>
void multiply_by(const QuantizedCall& call, const typename Kind::Input* x, const typename Kind::Total* totals) {
    if (call.weight.bits == 4) return multiply_all<Kind, 4>(call, x, totals);
    multiply_all<Kind, 8>(call, x, totals);
}
