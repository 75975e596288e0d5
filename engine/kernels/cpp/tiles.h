// Products of bfloat16 in the tiles of Intel's AMX: up to 16 rows of 32 numbers times 32 numbers of 16 columns at once.
//
// A row's sums do not depend on the other rows of a tile, nor on how many there are. They differ from the sums that vector
// instructions give, in rounding, so a process uses one or the other for all numbers of rows.

#pragma once

#include "numbers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tiles {

constexpr int64_t rows = 16;   // of a tile
constexpr int64_t pairs = 16;  // of numbers in a row
constexpr int64_t columns = 16;
constexpr int64_t row_bytes = 64;

// Lets the compiler finish its stores before, and load again after: gcc does not know what memory the tiles use.
inline void memory_changes() { asm volatile("" ::: "memory"); }

// Whether the system lets this process use tiles; it is asked once.
inline bool are_allowed() {
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, request, tile_data) == 0;
    return allowed;
}

// The thread's tiles, for products of `count` rows at most 2 · `rows`. 0 to 3: sums, two tiles of columns for each of two
// of rows; 4 and 5: rows; 6 and 7: columns.
inline void configure(int64_t count) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const int64_t first = std::min(count, rows), second = count - first;
    const int64_t counts[] = {first, first, second, second, first, second, pairs, pairs};
    for (int tile = 0; tile < 8; ++tile) {
        shapes.rows[tile] = counts[tile];
        shapes.row_bytes[tile] = counts[tile] ? row_bytes : 0;
    }
    memory_changes();
    _tile_loadconfig(&shapes);
}

// Numbers of a packed row of `size`: whole tiles.
inline int64_t packed_row(int64_t size) { return (size + 2 * pairs - 1) / (2 * pairs) * (2 * pairs); }

// The thread's memory for packed rows, which begins where a line of the caches does.
inline BFloat16* packed_memory(int64_t count, int64_t size) {
    struct alignas(row_bytes) Line {
        BFloat16 numbers[2 * pairs];
    };
    static thread_local std::vector<Line> lines;
    const size_t needed = (count + rows - 1) / rows * rows * packed_row(size) / (2 * pairs);
    if (lines.size() < needed) lines = std::vector<Line>(needed);
    return lines.data()->numbers;
}

// Puts a row where tiles are loaded from. x: [size]; packed: [.., tiles of a row, rows, 2 · pairs], whose last numbers of a
// row become zeros.
inline void pack_row(const BFloat16* x, int64_t size, int64_t row, BFloat16* packed) {
    BFloat16* target = packed + row / rows * rows * packed_row(size) + row % rows * 2 * pairs;
    for (int64_t i = 0; i < size; i += 2 * pairs, target += rows * 2 * pairs) {
        const int64_t width = std::min(2 * pairs, size - i);
        std::fill_n(std::copy_n(x + i, width, target), 2 * pairs - width, BFloat16{});
    }
}

// The most pairs of a panel that stay in the fastest cache.
constexpr int64_t most_pairs = 18 * pairs;

// two: whether there are more than 16 rows. x: packed; second_x: of the other rows; weight: [pairs, 2 · columns, 2].
template <bool two>
inline void add_products(const BFloat16* x, const BFloat16* second_x, const BFloat16* weight) {
    _tile_stream_loadd(4, x, row_bytes);  // past the fastest cache, where the weights are to stay
    _tile_loadd(6, weight, 2 * row_bytes);
    _tile_loadd(7, weight + 2 * columns, 2 * row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (two) {
        _tile_stream_loadd(5, second_x, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Multiplies rows by a panel of columns, once tiles are configured for the rows. x: packed; size: of a packed row; weight:
// [count, 2 · columns, 2]; sums: [.., 2 · columns], to which products are added unless they are the first.
template <bool two>
void multiply(const BFloat16* x, int64_t size, const BFloat16* weight, int64_t count, float* sums, bool first) {
    constexpr int64_t width = 2 * columns, stride = width * sizeof(float);
    memory_changes();
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (two) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + columns, stride);
        if constexpr (two) {
            _tile_loadd(2, sums + rows * width, stride);
            _tile_loadd(3, sums + rows * width + columns, stride);
        }
    }
    const BFloat16* second_x = x + rows * size;
    const int64_t whole = count / pairs * pairs;
    for (int64_t pair = 0; pair < whole; pair += pairs)
        add_products<two>(x + 2 * pair * rows, second_x + 2 * pair * rows, weight + 2 * pair * width);
    if (whole < count) {
        BFloat16 last[2 * pairs * width] = {};
        std::copy_n(weight + 2 * whole * width, 2 * (count - whole) * width, last);
        memory_changes();
        add_products<two>(x + 2 * whole * rows, second_x + 2 * whole * rows, last);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + columns, stride);
    if constexpr (two) {
        _tile_stored(2, sums + rows * width, stride);
        _tile_stored(3, sums + rows * width + columns, stride);
    }
    memory_changes();
}

}  // namespace tiles
#endif
