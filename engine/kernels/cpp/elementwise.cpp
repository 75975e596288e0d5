// Sums and copies of tensors on a CPU. See engine/kernels/native.py.

#include "numbers.h"

namespace {

constexpr int64_t few = 1 << 15;  // elements that one thread does faster than several

struct AddCall {
    const void *left, *right;
    int64_t size, threads;
    void* output;
};

template <typename T>
void add(const AddCall& call) {
    const auto *left = static_cast<const T*>(call.left), *right = static_cast<const T*>(call.right);
    auto* output = static_cast<T*>(call.output);
#pragma omp parallel for num_threads(call.threads) if (call.size > few)
    for (int64_t i = 0; i < call.size; ++i) store(load(left[i]) + load(right[i]), output + i);
}

struct CopyCall {
    const void* from;
    int64_t sizes[3], strides[3], size;  // strides in elements; size: of a line of adjacent elements
    void* to;                            // contiguous
};

template <typename T>
void copy(const CopyCall& call) {
    auto* to = static_cast<T*>(call.to);
    for (int64_t i = 0; i < call.sizes[0]; ++i)
        for (int64_t j = 0; j < call.sizes[1]; ++j)
            for (int64_t k = 0; k < call.sizes[2]; ++k, to += call.size)
                std::copy_n(static_cast<const T*>(call.from) + i * call.strides[0] + j * call.strides[1] +
                                k * call.strides[2],
                            call.size, to);
}

struct WeightedCall {
    const void* x;         // [rows, count, size]
    const float* weights;  // [rows, count]
    int64_t rows, count, size, threads;
    void* output;  // [rows, size]
};

// Sums over `count`, in order, rounded once.
template <typename T>
void add_weighted(const WeightedCall& call) {
    const int64_t size = call.size;
#pragma omp parallel for num_threads(call.threads) if (call.rows * call.count * size > few)
    for (int64_t row = 0; row < call.rows; ++row) {
        const T* x = static_cast<const T*>(call.x) + row * call.count * size;
        const float* weights = call.weights + row * call.count;
        T* output = static_cast<T*>(call.output) + row * size;
        for (int64_t i = 0; i < size; ++i) {
            float sum = 0.0f;
            for (int64_t j = 0; j < call.count; ++j) sum = std::fma(weights[j], load(x[j * size + i]), sum);
            store(sum, output + i);
        }
    }
}

}  // namespace

extern "C" void add_float32(const AddCall* call) { add<float>(*call); }
extern "C" void add_bfloat16(const AddCall* call) { add<BFloat16>(*call); }
extern "C" void copy_float32(const CopyCall* call) { copy<float>(*call); }
extern "C" void copy_bfloat16(const CopyCall* call) { copy<BFloat16>(*call); }
extern "C" void add_weighted_float32(const WeightedCall* call) { add_weighted<float>(*call); }
extern "C" void add_weighted_bfloat16(const WeightedCall* call) { add_weighted<BFloat16>(*call); }
