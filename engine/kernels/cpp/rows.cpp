// What recorded calls need beside a layer: rows moved by index, counters, conversions and rotary angles.
// See engine/kernels/call_recorder.py.

#include "numbers.h"

namespace {

// Rows must exist: indices are not checked.
struct MoveCall {
    const char* from;
    const int64_t* from_rows;  // null: the first ones
    char* to;
    const int64_t* to_rows;  // null: the first ones
    int64_t rows, bytes;     // of a row
};

struct CountCall {
    const int64_t *left, *right;  // right: null: the constant
    int64_t constant, size;
    int64_t* output;
};

struct WidenCall {
    const BFloat16* from;
    int64_t size;
    float* to;
};

struct AnglesCall {
    const int64_t* positions;
    int64_t tokens, half;      // half: the number of frequencies
    const float* frequencies;
    float scaling;
    void *cos, *sin;  // [tokens, 2 half]
};

template <typename T>
void angles(const AnglesCall& call) {
    auto *cos = static_cast<T*>(call.cos), *sin = static_cast<T*>(call.sin);
    for (int64_t token = 0; token < call.tokens; ++token, cos += 2 * call.half, sin += 2 * call.half)
        for (int64_t i = 0; i < call.half; ++i) {
            const float angle = static_cast<float>(call.positions[token]) * call.frequencies[i];
            store(std::cos(angle) * call.scaling, cos + i);
            store(std::sin(angle) * call.scaling, sin + i);
            cos[i + call.half] = cos[i];
            sin[i + call.half] = sin[i];
        }
}

}  // namespace

extern "C" void move_rows(const MoveCall* call) {
    for (int64_t row = 0; row < call->rows; ++row) {
        const int64_t from = call->from_rows ? call->from_rows[row] : row, to = call->to_rows ? call->to_rows[row] : row;
        std::memcpy(call->to + to * call->bytes, call->from + from * call->bytes, call->bytes);
    }
}

extern "C" void count(const CountCall* call) {
    for (int64_t i = 0; i < call->size; ++i)
        call->output[i] = call->left[i] + (call->right ? call->right[i] : call->constant);
}

extern "C" void widen(const WidenCall* call) {
    for (int64_t i = 0; i < call->size; ++i) call->to[i] = load(call->from[i]);
}

extern "C" void angles_float32(const AnglesCall* call) { angles<float>(*call); }
extern "C" void angles_bfloat16(const AnglesCall* call) { angles<BFloat16>(*call); }
