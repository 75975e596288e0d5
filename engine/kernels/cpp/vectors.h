// Vectors of floats as wide as the machine's registers, and how numbers of each type become floats.

#pragma once

#include "numbers.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#elif defined(__AVX2__)
constexpr int64_t lanes = 8;
#else
constexpr int64_t lanes = 4;
#endif

typedef float Vector __attribute__((vector_size(lanes * 4)));
typedef int32_t Integers __attribute__((vector_size(lanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(lanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(lanes * 2)));

inline Vector spread(float value) { return Vector{} + value; }

inline Vector load_vector(const float* from) {
    Vector result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline Vector load_vector(const BFloat16* from) {
    HalfBits bits;
    std::memcpy(&bits, from, sizeof bits);
    const Bits wide = __builtin_convertvector(bits, Bits) << 16;
    return (Vector)wide;
}

inline void store_vector(Vector value, float* to) { std::memcpy(to, &value, sizeof value); }

// N vectors that the compiler keeps in registers, which it does not do for arrays.
template <int N>
struct Registers {
    Registers<N - 1> others;
    Vector last;

    template <int I>
    __attribute__((always_inline)) Vector& at() {
        if constexpr (I == N - 1) {
            return last;
        } else {
            return others.template at<I>();
        }
    }
};

template <>
struct Registers<0> {};

template <typename F, int... I>
__attribute__((always_inline)) inline void repeat(F function, std::integer_sequence<int, I...>) {
    (function(std::integral_constant<int, I>()), ...);
}

// Calls a function with the constants 0 … N - 1.
template <int N, typename F>
__attribute__((always_inline)) inline void repeat(F function) {
    repeat(function, std::make_integer_sequence<int, N>());
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector values) {
    float result = values[0];
    for (int64_t lane = 1; lane < lanes; ++lane) result = values[lane] > result ? values[lane] : result;
    return result;
}

// e^x for x <= 0 within 2e-7: 2^whole * 2^rest, rest in [-0.5, 0.5], by its Taylor series.
inline Vector exponential(Vector x) {
    const Vector y = larger(x * 1.44269504f, spread(-126.0f));
    const Integers whole = __builtin_convertvector(y - 0.5f, Integers);
    const Vector rest = (y - __builtin_convertvector(whole, Vector)) * 0.693147181f;
    Vector sum = 1.0f / 5040.0f * rest + 1.0f / 720.0f;
    sum = sum * rest + 1.0f / 120.0f;
    sum = sum * rest + 1.0f / 24.0f;
    sum = sum * rest + 1.0f / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const Integers power = (whole + 127) << 23;
    return (Vector)power * sum;
}

inline Vector hyperbolic_tangent(Vector x) {
    const Vector positive = larger(x, -x), power = exponential(-2.0f * positive);
    const Vector result = (1.0f - power) / (1.0f + power);
    return x < 0.0f ? -result : result;
}

// The types of numbers that keys, values, queries and outputs have, as in engine/kernels/native_attention.py.
enum class Number : int64_t { float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 };

inline int64_t bytes(Number number) {
    return number == Number::float32 ? 4 : number == Number::bfloat16 || number == Number::float16 ? 2 : 1;
}

// A number of `exponent` and `mantissa` bits below a sign. With `infinite`, the largest exponent means infinity or NaN.
inline float widened(uint32_t bits, int exponent, int mantissa, bool infinite) {
    const uint32_t magnitude = bits & ((1u << (exponent + mantissa)) - 1), all = (1u << exponent) - 1;
    const uint32_t power = magnitude >> mantissa, fraction = magnitude & ((1u << mantissa) - 1);
    const int bias = (1 << (exponent - 1)) - 1;
    float value;
    if (infinite && power == all) {
        const uint32_t special = 0x7F800000u | fraction << (23 - mantissa);
        std::memcpy(&value, &special, sizeof value);
    } else if (!infinite && magnitude == (1u << (exponent + mantissa)) - 1) {
        const uint32_t nan = 0x7FC00000u;
        std::memcpy(&value, &nan, sizeof value);
    } else {
        value = std::ldexp(static_cast<float>(power ? fraction | 1u << mantissa : fraction),
                           static_cast<int>(power ? power : 1) - bias - mantissa);
    }
    return bits >> (exponent + mantissa) ? -value : value;
}

// All numbers of 8 bits as floats.
struct Table {
    float values[256];
    Table(int exponent, int mantissa, bool infinite) {
        for (uint32_t bits = 0; bits < 256; ++bits) values[bits] = widened(bits, exponent, mantissa, infinite);
    }
};

inline float widen_half(uint16_t bits) {
#if defined(__FLT16_MAX__)
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
#else
    return widened(bits, 5, 10, true);
#endif
}

inline uint16_t narrow_half(float value) {  // to nearest, ties to even
#if defined(__FLT16_MAX__)
    const _Float16 half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint32_t sign = wide >> 16 & 0x8000u, magnitude = wide & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u)
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), 24))));
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13));
#endif
}

// Writes `count` numbers as floats.
inline void widen(const void* from, Number number, int64_t count, float* to) {
    static const Table e4m3fn(4, 3, false), e5m2(5, 2, true);
    const auto* halves = static_cast<const uint16_t*>(from);
    const auto* eighths = static_cast<const uint8_t*>(from);
    switch (number) {
        case Number::float32: std::memcpy(to, from, count * sizeof(float)); return;
        case Number::bfloat16:
            for (int64_t i = 0; i < count; ++i) to[i] = load(BFloat16{halves[i]});
            return;
        case Number::float16:
            for (int64_t i = 0; i < count; ++i) to[i] = widen_half(halves[i]);
            return;
        case Number::float8_e4m3fn:
            for (int64_t i = 0; i < count; ++i) to[i] = e4m3fn.values[eighths[i]];
            return;
        case Number::float8_e5m2:
            for (int64_t i = 0; i < count; ++i) to[i] = e5m2.values[eighths[i]];
            return;
    }
}

// Writes `count` floats as numbers; queries and outputs have at least 16 bits.
inline void narrow(const float* from, Number number, int64_t count, void* to) {
    auto* halves = static_cast<uint16_t*>(to);
    if (number == Number::float32) std::memcpy(to, from, count * sizeof(float));
    if (number == Number::bfloat16)
        for (int64_t i = 0; i < count; ++i) halves[i] = [](float x) { BFloat16 y; store(x, &y); return y.bits; }(from[i]);
    if (number == Number::float16)
        for (int64_t i = 0; i < count; ++i) halves[i] = narrow_half(from[i]);
}
