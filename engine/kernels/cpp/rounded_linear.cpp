// Products of weights that are integers of 4 or 8 bits with inputs rounded to 8, as integers. See quantized_products.h.
//
// An input is scale · code, with a scale for each row and group that makes its largest code 127 or −127. A group's products
// are summed exactly, so results have the same bits on all processors.

#include "quantized_products.h"

#include <cmath>
#include <vector>

namespace {

// What is known of a row's inputs in a group.
struct Rounded {
    float scale, total;  // total: of scale · code
    int32_t codes;       // their total
};

inline Vector begun(const Rounded& rounded, float shift) {
    return (Vector)(Integers{} - static_cast<int32_t>(shift) * rounded.codes);
}

inline Vector finished(Vector products, const Rounded& rounded) {
    return __builtin_convertvector((Integers)products, Vector) * rounded.scale;
}

inline float inputs(const Rounded& rounded) { return rounded.total; }

#ifdef __AVX512VNNI__
constexpr bool takes_bytes = true;  // as weights; else they have at most 4 bits, because two products are summed in 16
#else
constexpr bool takes_bytes = false;
#endif

// Adds products of four weights, times `factor`, with four inputs.
template <int factor>
inline Integers add_products_of_four(Bits weights, int32_t inputs, Integers sums) {
#if defined(__AVX512VNNI__)
    static_assert(factor == 1);
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(inputs));
    return sums + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(factor));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
    return sums + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(factor));
#else
    for (int begin = 0; begin < 32; begin += 8)
        sums += (Integers)(weights >> begin & 255) * (static_cast<int8_t>(inputs >> begin) * factor);
    return sums;
#endif
}

// Four inputs, whose weights are the bytes of a word, or their lower or upper halves.
struct Fours {
    using Input = int8_t;
    using Total = Rounded;
    static constexpr int depth = 4;
    static constexpr int most_rows = many_registers ? 12 : 5;
    template <int bits>
    static constexpr float shift = 0;

    template <int bits>
    struct Weights {
        Bits low, high;  // high: of 8 bits, where these are too many
    };

    template <int bits, int step>
    static Weights<bits> weights(Bits words, const float*) {
        constexpr uint32_t mask = 0x0f0f0f0fu;
        constexpr bool whole = bits == 8 && takes_bytes;
        Weights<bits> result = {whole ? words : words >> 4 * step & mask, {}};
        if constexpr (bits == 8 && !takes_bytes) result.high = words >> 4 & mask;
        return result;
    }

    template <int bits>
    static Vector add_products(const int8_t* x, const Weights<bits>& weights, Vector sums) {
        int32_t four;
        std::memcpy(&four, x, sizeof four);
        Integers result = add_products_of_four<1>(weights.low, four, (Integers)sums);
        if constexpr (bits == 8 && !takes_bytes) result = add_products_of_four<16>(weights.high, four, result);
        return (Vector)result;
    }
};

// Where among the inputs of a word an input lies, so that four follow each other that are multiplied together.
template <int bits>
constexpr int position(int input) { return place<bits>(input) % 8 + place<bits>(input) / 8; }

// Rounds a group of inputs. What is no number makes the scale none.
template <int bits, typename T>
Rounded round_inputs(const T* x, int64_t count, int8_t* codes) {
    constexpr uint32_t small = 0x01000000u;  // 2.4e-38: inputs up to it become zeros, because 127 / x may be infinite
    constexpr int in_word = 32 / bits;
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float value = std::fabs(load(x[i]));
        uint32_t size;
        std::memcpy(&size, &value, sizeof size);
        largest = std::max(largest, size);
    }
    float size;
    std::memcpy(&size, &largest, sizeof size);
    const float factor = largest > small ? 127.0f / size : 0.0f;
    int32_t sum = 0;
    for (int64_t word = 0; word < count; word += in_word)
        for (int i = 0; i < in_word; ++i) {
            const auto code = static_cast<int32_t>(std::nearbyint(load(x[word + i]) * factor));
            sum += code;
            codes[word + position<bits>(i)] = static_cast<int8_t>(code);
        }
    const float scale = size * (1.0f / 127.0f);
    return {scale, scale * static_cast<float>(sum), sum};
}

template <int bits, typename T>
void multiply_inputs(const QuantizedCall& call) {
    static thread_local std::vector<int8_t> codes_memory;
    static thread_local std::vector<Rounded> totals_memory;
    const auto* x = static_cast<const T*>(call.x);
    const int64_t numbers = call.rows * call.weight.size, group = call.weight.group, count = numbers / group;
    codes_memory.resize(std::max<size_t>(codes_memory.size(), numbers));
    totals_memory.resize(std::max<size_t>(totals_memory.size(), count));
    int8_t* codes = codes_memory.data();
    Rounded* totals = totals_memory.data();
#pragma omp parallel for num_threads(call.threads) if (numbers > few)
    for (int64_t i = 0; i < count; ++i) totals[i] = round_inputs<bits>(x + i * group, group, codes + i * group);
    multiply_all<Fours, bits>(call, codes, totals);
}

template <typename T>
void multiply_bits(const QuantizedCall& call) {
    if (call.weight.bits == 4) return multiply_inputs<4, T>(call);
    multiply_inputs<8, T>(call);
}

}  // namespace

void multiply_rounded(const QuantizedCall& call) {
    if (call.x_kind == Number::float32) return multiply_bits<float>(call);
    multiply_bits<BFloat16>(call);
}
