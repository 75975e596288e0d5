// Convolutions and recurrences over ragged rows on a CPU. See engine/kernels/state.py.

#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")  // a token's sums have one order in every batch
#endif

#include "numbers.h"

#include <vector>

namespace {

constexpr int64_t ring_size = 32;  // RING in Python
constexpr int64_t block = 64;      // channels, or columns of a state, that one thread computes

struct StateRow {
    int64_t source, held, keep, snapshot_at, snapshot;
};

// The rows of a batch.
struct Rows {
    const int64_t *slots, *offsets, *columns;
    const StateRow* states;

    int64_t first(int64_t row) const { return offsets[row]; }
    int64_t count(int64_t row) const { return offsets[row + 1] - offsets[row]; }
    int64_t start(int64_t row) const { return columns[offsets[row]]; }
};

struct ConvolveCall {
    int64_t rows, channels, width, silu, threads;
    const void* x;       // [N, channels]
    const void* weight;  // [channels, width]
    const void* bias;    // [channels], or null
    void* ring;          // [cells, ring_size, channels]
    Rows batch;
    void* output;  // [N, channels]
};

template <typename T>
void convolve_block(const ConvolveCall& call, int64_t row, int64_t channel) {
    const Rows& batch = call.batch;
    const int64_t size = std::min(block, call.channels - channel), past = call.width - 1;
    const int64_t first = batch.first(row), start = batch.start(row), end = start + batch.count(row);
    const int64_t slot = batch.slots[row];
    const StateRow& state = batch.states[row];
    T* ring = static_cast<T*>(call.ring);
    auto cell = [&](int64_t index, int64_t column) {
        return ring + (index * ring_size + column % ring_size) * call.channels + channel;
    };
    std::vector<float> inputs(call.width * block, 0.0f);  // of the last columns, the oldest first
    std::vector<float> weights(call.width * block, 0.0f);
    float bias[block] = {};
    for (int64_t i = 0; i < size; ++i) {
        const T* weight = static_cast<const T*>(call.weight) + (channel + i) * call.width;
        for (int64_t tap = 0; tap < call.width; ++tap) weights[tap * block + i] = load(weight[tap]);
        if (call.bias != nullptr) bias[i] = load(static_cast<const T*>(call.bias)[channel + i]);
    }
    for (int64_t column = std::max<int64_t>(0, start - past); column < start; ++column) {
        const T* known = cell(state.source, column);
        for (int64_t i = 0; i < size; ++i) inputs[(column - start + past) * block + i] = load(known[i]);
        if (state.source != slot) std::memcpy(cell(slot, column), known, size * sizeof(T));
        if (column < state.snapshot_at) std::memcpy(cell(state.snapshot, column), known, size * sizeof(T));
    }
    for (int64_t column = start; column < end; ++column) {
        const T* x = static_cast<const T*>(call.x) + (first + column - start) * call.channels + channel;
        T* output = static_cast<T*>(call.output) + (first + column - start) * call.channels + channel;
        for (int64_t i = 0; i < size; ++i) inputs[past * block + i] = load(x[i]);
        float sums[block] = {};
        for (int64_t tap = 0; tap < call.width; ++tap) {
            const float *values = inputs.data() + tap * block, *weight = weights.data() + tap * block;
            for (int64_t i = 0; i < block; ++i) sums[i] += values[i] * weight[i];
        }
        for (int64_t i = 0; i < block; ++i) sums[i] += bias[i];
        for (int64_t i = 0; i < size; ++i) store(call.silu ? gated(sums[i], sums[i]) : sums[i], output + i);
        if (column >= end - ring_size) std::memcpy(cell(slot, column), x, size * sizeof(T));
        if (column < state.snapshot_at && column >= state.snapshot_at - ring_size)
            std::memcpy(cell(state.snapshot, column), x, size * sizeof(T));
        std::memmove(inputs.data(), inputs.data() + block, past * block * sizeof(float));
    }
}

template <typename T>
void convolve(const ConvolveCall& call) {
    const int64_t blocks = (call.channels + block - 1) / block;
#pragma omp parallel for num_threads(call.threads) schedule(dynamic, 1)
    for (int64_t item = 0; item < call.rows * blocks; ++item)
        if (call.batch.count(item / blocks) > 0) convolve_block<T>(call, item / blocks, item % blocks * block);
}

struct RecurCall {
    int64_t rows, heads, groups, key_size, value_size, decays, normalises, threads;
    const float *query, *key;  // [N, groups, key_size]
    const float* value;        // [N, heads, value_size]
    const float* decay;        // [N, heads, decays], logarithms; decays: 1, key_size, or value_size with rates
    const float* rates;        // [heads, key_size, value_size]; null: there are none
    const float* beta;         // [N, heads]; null: no delta rule
    float* states;             // [cells, heads, key_size, value_size]
    float* ring;               // [cells, ring_size, inputs]
    Rows batch;
    float* output;  // [N, heads, value_size]
    float scale;

