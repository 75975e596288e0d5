// What products with the weights of linear layers share: panels of output features, and sums in a fixed order.

#pragma once

#include "vectors.h"

#include <cmath>
#include <cstdint>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

constexpr int64_t panel = 2 * lanes;  // output features whose weights lie together

#ifdef __AVX512F__
constexpr bool many_registers = true;
#else
constexpr bool many_registers = false;
#endif

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool has_fma = true;
#else
constexpr bool has_fma = false;  // std::fma is a function call then
#endif

// An explicit FMA, because the compiler may split or reorder other sums, and differently for each number of rows.
inline Vector multiply_add(Vector x, Vector weights, Vector sums) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(x, weights, sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(x, weights, sums);
#else
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] = std::fma(x[lane], weights[lane], sums[lane]);
    return sums;
#endif
}

inline Vector multiply_add(float x, Vector weights, Vector sums) { return multiply_add(spread(x), weights, sums); }

inline int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// The size of equal parts of a number, none larger than `most`.
inline int64_t part(int64_t number, int64_t most) { return number ? divide_up(number, divide_up(number, most)) : most; }
