// Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467) on a CPU. See actors/model/native/norm.py.

#include "numbers.h"

#include <cmath>

namespace {

constexpr int64_t few = 1 << 15;  // elements that one thread does faster than several

template <typename T>
void rms_norm(const T* x, const T* weight, float eps, int64_t rows, int64_t size, int64_t threads, T* output) {
#pragma omp parallel for num_threads(threads) if (rows * size > few)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * size;
        T* to = output + row * size;
        float sum = 0;
        for (int64_t i = 0; i < size; ++i) sum += load(from[i]) * load(from[i]);
        const float factor = 1 / std::sqrt(sum / static_cast<float>(size) + eps);
        for (int64_t i = 0; i < size; ++i)  // rounded before it is weighted, as in transformers
            store(rounded<T>(load(from[i]) * factor) * load(weight[i]), to + i);
    }
}

}  // namespace

extern "C" void rms_norm_float32(const float* x, const float* weight, float eps, int64_t rows, int64_t size,
                                 int64_t threads, float* output) {
    rms_norm(x, weight, eps, rows, size, threads, output);
}

extern "C" void rms_norm_bfloat16(const BFloat16* x, const BFloat16* weight, float eps, int64_t rows, int64_t size,
                                  int64_t threads, BFloat16* output) {
    rms_norm(x, weight, eps, rows, size, threads, output);
}
