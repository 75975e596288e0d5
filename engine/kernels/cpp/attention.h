// Attention of some tokens of one row with one kv head over pages. See engine/kernels/native_attention.py.
//
// A token's sums run over positions of its text in a fixed order, in blocks and splits that begin at fixed positions.
// So its result has the same bits whatever tokens are computed with it, and in whichever columns its path lies.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace attention {

constexpr int64_t page_size = 16, block_size = 128, split_size = 2048;  // positions; each is a multiple of the last
constexpr int64_t span = 2 * block_size;  // columns whose scores are kept at a time
constexpr int64_t tile_queries = 48;      // the most queries of a tile that has several tokens
constexpr int64_t few_queries = 24;       // so many read pages of bfloat16 directly; more read a copy in float32
constexpr int64_t parts = page_size / lanes;
constexpr int64_t group = lanes == 16 ? 8 : 4;  // queries whose sums are in registers
constexpr float masked = -1e30f;                // best score where nothing is visible
constexpr float least = -80.0f;                 // its exponential counts as 0: denormal numbers are slow

// What Python gives.
struct Arguments {
    int64_t rows, heads, kv_heads, key_dim, value_dim, table_width, reach, in_chunks, threads, writes;
    Number number, page_number;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
    const char *query, *key, *value;
    char *keys, *values;  // values: null where each is the beginning of its key
    const int32_t* tables;
    const int64_t *slots, *offsets, *columns, *positions, *row_of, *trunks, *branches;
    const float* sinks;
    char* output;
    float scale, softcap;
};

struct Call : Arguments {
    int64_t divided = 1;  // into how many tiles the queries are divided that share a token and a kv head

    int64_t shared() const { return heads / kv_heads / divided; }  // queries of a token in a tile
    int64_t padded() const { return (value_dim + lanes - 1) / lanes * lanes; }
    int64_t first(int64_t token) const {
        const int64_t position = positions[token];
        return in_chunks ? position / reach * reach : std::max<int64_t>(0, position - reach + 1);
    }

    const char* page(const char* pages, int64_t row, int64_t kv_head, int64_t column, int64_t dim) const {
        const int64_t page = tables[slots[row] * table_width + column / page_size];
        return pages + (page * kv_heads + kv_head) * page_size * dim * bytes(page_number);
    }
};

// Sums over some positions, not yet divided by the total.
struct Partial {
    float best, total;
    float* sums;
    bool empty() const { return best <= masked; }

    // Appends the sums over later positions.
    void append(const Partial& later, int64_t size) {
        if (later.empty()) return;
        const bool copies = empty();
        const float top = copies ? later.best : std::max(best, later.best);
        const float before = copies ? 0.0f : exponential(spread(best - top))[0];
        const float after = exponential(spread(later.best - top))[0];
        total = copies ? later.total : total * before + later.total * after;
        for (int64_t d = 0; d < size; ++d) sums[d] = copies ? later.sums[d] : sums[d] * before + later.sums[d] * after;
        best = top;
    }
};

// Scores of Q queries with the keys of P pages. queries: [dim, Q]. scores: rows of `span`. ahead: pages to bring into the
// cache meanwhile, which lie too far apart for the processor to foresee; or null.
template <int Q, int P, typename T>
void score_pages(const float* queries, const T* const* pages, const char* const* ahead, int64_t dim, float* scores) {
    constexpr int width = P * parts;
    Registers<Q * width> sums{};
    for (int64_t d = 0; d < dim; ++d) {
        if (ahead != nullptr && (sizeof(T) == 4 || d % 2 == 0))
            for (int i = 0; i < P; ++i) __builtin_prefetch(ahead[i] + d * page_size * sizeof(T), 0, 2);
        Registers<width> keys;
        repeat<width>([&](auto i) __attribute__((always_inline)) {
            keys.template at<i>() = load_vector(pages[i / parts] + d * page_size + i % parts * lanes);
        });
        repeat<Q * width>([&](auto i) __attribute__((always_inline)) {
            sums.template at<i>() += spread(queries[d * Q + i / width]) * keys.template at<i % width>();
        });
    }
    repeat<Q * width>([&](auto i) __attribute__((always_inline)) {
        store_vector(sums.template at<i>(), scores + i / width * span + i % width * lanes);
    });
}

