// The gate of a gated feed-forward layer, SwiGLU (Shazeer, arXiv 2002.05202), on a CPU. See engine/layers/mlp.py.

#include "numbers.h"

namespace {

constexpr int64_t few = 1 << 14;  // elements that one thread does faster than several

struct Call {
    const void* both;  // [rows, 2, size], gate before up
    int64_t rows, size, threads;
    void* output;  // [rows, size]
};

template <typename T>
void silu_gate(const Call& call) {
    const int64_t size = call.size;
#pragma omp parallel for num_threads(call.threads) if (call.rows * size > few)
    for (int64_t row = 0; row < call.rows; ++row) {
        const T *gates = static_cast<const T*>(call.both) + 2 * row * size, *passed = gates + size;
        T* to = static_cast<T*>(call.output) + row * size;
        for (int64_t i = 0; i < size; ++i) {
            const float gate = load(gates[i]);
            // rounded before the product, as in transformers
            store(rounded<T>(gated(gate, gate)) * load(passed[i]), to + i);
        }
    }
}

}  // namespace

extern "C" void silu_gate_float32(const Call* call) { silu_gate<float>(*call); }
extern "C" void silu_gate_bfloat16(const Call* call) { silu_gate<BFloat16>(*call); }