    int64_t inputs() const { return groups * key_size + heads * (value_size + decays + 1); }
    float* remembered(int64_t cell, int64_t column) const {
        return ring + (cell * ring_size + column % ring_size) * inputs();
    }
};

// One head's inputs of one token, in the batch or in a ring.
struct Token {
    const float *key, *value, *decay;
    float beta;
};

Token token_of(const RecurCall& call, int64_t token, int64_t head) {
    const int64_t group = head * call.groups / call.heads, index = token * call.heads + head;
    return {call.key + (token * call.groups + group) * call.key_size, call.value + index * call.value_size,
            call.decay + index * call.decays, call.beta == nullptr ? 1.0f : call.beta[index]};
}

Token token_of(const RecurCall& call, const float* packed, int64_t head) {
    const int64_t group = head * call.groups / call.heads;
    const float* values = packed + call.groups * call.key_size;
    const float* decays = values + call.heads * call.value_size;
    return {packed + group * call.key_size, values + head * call.value_size, decays + head * call.decays,
            decays[call.heads * call.decays + head]};
}

void scaled(const float* from, int64_t size, bool normalises, float* to) {
    float factor = 1.0f;
    if (normalises) {
        float sum = 0.0f;
        for (int64_t i = 0; i < size; ++i) sum += from[i] * from[i];
        factor = 1.0f / std::sqrt(sum + 1e-6f);
    }
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] * factor;
}

// Some columns of one head's state, and its way through a row.
struct State {
    const RecurCall& call;
    int64_t head, column, size;  // of the columns
    std::vector<float> values, key, query;

    State(const RecurCall& call, int64_t head, int64_t column)
        : call(call), head(head), column(column), size(std::min(block, call.value_size - column)),
          values(call.key_size * block, 0.0f), key(call.key_size), query(call.key_size) {}

    float* in_cell(int64_t cell, int64_t row) const {
        return call.states + ((cell * call.heads + head) * call.key_size + row) * call.value_size + column;
    }

    void read(int64_t cell) {
        for (int64_t i = 0; i < call.key_size; ++i)
            std::memcpy(values.data() + i * block, in_cell(cell, i), size * sizeof(float));
    }

    void write(int64_t cell) const {
        for (int64_t i = 0; i < call.key_size; ++i)
            std::memcpy(in_cell(cell, i), values.data() + i * block, size * sizeof(float));
    }

    void fade(const Token& token, int64_t row, float* line) const {
        const float* rates = call.rates + (head * call.key_size + row) * call.value_size + column;
        for (int64_t j = 0; j < size; ++j) line[j] *= exponential(rates[j] * token.decay[column + j]);
    }