template <int Q, typename T>
void score(const float* queries, const T* const* pages, const char* const* ahead, int64_t count, int64_t dim,
           float* scores) {
    constexpr int step = lanes < 16 ? 1 : Q > 4 ? 2 : 4;
    const auto following = [&](int64_t page) { return ahead == nullptr ? nullptr : ahead + page; };
    int64_t page = 0;
    for (; page + step <= count; page += step)
        score_pages<Q, step>(queries, pages + page, following(page), dim, scores + page * page_size);
    for (; page < count; ++page)
        score_pages<Q, 1>(queries, pages + page, following(page), dim, scores + page * page_size);
}

// Adds `count` weighted values to V vectors of Q queries' sums. weights: rows of `span`. sums: rows of `stride`.
template <int Q, int V, typename T>
void add_vectors(const float* weights, const T* const* values, const char* const* ahead, int64_t count,
                 int64_t stride, int64_t start, float* sums) {
    Registers<Q * V> totals;
    repeat<Q * V>([&](auto i) __attribute__((always_inline)) {
        totals.template at<i>() = load_vector(sums + i / V * stride + start + i % V * lanes);
    });
    for (int64_t c = 0; c < count; ++c) {
        if (ahead != nullptr) {
            const char* line = ahead[c / page_size] + (c % page_size * stride + start) * sizeof(T);
            for (int v = 0; v < V * lanes * static_cast<int>(sizeof(T)); v += 64) __builtin_prefetch(line + v, 0, 2);
        }
        Registers<V> row;
        repeat<V>([&](auto i) __attribute__((always_inline)) {
            row.template at<i>() = load_vector(values[c] + start + i * lanes);
        });
        repeat<Q * V>([&](auto i) __attribute__((always_inline)) {
            totals.template at<i>() += spread(weights[i / V * span + c]) * row.template at<i % V>();
        });
    }
    repeat<Q * V>([&](auto i) __attribute__((always_inline)) {
        store_vector(totals.template at<i>(), sums + i / V * stride + start + i % V * lanes);
    });
}

template <int Q, typename T>
void add(const float* weights, const T* const* values, const char* const* ahead, int64_t count, int64_t stride,
         float* sums) {
    constexpr int step = Q > 4 || lanes < 16 ? 2 : 4;
    int64_t start = 0;
    for (; start + step * lanes <= stride; start += step * lanes)
        add_vectors<Q, step>(weights, values, ahead, count, stride, start, sums);
    for (; start < stride; start += lanes) add_vectors<Q, 1>(weights, values, ahead, count, stride, start, sums);
}

// Calls `function` with a constant, its argument: 1 … group.
template <int Q = group, typename F>
void with_constant(int64_t count, F function) {
    if constexpr (Q == 1) {
        function(std::integral_constant<int, 1>());
    } else {
        if (count == Q) return function(std::integral_constant<int, Q>());
        with_constant<Q - 1>(count, function);
    }
}

// The tokens of a tile and what each of them sees.
struct Sight {
    int64_t first, trunk, end;  // positions: first … end - 1, of which those < trunk are columns
    uint64_t branches;          // the columns trunk + i of later positions, as bits
};

// Memory that a thread keeps from call to call.
struct Buffers {
    std::vector<float> numbers;
    std::vector<Vector> totals;

    float* fit(int64_t count, int64_t queries) {
        if (static_cast<int64_t>(numbers.size()) < count + lanes) numbers.resize(count + lanes);
        if (static_cast<int64_t>(totals.size()) < queries * parts) totals.resize(queries * parts);
        const auto address = reinterpret_cast<uintptr_t>(numbers.data());
        return numbers.data() + (sizeof(Vector) - address % sizeof(Vector)) % sizeof(Vector) / sizeof(float);
    }
};

