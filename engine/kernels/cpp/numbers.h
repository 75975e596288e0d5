// Elements of tensors, read and written as floats, and functions that several kernels share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

struct BFloat16 {
    uint16_t bits;
};

inline float load(float value) { return value; }

inline float load(BFloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}

inline void store(float value, float* target) { *target = value; }

inline void store(float value, BFloat16* target) {  // to nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    target->bits = static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

template <typename T>
inline float rounded(float value) {
    T narrow;
    store(value, &narrow);
    return load(narrow);
}

// e^x for x <= 0 within 2e-7, in a form that vectorises: 2^whole * 2^rest, rest in [-0.5, 0.5], by its Taylor series.
inline float exponential(float x) {
    const float y = std::max(x * 1.44269504f, -126.0f);
    const int32_t whole = static_cast<int32_t>(y - 0.5f);
    const float rest = (y - static_cast<float>(whole)) * 0.693147181f;
    float sum = 1.0f + rest / 7.0f;
    sum = 1.0f + rest / 6.0f * sum;
    sum = 1.0f + rest / 5.0f * sum;
    sum = 1.0f + rest / 4.0f * sum;
    sum = 1.0f + rest / 3.0f * sum;
    sum = 1.0f + rest / 2.0f * sum;
    sum = 1.0f + rest * sum;
    const int32_t bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power * sum;
}

// x times the logistic function of `gate`.
inline float gated(float x, float gate) {
    const float small = exponential(-std::fabs(gate));
    return x / (1 + small) * (gate < 0 ? small : 1.0f);
}
