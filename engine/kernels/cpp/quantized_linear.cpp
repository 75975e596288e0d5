// Products with weights that are integers of 4 or 8 bits, or numbers of 8, in groups, on a CPU.
// See engine/layers/quantized_linear.py.
//
// A weight is scale · (code − zero) + offset, with a scale and an offset for each group of input features. A group's codes
// are multiplied as they are; its sum is then scaled, so weights are never rounded. Each result is one sum in float32,
// always in the same order: it has the same bits for every number of rows or threads.
//
// Codes lie in words of 32 bits, of one output feature: [panels, size / codes in a word, panel]. The halves of a word hold
// the even and the odd ones, so that a mask makes two numbers of bfloat16 out of it: an integer below 2^n in the upper bits
// of a mantissa, under the exponent of 2^n, is the number 2^n + integer.

#include "products.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t most_inputs = 1024;  // input features whose codes stay in the fastest cache for many rows
constexpr int64_t most_chunk = 192;    // rows whose inputs stay in the next cache for many panels
constexpr int64_t few = 1 << 14;       // numbers that one thread reads faster than several

struct Weight {
    const uint32_t* codes;
    const void *scales, *offsets;  // [panels, size / group, panel]; offsets: null if they are zero
    int64_t bits, floats, zero, group, size;  // floats: codes are numbers of type float8_e4m3fn
    Number scale_kind;
};

struct Call {
    Weight weight;
    const void* x;      // [rows, size]
    const float* bias;  // [columns]
    Number x_kind, output_kind;
    int64_t rows, columns, threads;
    void* output;  // [rows, columns]
};

struct ExpertsCall {
    Call linear;             // of the first expert, whose weight and bias those of the others follow; with the rows of all
    const int64_t* experts;  // [rows], of the output
    int64_t count, each;     // of experts; rows of the output that share one of x, which has rows / each
};

struct RowsCall {
    Weight weight;
    const int64_t* ids;  // [rows], of output features
    int64_t rows;
    Number output_kind;
    void* output;  // [rows, size]
};

template <int from, int to>
inline Bits moved(Bits bits) {
    if constexpr (to >= from) return bits << (to - from);
    return bits >> (from - to);
}

// Where an input's code begins in its word.
template <int bits>
constexpr int place(int input) { return input % 2 * 16 + input / 2 * bits; }

// Inputs one by one, as floats.
struct Floats {
    using Input = float;
    static constexpr int depth = 1;
    static constexpr int most_rows = many_registers ? 12 : 5;
    template <int bits>
    static constexpr float shift = 1 << bits;  // by which its weights are larger than the codes

    template <int bits>
    struct Weights {
        Vector all;
    };