class Tile {
    const Call& call;
    const int64_t shared, padded;
    int64_t row, head, kv_head, token, count;  // head: of the kv heads' divided queries; count: of tokens
    std::vector<Sight> sights;
    const int64_t most;  // queries of a tile
    float *const scores, *const copied_values, *const sums, *const copied_keys, *const queries, *const best;
    Vector* const totals;  // [queries, parts]
    const void* key_pages[span / page_size];
    const void *value_rows[span], *path_rows[span];  // by column and by position
    const char *next_keys[span / page_size], *next_values[span / page_size];  // pages of the next block
    int64_t text, least_first, most_first, end, last_column;  // of the tile's sights
    int64_t each;  // queries whose sums are in registers at a time
    bool branched;

  public:
    Tile(const Call& call, Buffers& buffers)
        : call(call),
          shared(call.shared()),
          padded(call.padded()),
          most(std::max(shared, tile_queries)),
          scores(buffers.fit(most * (span + padded + call.key_dim + 1) + span * (padded + call.key_dim), most)),
          copied_values(scores + most * span),
          sums(copied_values + span * padded),
          copied_keys(sums + most * padded),
          queries(copied_keys + span * call.key_dim),
          best(queries + most * call.key_dim),
          totals(buffers.totals.data()) {}

    // Sums up for the tokens … of a row, over the positions of one split, into `partials`, [tokens, shared].
    void run(int64_t row, int64_t head, int64_t token, int64_t count, int64_t split, Partial* partials) {
        look(row, head, token, count);
        if (last_column + 1 - text / block_size * block_size > span && count > 1) {
            for (int64_t i = 0; i < count; ++i) run(row, head, token + i, 1, split, partials + i * shared);
            return;
        }
        pack_queries();
        std::fill_n(sums, count * shared * padded, 0.0f);
        std::fill_n(totals, count * shared * parts, Vector{});
        std::fill_n(best, count * shared, masked);
        const int64_t start = std::max(split * split_size, least_first / block_size * block_size);
        for (int64_t block = start; block < std::min(end, (split + 1) * split_size); block += block_size) run_block(block);
        for (int64_t i = 0; i < count * shared; ++i) {
            Vector total = totals[i * parts];
            for (int64_t part = 1; part < parts; ++part) total += totals[i * parts + part];
            float sum = 0;
            for (int64_t lane = 0; lane < lanes; ++lane) sum += total[lane];
            partials[i].append({best[i], sum, &sums[i * padded]}, padded);
        }
    }

  private:
    void look(int64_t row, int64_t head, int64_t token, int64_t count) {
        this->row = row, this->head = head, this->token = token, this->count = count;
        kv_head = head / call.divided;
        sights.resize(count);
        text = least_first = std::numeric_limits<int64_t>::max();
        most_first = end = last_column = 0;
        branched = false;
        const int64_t groups = (count * shared + group - 1) / group;
        each = (count * shared + groups - 1) / groups;
        for (int64_t i = token; i < token + count; ++i) {
            const Sight sight{call.first(i), call.trunks[i], call.positions[i] + 1, static_cast<uint64_t>(call.branches[i])};
            sights[i - token] = sight;
            text = std::min(text, sight.trunk);
            least_first = std::min(least_first, sight.first);
            most_first = std::max(most_first, sight.first);
            end = std::max(end, sight.end);
            branched |= sight.branches != 0;
            const int64_t beyond = sight.branches ? 64 - __builtin_clzll(sight.branches) : 0;
            last_column = std::max(last_column, sight.trunk + beyond - 1);
        }
    }

    // Writes scaled queries as [dim, group] for each group of queries.
    void pack_queries() {
        for (int64_t i = 0; i < count * shared; ++i) {
            const int64_t width = std::min(each, count * shared - i / each * each);
            const int64_t offset = (token + i / shared) * call.query_token + (head * shared + i % shared) * call.query_head;
            widen(call.query + offset * bytes(call.number), call.number, call.key_dim, copied_keys);
            float* to = &queries[i / each * each * call.key_dim + i % each];
            for (int64_t d = 0; d < call.key_dim; ++d) to[d * width] = copied_keys[d] * call.scale;
        }
    }

