// Activation functions on a CPU. See engine/layers/mlp.py.

#include "numbers.h"

#include <cmath>

namespace {

constexpr int64_t few = 1 << 14;   // elements that one thread does faster than several
constexpr int64_t block = 1 << 10;  // each starts where it does in every batch, so an element's formula never changes

struct Call {
    const void* x;  // [rows, size]
    int64_t function, rows, size, threads;
    void* output;  // [rows, size]
};

struct Silu {
    static float apply(float x) { return gated(x, x); }
};

struct Gelu {  // Hendrycks and Gimpel, arXiv 1606.08415; the error function by Abramowitz and Stegun, 7.1.26
    static float apply(float x) {
        const float z = 0.707106781f * std::fabs(x), t = 1 / (1 + 0.3275911f * z);
        float sum = 1.061405429f * t - 1.453152027f;
        sum = sum * t + 1.421413741f;
        sum = sum * t - 0.284496736f;
        sum = sum * t + 0.254829592f;
        const float rest = 0.5f * sum * t * exponential(-z * z);  // of the normal distribution, beyond |x|
        return x * (x < 0 ? rest : 1 - rest);
    }
};

struct GeluTanh {  // their first approximation: (1 + tanh(y)) / 2 is the logistic function of 2 y
    static float apply(float x) { return gated(x, 1.59576912f * (x + 0.044715f * x * x * x)); }
};

struct QuickGelu {  // their second one
    static float apply(float x) { return gated(x, 1.702f * x); }
};

template <typename F, typename T>
void apply(const Call& call) {
    const int64_t blocks = (call.size + block - 1) / block;
#pragma omp parallel for num_threads(call.threads) if (call.rows * call.size > few)
    for (int64_t part = 0; part < call.rows * blocks; ++part) {
        const int64_t start = part % blocks * block, end = std::min(call.size, start + block);
        const T* x = static_cast<const T*>(call.x) + part / blocks * call.size;
        T* output = static_cast<T*>(call.output) + part / blocks * call.size;
        for (int64_t i = start; i < end; ++i) store(F::apply(load(x[i])), output + i);
    }
}

template <typename T>
void activate(const Call& call) {  // the order of FUNCTIONS in Python
    void (*functions[])(const Call&) = {apply<Silu, T>, apply<GeluTanh, T>, apply<Gelu, T>, apply<QuickGelu, T>};
    functions[call.function](call);
}

}  // namespace

extern "C" void activate_float32(const Call* call) { activate<float>(*call); }
extern "C" void activate_bfloat16(const Call* call) { activate<BFloat16>(*call); }