    template <int bits, int step>
    static Weights<bits> weights(Bits words) {
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
    static Weights<bits> weights(Bits words) {
        constexpr int begin = place<bits>(step);
        constexpr uint32_t one = 1u << 23, rebased = 120u << 23;  // of exponents
        const Bits size = moved<begin, 20>(words) & 0x07f00000u, sign = moved<begin + 7, 31>(words) & 0x80000000u;
        const Bits small = (Bits)(size < one);  // has no leading one: it is added and taken off again
        const Vector all = (Vector)(size + rebased + (small & one)) - (Vector)(small & (rebased + one));
        return {(Vector)((Bits)all | sign)};
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
    static constexpr int depth = 2;
    static constexpr int most_rows = 12;
    template <int bits>
    static constexpr float shift = bits == 4 ? 16 : 16 + 256;

    template <int bits>
    struct Weights {
        Bits low, high;  // high: of 8 bits
    };

    template <int bits, int step>
    static Weights<bits> weights(Bits words) {
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
};

// Adds products to sums. x: rows that begin every `stride` numbers; totals: sums of each group's inputs, in rows that begin
// every `all_groups`; sums: [rows, panel].
template <typename Kind, int bits, int rows>
void multiply(const typename Kind::Input* __restrict__ x, int64_t stride, const float* __restrict__ totals,
              int64_t all_groups, const Groups& groups, float* __restrict__ sums) {
    constexpr int in_word = 32 / bits;
    const float shift = -(Kind::template shift<bits> + groups.zero);
    const uint32_t* words = groups.codes;
    for (int64_t group = 0; group < groups.count; ++group) {
        Registers<rows> left, right;
        repeat<rows>([&](auto row) {
            left.template at<row>() = right.template at<row>() = spread(shift * totals[row * all_groups + group]);
        });
        for (int64_t word = 0; word < groups.words; ++word, words += panel, x += in_word) {
            fetch_ahead(words);
            const Bits left_words = load_words(words), right_words = load_words(words + lanes);
            repeat<in_word / Kind::depth>([&](auto step) {
                const auto left_weights = Kind::template weights<bits, step>(left_words);
                const auto right_weights = Kind::template weights<bits, step>(right_words);
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
                const Vector products = half ? right.template at<row>() : left.template at<row>();
                Vector sum = multiply_add(products, scales, load_vector(to));
                if (groups.offsets.numbers) sum = multiply_add(totals[row * all_groups + group], offsets, sum);
                store_vector(sum, to);
            });
        }
    }
}

template <typename Kind, int bits, int rows = Kind::most_rows>
void multiply_rows(int64_t count, const typename Kind::Input* x, int64_t stride, const float* totals, int64_t all_groups,
                   const Groups& groups, float* sums) {
    if constexpr (rows > 0) {
        if (count == rows) return multiply<Kind, bits, rows>(x, stride, totals, all_groups, groups, sums);
        multiply_rows<Kind, bits, rows - 1>(count, x, stride, totals, all_groups, groups, sums);
    }
}

template <typename T>
__attribute__((noinline)) float total(const T* x, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += load(x[i]);
    return sum;
}

inline void store_result(float value, void* output, Number kind, int64_t index) {
    if (kind == Number::float32) return store(value, static_cast<float*>(output) + index);
    store(value, static_cast<BFloat16*>(output) + index);
}

template <typename Kind, int bits>
void linear(const Call& call, const typename Kind::Input* x, const float* totals) {
    const Weight& weight = call.weight;
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
                                   std::min(some_groups, all_groups - group), words, static_cast<float>(weight.zero)};
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
void linear_of(const Call& call, const typename Kind::Input* x, const float* totals) {
    if (call.weight.bits == 4) return linear<Kind, 4>(call, x, totals);
    linear<Kind, 8>(call, x, totals);
}

template <typename T>
void linear_of_inputs(const Call& call) {
    static thread_local std::vector<float> memory;
    const bool widens = std::is_same_v<T, BFloat16>
#ifdef __AVX512BF16__
                        && call.weight.floats
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
    if (call.weight.floats) return linear<Numbers, 8>(call, inputs, totals);
    if (widens || std::is_same_v<T, float>) return linear_of<Floats>(call, inputs, totals);
    if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef __AVX512BF16__
        linear_of<Pairs>(call, x, totals);
#endif
    }
}

}  // namespace

extern "C" void quantized_rows(const RowsCall* call) {
    const Weight& weight = call->weight;
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
            const float plain = weight.floats ? widen_number(code) : static_cast<float>(code - weight.zero);
            const float value = std::fma(number(weight.scales, group), plain, offset);
            store_result(value, call->output, call->output_kind, row * weight.size + i);
        }
    }
}

extern "C" void quantized_linear(const Call* call) {
    if (call->x_kind == Number::float32) return linear_of_inputs<float>(*call);
    linear_of_inputs<BFloat16>(*call);
}

// Each row's product with the weight of its expert.
extern "C" void quantized_experts(const ExpertsCall* call) {
    static thread_local std::vector<int64_t> begins, order;
    static thread_local std::vector<char> memory;
    const Call& linear = call->linear;
    const Weight& weight = linear.weight;
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
        Call own = linear;
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
