// Numbers as they lie in tensors, read and written as floats.

#pragma once

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

inline void store(float value, float* place) { *place = value; }

inline void store(float value, BFloat16* place) {  // to nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    place->bits = static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}
