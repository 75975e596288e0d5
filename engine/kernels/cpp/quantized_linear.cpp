// Products with weights that are integers of 4 or 8 bits, or numbers of 8, in groups, on a CPU.
// See engine/layers/quantized_linear.py.
//
// A mask makes two numbers of bfloat16 out of a word: an integer below 2^n in the upper bits of a mantissa, under the
// exponent of 2^n, is the number 2^n + integer.

#include "quantized_products.h"

#include <type_traits>
#include <vector>

namespace {

struct ExpertsCall {
    QuantizedCall linear;    // of the first expert, whose weight and bias those of the others follow; with the rows of all
    const int64_t* experts;  // [rows], of the output
    int64_t count, each;     // of experts; rows of the output that share one of x, which has rows / each
};

struct RowsCall {
    QuantizedMatrix weight;
    const int64_t* ids;  // [rows], of output features
    int64_t rows;
    Number output_kind;
    void* output;  // [rows, size]
};

// Inputs one by one, as floats.
struct Floats {
    using Input = float;
    using Total = float;  // the sum of a group's inputs
    static constexpr int depth = 1;
    static constexpr int most_rows = many_registers ? 12 : 5;
    template <int bits>
    static constexpr float shift = 1 << bits;  // by which its weights are larger than the codes

    template <int bits>
    struct Weights {
        Vector all;
    };

    template <int bits, int step>
    static Weights<bits> weights(Bits words, const float*) {
        constexpr uint32_t mask = ((1u << bits) - 1) << (23 - bits), base = (127u + bits) << 23;
        return {(Vector)((moved<place<bits>(step), 23 - bits>(words) & mask) | base)};
    }

    template <int bits>
    static Vector add_products(const float* x, const Weights<bits>& weights, Vector sums) {
        return multiply_add(*x, weights.all, sums);
    }
};

// The same, with codes that are numbers: a sign, 4 bits of exponent, 3 of mantissa.
struct Numbers : Floats {
    template <int bits>
    static constexpr float shift = 0;

    template <int bits, int step>
    static Weights<bits> weights(Bits words, const float*) {
        constexpr int begin = place<bits>(step);
        constexpr uint32_t one = 1u << 23, rebased = 120u << 23;  // of exponents
        const Bits size = moved<begin, 20>(words) & 0x07f00000u, sign = moved<begin + 7, 31>(words) & 0x80000000u;
        const Bits small = (Bits)(size < one);  // has no leading one: it is added and taken off again
        const Vector all = (Vector)(size + rebased + (small & one)) - (Vector)(small & (rebased + one));
        return {(Vector)((Bits)all | sign)};
    }
};

// The same, with codes that choose from 16 numbers.
struct Chosen : Floats {
    template <int bits>
    static constexpr float shift = 0;

    template <int bits, int step>
    static Weights<bits> weights(Bits words, const float* table) {
        const Bits index = moved<place<bits>(step), 0>(words) & 15u;
#if defined(__AVX512F__)
        return {_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table))};
#elif defined(__AVX2__)
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
        return {_mm256_blendv_ps(low, high, (__m256)(index << 28))};
#else
        Weights<bits> result;
        for (int64_t lane = 0; lane < lanes; ++lane) result.all[lane] = table[index[lane]];
        return result;
#endif
    }
};

inline float widen_number(uint32_t code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = std::ldexp(static_cast<float>(exponent ? 8 + mantissa : mantissa), (exponent ? exponent : 1) - 10);
    return code & 128 ? -size : size;
}

#ifdef __AVX512BF16__
// Pairs of inputs in bfloat16, whose mantissas take 4 bits at a time.
struct Pairs {
    using Input = BFloat16;
    using Total = float;
    static constexpr int depth = 2;
    static constexpr int most_rows = 12;
    template <int bits>
    static constexpr float shift = bits == 4 ? 16 : 16 + 256;

    template <int bits>
    struct Weights {
        Bits low, high;  // high: of 8 bits
    };

    template <int bits, int step>
    static Weights<bits> weights(Bits words, const float*) {
        constexpr uint32_t mask = 0x00780078u, from_16 = 0x41804180u, from_256 = 0x43804380u;
        Weights<bits> result = {(moved<step * bits, 3>(words) & mask) | from_16, {}};
        if constexpr (bits == 8) result.high = (moved<step * bits + 4, 3>(words) & mask) | from_256;
        return result;
    }

    template <int bits>
    static Vector add_products(const BFloat16* x, const Weights<bits>& weights, Vector sums) {
        int32_t both;
        std::memcpy(&both, x, sizeof both);
        const auto inputs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
        sums = _mm512_dpbf16_ps(sums, inputs, reinterpret_cast<__m512bh>(weights.low));
        if constexpr (bits == 8) sums = _mm512_dpbf16_ps(sums, inputs, reinterpret_cast<__m512bh>(weights.high));
        return sums;
    }
};
#endif

template <typename T>
__attribute__((noinline)) float total(const T* x, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += load(x[i]);
    return sum;
}

