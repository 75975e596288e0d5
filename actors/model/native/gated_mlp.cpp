// The gate of a gated feed-forward layer, SwiGLU (Shazeer, arXiv 2002.05202), on a CPU. See actors/model/native/gated_mlp.py.

#include "numbers.h"

#include <cmath>

namespace {

constexpr int64_t few = 1 << 14;  // elements that one thread does faster than several

// both: [rows, 2, size], gate before up; output: [rows, size].
template <typename T>
void silu_gate(const T* both, int64_t rows, int64_t size, int64_t threads, T* output) {
#pragma omp parallel for num_threads(threads) if (rows * size > few)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gates = both + 2 * row * size, *passed = gates + size;
        T* to = output + row * size;
        for (int64_t i = 0; i < size; ++i) {
            const float gate = load(gates[i]), small = exponential(-std::fabs(gate));
            const float open = gate / (1 + small) * (gate < 0 ? small : 1.0f);
            store(rounded<T>(open) * load(passed[i]), to + i);  // rounded before the product, as in transformers
        }
    }
}

}  // namespace

extern "C" void silu_gate_float32(const float* both, int64_t rows, int64_t size, int64_t threads, float* output) {
    silu_gate(both, rows, size, threads, output);
}

extern "C" void silu_gate_bfloat16(const BFloat16* both, int64_t rows, int64_t size, int64_t threads,
                                   BFloat16* output) {
    silu_gate(both, rows, size, threads, output);
}
