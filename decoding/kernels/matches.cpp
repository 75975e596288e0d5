// Where the end of a text occurred before, in the last tokens of many texts.
//
// A position is the gap after a token. All positions after equal tokens of one owner are in a binary search tree, sorted
// by the tokens before them, read backwards; newer ones are above older ones. So the first position on a search path with
// the longest match is the newest that has it. An insertion makes a position the root, and splits the tree along the
// search path, as the match finders of LZMA do. What leaves the window has nothing newer below it: a search that meets it
// ends there.

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t MOST_STEPS = 256;  // of a search; only texts made for it need more
constexpr int32_t BREAK = -1;        // the token between two texts

struct Node {                // a position and the token before it
    int32_t token;
    uint32_t owner;          // of the text; texts of different owners never match
    uint32_t children[2];    // how far back the positions are that sort before and after; 0: none
};

struct Index {
    int64_t window;          // positions that are kept
    int64_t depth;           // tokens that are compared
    int64_t end;             // the last position; the first one is window + 1
    Node* nodes;             // [window]
    uint32_t* roots;         // [window] the last 32 bits of positions

    Node& at(int64_t position) const { return nodes[position % window]; }
    bool holds(int64_t position) const { return position > end - window; }

    uint32_t& root(uint32_t owner, int32_t token) const {
        uint64_t key = (uint64_t(owner) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
        key = (key ^ key >> 32) * 0xBF58476D1CE4E5B9ull;
        return roots[(key ^ key >> 29) % uint64_t(window)];
    }

    int64_t root_position(uint32_t stored) const { return end - int64_t(uint32_t(end) - stored); }
};

// A search for the tokens that `before(n)` returns: the n-th before the text's end.
template <typename Before>
struct Search {
    const Index& index;
    uint32_t owner;
    int64_t most;       // tokens that the text has, or that are compared
    Before before;
    int64_t matched[2] = {0, 0};  // by the last position that sorted before the text, and after it

    // How many tokens match before a position, −1 if it is another owner's; side: 1 if the text sorts after it.
    int64_t compare(int64_t position, int& side) {
        const Node& last = index.at(position);
        if (last.owner != owner) {
            side = last.owner < owner;
            return -1;
        }
        const int64_t limit = std::min(most, position - std::max(index.end - index.window, index.window));
        int64_t count = std::min({matched[0], matched[1], limit});
        int64_t slot = (position - count) % index.window;
        for (; count < limit; ++count, slot = slot ? slot - 1 : index.window - 1) {
            const int32_t token = index.nodes[slot].token, wanted = before(count);
            if (token != wanted) {
                side = token < wanted;
                break;
            }
        }
        if (count == limit) side = 1;
        return count;
    }
};

void insert(Index& index) {
    const int64_t position = index.end;
    Node& node = index.at(position);
    uint32_t& root = index.root(node.owner, node.token);
    int64_t next = index.root_position(root);
    root = uint32_t(position);
    auto before = [&](int64_t n) { return index.at(position - n).token; };
    Search<decltype(before)> search{index, node.owner, std::min(index.depth, index.window - 1), before};
    // Where the next position that sorts before, or after, is to be linked, and relative to which position.
    uint32_t* links[2] = {&node.children[0], &node.children[1]};
    int64_t from[2] = {position, position};
    for (int64_t steps = 0; next < position && index.holds(next) && steps < MOST_STEPS; ++steps) {
        Node& met = index.at(next);
        int side = 0;
        const int64_t count = search.compare(next, side);
        if (count >= index.depth) {  // the same context: the newer position replaces the older
            for (int i = 0; i < 2; ++i) {
                const int64_t child = next - met.children[i];
                *links[i] = met.children[i] && index.holds(child) ? uint32_t(from[i] - child) : 0;
            }
            return;
        }
        // A position that sorts before the text goes to its left, with all to its own left.
        const int link = side ? 0 : 1;
        search.matched[link] = std::max<int64_t>(count, 0);
        *links[link] = uint32_t(from[link] - next);
        links[link] = &met.children[1 - link];
        from[link] = next;
        next = met.children[1 - link] ? next - met.children[1 - link] : index.end + 1;
    }
    *links[0] = *links[1] = 0;
}

}  // namespace

extern "C" {

void* matches_make(int64_t window, int64_t depth) {
    auto* index = new Index{window, depth, window, nullptr, nullptr};
    index->nodes = static_cast<Node*>(std::calloc(window, sizeof(Node)));
    index->roots = static_cast<uint32_t*>(std::calloc(window, sizeof(uint32_t)));
    if (index->nodes && index->roots) return index;
    std::free(index->nodes);
    std::free(index->roots);
    delete index;
    return nullptr;
}

void matches_free(void* made) {
    auto* index = static_cast<Index*>(made);
    std::free(index->nodes);
    std::free(index->roots);
    delete index;
}

// Append tokens of a text, [count]. `BREAK` ends it.
void matches_add(void* made, int64_t owner, const int32_t* tokens, int64_t count) {
    auto& index = *static_cast<Index*>(made);
    for (int64_t i = 0; i < count; ++i) {
        ++index.end;
        index.at(index.end) = {tokens[i], uint32_t(owner), {0, 0}};
        if (tokens[i] != BREAK) insert(index);
    }
}

// Find the longest match of the end of a text, [length], and its newest position. Copies at most `count` tokens that
// followed it. Writes the length of the match, how many tokens were added up to it, and how many were copied.
void matches_find(void* made, int64_t owner, const int32_t* text, int64_t length, int64_t count, int32_t* copy,
                  int64_t* result) {
    const auto& index = *static_cast<Index*>(made);
    auto before = [&](int64_t n) { return text[length - 1 - n]; };
    Search<decltype(before)> search{index, uint32_t(owner), std::min({index.depth, length, index.window - 1}), before};
    int64_t best = 0, position = 0;
    int64_t next = length ? index.root_position(index.root(uint32_t(owner), text[length - 1])) : index.end - index.window;
    for (int64_t steps = 0; index.holds(next) && steps < MOST_STEPS && best < search.most; ++steps) {
        const Node& met = index.at(next);
        int side = 0;
        const int64_t matched = search.compare(next, side);
        if (matched > best) best = matched, position = next;
        const int link = side ? 0 : 1;
        search.matched[link] = std::max<int64_t>(matched, 0);
        if (!met.children[1 - link]) break;
        next -= met.children[1 - link];
    }
    int64_t copied = 0;
    for (; best && copied < count && position + copied < index.end; ++copied) {
        copy[copied] = index.at(position + copied + 1).token;
        if (copy[copied] == BREAK) break;
    }
    result[0] = best, result[1] = position - index.window, result[2] = copied;
}

}  // extern "C"
