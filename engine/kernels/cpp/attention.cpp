// Attention over pages on a CPU: writes new keys and values, then shares tiles of tokens among threads.

#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math", "no-reciprocal-math")  // every tile must add in the same order
#endif

#include "attention.h"

namespace attention {

// Some tokens of a row, with one kv head, and the splits of positions to sum up: first_split … end_split - 1.
struct Item {
    int64_t row, head, token, count, first_split, end_split;
    int64_t partial;  // index of its first partial sum, where the splits of a tile are items of their own; else -1
};

void write_token(const Call& call, int64_t token, int64_t head) {
    const int64_t row = call.row_of[token], column = call.columns[token], offset = column % page_size;
    const int64_t size = bytes(call.number);
    const char* key = call.key + (token * call.key_token + head * call.key_head) * size;
    const char* value = call.value + (token * call.value_token + head * call.value_head) * size;
    auto* keys = const_cast<char*>(call.page(call.keys, row, head, column, call.key_dim));
    if (call.values != nullptr) {
        auto* values = const_cast<char*>(call.page(call.values, row, head, column, call.value_dim));
        std::memcpy(values + offset * call.value_dim * size, value, call.value_dim * size);
    }
    if (size == 4)
        for (int64_t d = 0; d < call.key_dim; ++d)
            reinterpret_cast<uint32_t*>(keys)[d * page_size + offset] = reinterpret_cast<const uint32_t*>(key)[d];
    else
        for (int64_t d = 0; d < call.key_dim; ++d)
            reinterpret_cast<uint16_t*>(keys)[d * page_size + offset] = reinterpret_cast<const uint16_t*>(key)[d];
}

// Divides a query's sums by their total and writes them to the output.
void finish(const Call& call, int64_t token, int64_t head, const Partial& partial) {
    const int64_t size = bytes(call.number);
    float total = partial.total, factor = 1.0f;
    if (call.sinks != nullptr) {
        const float top = std::max(partial.best, call.sinks[head]);
        factor = exponential(spread(partial.best - top))[0];
        total = total * factor + exponential(spread(call.sinks[head] - top))[0];
    }
    factor = factor / total;
    for (int64_t d = 0; d < call.value_dim; ++d) partial.sums[d] *= factor;
    narrow(partial.sums, call.number, call.value_dim, call.output + (token * call.heads + head) * call.value_dim * size);
}

// Returns the tiles. With several threads, the splits of a long row with few tokens are items of their own.
std::vector<Item> share(const Call& call, int64_t& partials) {
    std::vector<Item> items;
    const int64_t tokens = std::max<int64_t>(1, tile_queries / call.shared());
    for (int64_t row = 0; row < call.rows; ++row) {
        const int64_t first = call.offsets[row], end = call.offsets[row + 1];
        for (int64_t token = first; token < end; token += tokens) {
            const int64_t count = std::min(tokens, end - token);
            int64_t start = call.first(token), last = call.positions[token];
            for (int64_t i = token; i < token + count; ++i) {
                start = std::min(start, call.first(i));
                last = std::max(last, call.positions[i]);
            }
            const int64_t first_split = start / split_size, end_split = last / split_size + 1;
            const bool apart = call.threads > 1 && end - first <= tokens && end_split - first_split > 1;
            for (int64_t head = 0; head < call.kv_heads * call.divided; ++head) {
                if (!apart) items.push_back({row, head, token, count, first_split, end_split, -1});
                for (int64_t split = first_split; apart && split < end_split; ++split) {
                    items.push_back({row, head, token, count, split, split + 1, partials});
                    partials += count * call.shared();
                }
            }
        }
    }
    return items;
}

class Scratch {
    std::vector<float> sums;

  public:
    std::vector<Partial> partials;

    Scratch(int64_t count, int64_t size) : sums(count * size), partials(count) {
        for (int64_t i = 0; i < count; ++i) partials[i] = {masked, 0.0f, &sums[i * size]};
    }
};

void finish_all(const Call& call, const Item& item, const Partial* partials) {
    for (int64_t i = 0; i < item.count * call.shared(); ++i)
        finish(call, item.token + i / call.shared(), item.head * call.shared() + i % call.shared(), partials[i]);
}

// Returns `divided`, so that each thread has a tile. Every tile reads the keys anew, so none has few queries.
int64_t divide(const Call& call) {
    constexpr int64_t least_queries = 8;
    const int64_t tiles = call.offsets[call.rows] * call.kv_heads, queries = call.shared();
    int64_t divided = 1;
    while (tiles * divided < call.threads && queries % (2 * divided) == 0 && queries / (2 * divided) >= least_queries)
        divided *= 2;
    return divided;
}

void attend(const Call& call) {
    int64_t kept = 0;
    const std::vector<Item> items = share(call, kept);
    const int64_t tokens = call.offsets[call.rows], size = static_cast<int64_t>(items.size()), padded = call.padded();
    Scratch apart(kept, padded);
#pragma omp parallel num_threads(call.threads)
    {
        if (call.writes) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens * call.kv_heads; ++i) write_token(call, i / call.kv_heads, i % call.kv_heads);
        }
        static thread_local Buffers buffers;
        Tile tile(call, buffers);
        Scratch own(std::max(tile_queries, call.shared()), padded);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < size; ++i) {
            const Item& item = items[i];
            Partial* partials = item.partial < 0 ? own.partials.data() : &apart.partials[item.partial];
            for (int64_t j = 0; j < item.count * call.shared(); ++j) partials[j].best = masked;
            for (int64_t split = item.first_split; split < item.end_split; ++split)
                tile.run(item.row, item.head, item.token, item.count, split, partials);
            if (item.partial < 0) finish_all(call, item, partials);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < size; ++i) {
            const Item& item = items[i];
            if (item.partial < 0 || (i > 0 && items[i - 1].head == item.head && items[i - 1].token == item.token)) continue;
            const int64_t count = item.count * call.shared();
            Partial* partials = &apart.partials[item.partial];
            for (int64_t j = i + 1; j < size && items[j].head == item.head && items[j].token == item.token; ++j)
                for (int64_t k = 0; k < count; ++k) partials[k].append(apart.partials[items[j].partial + k], padded);
            finish_all(call, item, partials);
        }
    }
}

}  // namespace attention

extern "C" void attend(const attention::Arguments* arguments) {
    attention::Call call{*arguments};
    call.divided = attention::divide(call);
    attention::attend(call);
}