    // Takes a token in; `query` may be anything if the output is not wanted.
    void update(const Token& token, float* output) {
        scaled(token.key, call.key_size, call.normalises, key.data());
        float change[block] = {}, result[block] = {};
        for (int64_t j = 0; j < size; ++j) change[j] = token.value[column + j];
        float known[block] = {}, decay = 0.0f;
        for (int64_t i = 0; i < call.key_size; ++i) {
            float* line = values.data() + i * block;
            if (call.rates != nullptr) {
                fade(token, i, line);
            } else {
                if (i < call.decays) decay = std::exp(token.decay[i]);
                for (int64_t j = 0; j < block; ++j) line[j] *= decay;
            }
            if (call.beta != nullptr)
                for (int64_t j = 0; j < block; ++j) known[j] += line[j] * key[i];
        }
        if (call.beta != nullptr)
            for (int64_t j = 0; j < block; ++j) change[j] = (change[j] - known[j]) * token.beta;
        for (int64_t i = 0; i < call.key_size; ++i) {
            float* line = values.data() + i * block;
            for (int64_t j = 0; j < block; ++j) {
                line[j] += key[i] * change[j];
                result[j] += line[j] * query[i];
            }
        }
        for (int64_t j = 0; j < size; ++j) output[j] = result[j] * call.scale;
    }
};

void recur_block(const RecurCall& call, int64_t row, int64_t head, int64_t column) {
    const Rows& batch = call.batch;
    const StateRow& where = batch.states[row];
    const int64_t first = batch.first(row), start = batch.start(row), end = start + batch.count(row);
    State state(call, head, column);
    if (where.held > 0) state.read(where.source);
    const int64_t group = head * call.groups / call.heads;
    float ignored[block];
    for (int64_t now = where.held; now <= end; ++now) {
        if (now == where.keep) state.write(batch.slots[row]);
        if (now == where.snapshot_at) state.write(where.snapshot);
        if (now == end) break;
        if (now < start) {
            state.update(token_of(call, call.remembered(where.source, now), head), ignored);
        } else {
            const int64_t token = first + now - start;
            scaled(call.query + (token * call.groups + group) * call.key_size, call.key_size, call.normalises,
                   state.query.data());
            state.update(token_of(call, token, head),
                         call.output + (token * call.heads + head) * call.value_size + column);
        }
    }
}

// Writes the inputs of a row's last columns to its ring, and those before a snapshot to that one's.
void remember(const RecurCall& call, int64_t row) {
    const Rows& batch = call.batch;
    const StateRow& where = batch.states[row];
    const int64_t first = batch.first(row), start = batch.start(row), end = start + batch.count(row);
    const int64_t slot = batch.slots[row], keys = call.groups * call.key_size;
    const int64_t values = call.heads * call.value_size;
    auto write = [&](int64_t cell, int64_t column) {
        float* to = call.remembered(cell, column);
        if (column < start) {
            if (cell != where.source)
                std::memcpy(to, call.remembered(where.source, column), call.inputs() * sizeof(float));
            return;
        }
        const int64_t token = first + column - start;
        std::memcpy(to, call.key + token * keys, keys * sizeof(float));
        std::memcpy(to + keys, call.value + token * values, values * sizeof(float));
        const int64_t decays = call.heads * call.decays;
        std::memcpy(to + keys + values, call.decay + token * decays, decays * sizeof(float));
        for (int64_t head = 0; head < call.heads; ++head)
            to[keys + values + decays + head] = call.beta == nullptr ? 1.0f : call.beta[token * call.heads + head];
    };
    for (int64_t column = std::max(where.held, where.snapshot_at - ring_size); column < where.snapshot_at; ++column)
        write(where.snapshot, column);
    for (int64_t column = std::max(where.held, end - ring_size); column < end; ++column) write(slot, column);
}

}  // namespace

extern "C" void convolve_float32(const ConvolveCall* call) { convolve<float>(*call); }
extern "C" void convolve_bfloat16(const ConvolveCall* call) { convolve<BFloat16>(*call); }

extern "C" void recur(const RecurCall* call) {
    const int64_t blocks = (call->value_size + block - 1) / block, items = call->heads * blocks;
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < call->rows * items; ++item)
            if (call->batch.count(item / items) > 0)
                recur_block(*call, item / items, item % items / blocks, item % blocks * block);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < call->rows; ++row)
            if (call->batch.count(row) > 0) remember(*call, row);
    }
}