template <typename T>
void linear_of_inputs(const QuantizedCall& call) {
    static thread_local std::vector<float> memory;
    const bool widens = std::is_same_v<T, BFloat16>
#ifdef __AVX512BF16__
                        && (call.weight.floats || call.weight.table)
#endif
        ;
    const auto* x = static_cast<const T*>(call.x);
    const int64_t size = call.weight.size, group = call.weight.group, count = call.rows * (size / group);
    memory.resize(std::max<size_t>(memory.size(), count + (widens ? call.rows * size : 0)));
    float *totals = memory.data(), *wide = totals + count;
#pragma omp parallel for num_threads(call.threads) if (call.rows * size > few)
    for (int64_t i = 0; i < count; ++i) {
        totals[i] = total(x + i * group, group);
        if (widens)
            for (int64_t j = i * group; j < (i + 1) * group; ++j) wide[j] = load(x[j]);
    }
    const float* inputs = wide;
    if constexpr (std::is_same_v<T, float>) inputs = x;
    if (call.weight.floats) return multiply_all<Numbers, 8>(call, inputs, totals);
    if (call.weight.table) return multiply_all<Chosen, 4>(call, inputs, totals);
    if (widens || std::is_same_v<T, float>) return multiply_by<Floats>(call, inputs, totals);
    if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef __AVX512BF16__
        multiply_by<Pairs>(call, x, totals);
#endif
    }
}

}  // namespace

extern "C" void quantized_rows(const RowsCall* call) {
    const QuantizedMatrix& weight = call->weight;
    const bool wide = weight.scale_kind == Number::float32;
    const int64_t bits = weight.bits, in_word = 32 / bits, groups = weight.size / weight.group;
    const auto number = [wide](const void* numbers, int64_t index) {
        return wide ? static_cast<const float*>(numbers)[index] : widen_half(static_cast<const uint16_t*>(numbers)[index]);
    };
    for (int64_t row = 0; row < call->rows; ++row) {
        const int64_t index = call->ids[row] / panel, lane = call->ids[row] % panel;
        for (int64_t i = 0; i < weight.size; ++i) {
            const int64_t group = (index * groups + i / weight.group) * panel + lane, step = i % in_word;
            const uint32_t word = weight.codes[(index * (weight.size / in_word) + i / in_word) * panel + lane];
            const int64_t code = word >> (step % 2 * 16 + step / 2 * bits) & ((1 << bits) - 1);
            const float offset = weight.offsets ? number(weight.offsets, group) : 0.0f;
            const float plain = weight.floats  ? widen_number(code)
                                : weight.table ? weight.table[code]
                                               : static_cast<float>(code - weight.zero);
            const float value = std::fma(number(weight.scales, group), plain, offset);
            store_result(value, call->output, call->output_kind, row * weight.size + i);
        }
    }
}

extern "C" void quantized_linear(const QuantizedCall* call) {
    if (call->weight.rounds_inputs) return multiply_rounded(*call);
    if (call->x_kind == Number::float32) return linear_of_inputs<float>(*call);
    linear_of_inputs<BFloat16>(*call);
}

// Each row's product with the weight of its expert.
extern "C" void quantized_experts(const ExpertsCall* call) {
    static thread_local std::vector<int64_t> begins, order;
    static thread_local std::vector<char> memory;
    const QuantizedCall& linear = call->linear;
    const QuantizedMatrix& weight = linear.weight;
    begins.assign(call->count + 1, 0);
    order.resize(linear.rows);
    for (int64_t row = 0; row < linear.rows; ++row) ++begins[call->experts[row]];
    for (int64_t expert = 0; expert < call->count; ++expert) begins[expert + 1] += begins[expert];
    for (int64_t row = linear.rows - 1; row >= 0; --row) order[--begins[call->experts[row]]] = row;

    const int64_t width = weight.size * bytes(linear.x_kind), output_width = linear.columns * bytes(linear.output_kind);
    const int64_t numbers = divide_up(linear.columns, panel) * panel * weight.size, groups = numbers / weight.group;
    const bool wide = weight.scale_kind == Number::float32;
    const Scales scales = {weight.scales, wide}, offsets = {weight.offsets, wide};
    memory.resize(std::max<size_t>(memory.size(), linear.rows * (width + output_width)));
    char *inputs = memory.data(), *outputs = inputs + linear.rows * width;
    const auto* x = static_cast<const char*>(linear.x);
    for (int64_t row = 0; row < linear.rows; ++row)
        std::memcpy(inputs + row * width, x + order[row] / call->each * width, width);
    for (int64_t expert = 0; expert < call->count; ++expert) {
        QuantizedCall own = linear;
        own.rows = begins[expert + 1] - begins[expert];
        if (!own.rows) continue;
        own.weight.codes += expert * numbers * weight.bits / 32;
        own.weight.scales = scales.from(expert * groups).numbers;
        own.weight.offsets = offsets.from(expert * groups).numbers;
        own.x = inputs + begins[expert] * width;
        own.bias += expert * linear.columns;
        own.output = outputs + begins[expert] * output_width;
        quantized_linear(&own);
    }
    auto* output = static_cast<char*>(linear.output);
    for (int64_t row = 0; row < linear.rows; ++row)
        std::memcpy(output + order[row] * output_width, outputs + row * output_width, output_width);
}