    // Goes on with the positions block … block + block_size - 1.
    void run_block(int64_t block) {
        const bool ends = block + block_size > text;
        const int64_t limit = ends && branched ? last_column + 1 : std::min(block + block_size, last_column + 1);
        const int64_t start = std::max(block, least_first / page_size * page_size);
        const bool copies = count * shared > few_queries || call.page_number > Number::bfloat16 ||
                            call.value_dim != padded || call.values == nullptr;
        find(block, start, limit, copies);
        if (copies || call.page_number == Number::float32) {
            compute<float>(block, start, limit, ends, !copies);
        } else {
            compute<BFloat16>(block, start, limit, ends, true);
        }
    }

    // Finds the columns' pages and the rows of values in them, by column - block.
    void find(int64_t block, int64_t start, int64_t limit, bool copies) {
        const int64_t key_dim = call.key_dim, value_dim = call.value_dim;
        for (int64_t i = 0; !copies && i < span / page_size; ++i) {
            const int64_t column = std::min(block + block_size + i * page_size, last_column);
            next_keys[i] = call.page(call.keys, row, kv_head, column, key_dim);
            next_values[i] = call.page(call.values, row, kv_head, column, value_dim);
        }
        for (int64_t column = start; column < limit; column += page_size) {
            const int64_t index = column - block, used = std::min(page_size, limit - column);
            const char* keys = call.page(call.keys, row, kv_head, column, key_dim);
            const char* values = call.values ? call.page(call.values, row, kv_head, column, value_dim) : nullptr;
            key_pages[index / page_size] = keys;
            for (int64_t i = 0; values != nullptr && i < used; ++i)
                value_rows[index + i] = values + i * value_dim * bytes(call.page_number);
            if (!copies) continue;
            widen(keys, call.page_number, key_dim * page_size, &copied_keys[index * key_dim]);
            key_pages[index / page_size] = &copied_keys[index * key_dim];
            if (values == nullptr) {
                copy_values(index, used);
                continue;
            }
            if (value_dim == padded) widen(values, call.page_number, used * value_dim, &copied_values[index * padded]);
            for (int64_t i = 0; i < used; ++i) {
                float* to = &copied_values[(index + i) * padded];
                if (value_dim != padded) widen(value_rows[index + i], call.page_number, value_dim, to);
                value_rows[index + i] = to;
            }
        }
    }

    // Takes the values of a page's columns from its keys.
    void copy_values(int64_t index, int64_t used) {
        const float* keys = &copied_keys[index * call.key_dim];
        for (int64_t i = 0; i < used; ++i) {
            float* to = &copied_values[(index + i) * padded];
            for (int64_t d = 0; d < call.value_dim; ++d) to[d] = keys[d * page_size + i];
            value_rows[index + i] = to;
        }
    }

    template <typename T>
    void compute(int64_t block, int64_t start, int64_t limit, bool ends, bool fetches) {
        const int64_t total = count * shared, before = start - block, pages = (limit - start + page_size - 1) / page_size;
        const T* const* keys = reinterpret_cast<const T* const*>(key_pages) + before / page_size;
        for (int64_t i = 0; i < total; i += each)
            with_constant(std::min(each, total - i), [&](auto width) {
                score<width>(&queries[i * call.key_dim], keys, i == 0 && fetches ? next_keys : nullptr, pages, call.key_dim,
                             &scores[i * span + before]);
            });
        for (int64_t i = 0; i < count; ++i) {
            const Sight& sight = sights[i];
            for (int64_t q = i * shared; q < (i + 1) * shared; ++q) {
                if (ends && sight.branches) gather(sight, block, &scores[q * span]);
                soften(q, std::max<int64_t>(0, sight.first - block), std::min(block_size, sight.end - block));
            }
        }
        const int64_t from = std::max(block, most_first), to = std::min(block + block_size, text);
        for (int64_t i = 0; i < count; ++i) add_own<T>(i, block, block, std::min(from, block + block_size));
        if (from >= to) {
            for (int64_t i = 0; i < count; ++i) add_own<T>(i, block, from, block + block_size);
            return;
        }
        const T* const* values = reinterpret_cast<const T* const*>(value_rows) + from - block;
        for (int64_t i = 0; i < total; i += each)
            with_constant(std::min(each, total - i), [&](auto width) {
                add<width>(&scores[i * span + from - block], values, i == 0 && fetches ? next_values : nullptr, to - from,
                           padded, &sums[i * padded]);
            });
        for (int64_t i = 0; i < count; ++i) add_own<T>(i, block, to, block + block_size);
    }

