// Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467) on a CPU. See engine/layers/norm.py.

#include "numbers.h"

#include <cmath>

namespace {

constexpr int64_t few = 1 << 15;  // elements that one thread does faster than several

struct Call {
    const void *x, *weight;  // x: [rows, size]; weight: [size]
    int64_t rows, size, threads;
    void* output;
    float eps;
};

template <typename T>
void rms_norm(const Call& call) {
    const int64_t size = call.size;
    const T* weight = static_cast<const T*>(call.weight);
#pragma omp parallel for num_threads(call.threads) if (call.rows * size > few)
    for (int64_t row = 0; row < call.rows; ++row) {
        const T* from = static_cast<const T*>(call.x) + row * size;
        T* to = static_cast<T*>(call.output) + row * size;
        float sum = 0;
        for (int64_t i = 0; i < size; ++i) sum += load(from[i]) * load(from[i]);
        const float factor = 1 / std::sqrt(sum / static_cast<float>(size) + call.eps);
        for (int64_t i = 0; i < size; ++i)  // rounded before it is weighted, as in transformers
            store(rounded<T>(load(from[i]) * factor) * load(weight[i]), to + i);
    }
}

}  // namespace

extern "C" void rms_norm_float32(const Call* call) { rms_norm<float>(*call); }
extern "C" void rms_norm_bfloat16(const Call* call) { rms_norm<BFloat16>(*call); }