    // Calls function(position, column) for the positions of a path.
    template <typename F>
    static void walk(const Sight& sight, F function) {
        int64_t position = sight.end - __builtin_popcountll(sight.branches);
        for (uint64_t bits = sight.branches; bits; bits &= bits - 1)
            function(position++, sight.trunk + __builtin_ctzll(bits));
    }

    // Moves scores from columns to positions. A path's columns are not below its positions, so none is lost.
    static void gather(const Sight& sight, int64_t block, float* scores) {
        walk(sight, [&](int64_t position, int64_t column) {
            if (position >= block && position < block + block_size) scores[position - block] = scores[column - block];
        });
    }

    // Adds the values of one token's positions from … to - 1.
    template <typename T>
    void add_own(int64_t index, int64_t block, int64_t from, int64_t to) {
        const Sight& sight = sights[index];
        from = std::max(from, sight.first), to = std::min(to, sight.end);
        if (from >= to) return;
        const void** rows = value_rows;
        if (sight.branches && to > sight.trunk) {
            std::copy_n(rows, block_size, path_rows);
            walk(sight, [&](int64_t position, int64_t column) {
                if (position >= from && position < to) path_rows[position - block] = rows[column - block];
            });
            rows = path_rows;
        }
        const T* const* values = reinterpret_cast<const T* const*>(rows) + from - block;
        for (int64_t i = index * shared; i < (index + 1) * shared; i += group)
            with_constant(std::min(group, (index + 1) * shared - i), [&](auto width) {
                add<width>(&scores[i * span + from - block], values, nullptr, to - from, padded, &sums[i * padded]);
            });
    }

    // Turns a query's scores of the positions from … to - 1 of a block into weights.
    void soften(int64_t query, int64_t from, int64_t to) {
        if (from >= to) return;
        float* line = &scores[query * span];
        Vector top = spread(masked);
        Integers lane;
        for (int64_t i = 0; i < lanes; ++i) lane[i] = static_cast<int32_t>(i);
        const int64_t start = from / page_size * page_size, limit = (to + page_size - 1) / page_size * page_size;
        for (int64_t i = start; i < limit; i += lanes) {
            Vector value = load_vector(line + i);
            if (call.softcap > 0) value = hyperbolic_tangent(value * (1.0f / call.softcap)) * call.softcap;
            const Integers index = lane + static_cast<int32_t>(i);
            const Integers seen = (index >= static_cast<int32_t>(from)) & (index < static_cast<int32_t>(to));
            value = seen ? value : spread(2 * masked);
            store_vector(value, line + i);
            top = larger(value, top);
        }
        const float highest = std::max(best[query], largest(top));
        Vector* total = &totals[query * parts];
        if (highest > best[query]) {
            const Vector factor = spread(exponential(spread(best[query] - highest))[0]);
            for (int64_t part = 0; part < parts; ++part) total[part] *= factor;
            float* to_scale = &sums[query * padded];
            for (int64_t d = 0; d < padded; d += lanes) store_vector(load_vector(to_scale + d) * factor, to_scale + d);
            best[query] = highest;
        }
        for (int64_t i = start; i < limit; i += lanes) {
            const Vector below = load_vector(line + i) - highest;
            const Vector weight = below < least ? Vector{} : exponential(below);
            store_vector(weight, line + i);
            total[(i - start) / lanes % parts] += weight;
        }
    }
};

}  // namespace attention
