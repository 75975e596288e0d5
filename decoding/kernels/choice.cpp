// From logits to tokens: temperature, top_k, top_p, min_p, noise and the largest scores, row by row. Equal to the torch
// reference (decoding/sampling) to the bit, so products are not fused with sums and no division is approximated.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int64_t BLOCK = 64;  // tokens whose maximum is kept
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MOST_NOISE = 22.2f;
constexpr float ZERO_WEIGHT = -43.0f;  // exponents of two below this have weight 0
constexpr double SLACK = 0x1p-25, ONE = 0x1p40;

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

// The probability relative to the most probable token's, which is 2^40. below: its logit minus the largest.
int64_t weight(float below) {
  const float exponent = std::max(below * LOG2_E, -63.0f), whole = std::floor(exponent), f = exponent - whole;
  float mantissa = 0x1.c54176p-13f;
  mantissa = mantissa * f + 0x1.46d64cp-10f;
  mantissa = mantissa * f + 0x1.3d0b92p-7f;
  mantissa = mantissa * f + 0x1.c68912p-5f;
  mantissa = mantissa * f + 0x1.ebfd58p-3f;
  mantissa = mantissa * f + 0x1.62e42cp-1f;
  mantissa = mantissa * f + 1.0f;
  return (static_cast<int64_t>(static_cast<int32_t>(mantissa * 0x1p23f)) << 17) >> static_cast<int32_t>(-whole);
}

float noise(uint32_t bits) {
  return static_cast<float>(-std::log(-std::log1p(-((bits + 0.5) * 0x1p-31))));
}

struct Settings {
  float temperature;
  int64_t top_k;
  double top_p, min_p;
  uint32_t first_key, second_key;

  explicit Settings(const double *row)
      : temperature(static_cast<float>(row[0])), top_k(static_cast<int64_t>(row[1])), top_p(row[2]), min_p(row[3]),
        first_key(static_cast<uint32_t>(static_cast<int32_t>(row[4]))),
        second_key(static_cast<uint32_t>(static_cast<int32_t>(row[5]))) {}

  uint32_t bits(int64_t token) const {
    return mix(mix(static_cast<uint32_t>(token) * 0x9E3779B9u ^ first_key) + second_key) >> 1;
  }
};

// The best tokens so far, best first; the lower id at a tie.
struct Best {
  int64_t count;
  int64_t *tokens;
  float *scores;

  float worst() const { return scores[count - 1]; }

  void add(int64_t token, float score) {
    const auto before = [&](int64_t other) {
      return score > scores[other] || (score == scores[other] && token < tokens[other]);
    };
    int64_t rank = count - 1;
    if (!(score > LOWEST) || !before(rank)) return;
    for (; rank > 0 && before(rank - 1); --rank) {
      tokens[rank] = tokens[rank - 1];
      scores[rank] = scores[rank - 1];
    }
    tokens[rank] = token;
    scores[rank] = score;
  }
};

class Row {
 public:
  Row(const float *logits, const int64_t *token_ids, int64_t size, const Settings &settings, std::vector<float> &maxima,
      std::vector<float> &some)
      : logits_(logits), token_ids_(token_ids), size_(size), settings_(settings), maxima_(maxima), some_(some) {
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    maxima_.resize(blocks);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t start = block * BLOCK, end = std::min(start + BLOCK, size);
      float largest = LOWEST;
      int32_t is_nan = 0;
      for (int64_t i = start; i < end; ++i) {
        largest = logits[i] > largest ? logits[i] : largest;
        is_nan |= logits[i] != logits[i];
      }
      maxima_[block] = largest;
      has_nan_ |= is_nan;
    }
    fullest_ = std::max_element(maxima_.begin(), maxima_.end()) - maxima_.begin();
  }

  void choose(Best &best) {
    if (has_nan_) return;  // no score is a number
    if (settings_.temperature == 0.0f) return choose_largest(best);
    largest_ = scaled(maxima_[fullest_]);
    if (settings_.top_k > 0 && settings_.top_k < size_) find_top_k();
    if (settings_.top_p < 1.0) find_top_p();
    add_noisy(fullest_, best);  // so that most others are found to be too small
    for (int64_t block = 0; block < static_cast<int64_t>(maxima_.size()); ++block)
      if (block != fullest_) add_noisy(block, best);
  }

 private:
  float scaled(float logit) const { return logit / settings_.temperature; }

  void choose_largest(Best &best) const {
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (!(maxima_[block] > best.worst())) continue;
      const int64_t start = block * BLOCK, end = std::min<int64_t>(start + BLOCK, size_);
      for (int64_t i = start; i < end; ++i)
        if (logits_[i] > best.worst()) best.add(i, logits_[i]);
    }
  }

  // Collect the scaled logits of at least `bound`.
  void collect(float bound) {
    some_.clear();
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (scaled(maxima_[block]) < bound) continue;
      const int64_t start = block * BLOCK, end = std::min<int64_t>(start + BLOCK, size_);
      const size_t before = some_.size();
      some_.resize(before + BLOCK);
      float *output = some_.data() + before;
      for (int64_t i = start; i < end; ++i) {
        *output = scaled(logits_[i]);
        output += *output >= bound;
      }
      some_.resize(output - some_.data());
    }
  }

  void find_top_k() {
    float bound = LOWEST;  // at most the k-th largest
    if (settings_.top_k <= static_cast<int64_t>(maxima_.size())) {
      some_ = maxima_;
      bound = scaled(kth_of_some());
    }
    collect(bound);
    if (settings_.top_k <= static_cast<int64_t>(some_.size())) cut_ = kth_of_some();
  }

  float kth_of_some() {
    const auto kth = some_.begin() + (settings_.top_k - 1);
    std::nth_element(some_.begin(), kth, some_.end(), std::greater<float>());
    return *kth;
  }

  void find_top_p() {
    const int64_t total = total_weight();
    if (total == 0) return;
    const auto dropped = static_cast<int64_t>((1.0 - settings_.top_p + SLACK) * static_cast<double>(total));
    const int64_t wanted = std::max<int64_t>(total - dropped, 1);
    int64_t collected = 0;
    for (float depth = 4.0f; collected < wanted; depth *= 2) {
      collect(depth > 64.0f ? cut_ : std::max(cut_, largest_ - depth));
      collected = weight_of(some_.begin(), some_.end());
      if (depth > 64.0f) break;
    }
    const float threshold = last_within(wanted);
    int64_t above = 0, ties = 0;
    for (const float value : some_) {
      above += value > threshold ? weight(value - largest_) : 0;
      ties += value == threshold;
    }
    const int64_t each = std::max<int64_t>(weight(threshold - largest_), 1);
    const int64_t kept = (wanted - above + each - 1) / each;
    cut_ = threshold;
    if (kept < ties) first_tie_ = index_of_tie(ties - kept);
  }

  int64_t total_weight() const {
    int64_t total = 0;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      const float most = scaled(maxima_[block]);
      if (most < cut_ || (most - largest_) * LOG2_E < ZERO_WEIGHT) continue;
      const int64_t start = block * BLOCK, end = std::min<int64_t>(start + BLOCK, size_);
      for (int64_t i = start; i < end; ++i) {
        const float value = scaled(logits_[i]);
        const int64_t mass = weight(value - largest_);
        total += value >= cut_ ? mass : 0;
      }
    }
    return total;
  }

  int64_t weight_of(std::vector<float>::const_iterator begin, std::vector<float>::const_iterator end) const {
    int64_t total = 0;
    for (auto value = begin; value != end; ++value) total += weight(*value - largest_);
    return total;
  }

  // The last of the values, in falling order, before which the weights sum to less than `wanted`. Halves the values.
  float last_within(int64_t wanted) {
    auto begin = some_.begin(), end = some_.end();
    int64_t above = 0;
    while (end - begin > 64) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, std::greater<float>());
      const int64_t upper = weight_of(begin, middle);
      if (above + upper >= wanted) {
        end = middle;
      } else {
        above += upper;
        begin = middle;
      }
    }
    std::sort(begin, end, std::greater<float>());
    float last = *begin;
    for (auto value = begin; value != end && above < wanted; ++value) {
      last = *value;
      above += weight(*value - largest_);
    }
    return last;
  }

  int64_t index_of_tie(int64_t number) const {
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (scaled(maxima_[block]) < cut_) continue;
      const int64_t start = block * BLOCK, end = std::min<int64_t>(start + BLOCK, size_);
      for (int64_t i = start; i < end; ++i)
        if (scaled(logits_[i]) == cut_ && number-- == 0) return i;
    }
    return 0;
  }

  bool stays(int64_t token, float value) const {
    if (!(value > cut_ || (value == cut_ && token >= first_tie_))) return false;
    return settings_.min_p == 0.0 || !(static_cast<double>(weight(value - largest_)) < settings_.min_p * ONE);
  }

  // Add the block's tokens with noise. Noise is at most -log(uniform), so few uniforms are small enough to look closer.
  void add_noisy(int64_t block, Best &best) const {
    const float most = scaled(maxima_[block]);
    if (most < cut_ || most + MOST_NOISE < best.worst()) return;
    const int64_t start = block * BLOCK, length = std::min(BLOCK, size_ - start);
    const float worst = best.worst(), *logits = logits_ + start;
    uint32_t bits[BLOCK];
    float values[BLOCK];
    int32_t near[BLOCK], any = 0;
    for (int64_t i = 0; i < length; ++i) {
      bits[i] = settings_.bits(token_ids_ ? token_ids_[start + i] : start + i);
      values[i] = scaled(logits[i]);
      // 2^exponent, or up to 6 % more: a straight line between powers of two, which floats are by their bits
      const float exponent = std::min(std::max((values[i] - worst) * LOG2_E + 31.01f, -20.0f), 40.0f);
      const int32_t power_bits = static_cast<int32_t>((exponent + 127.0f) * 0x1p23f);
      float power;
      std::memcpy(&power, &power_bits, sizeof power);
      near[i] = static_cast<float>(static_cast<int32_t>(bits[i])) <= power;
      any |= near[i];
    }
    if (!any) return;
    for (int64_t i = 0; i < length; ++i)
      if (near[i] && stays(start + i, values[i])) best.add(start + i, values[i] + noise(bits[i]));
  }

  const float *logits_;
  const int64_t *token_ids_;  // whose noise the columns get; null: the columns' own numbers
  int64_t size_;
  Settings settings_;
  std::vector<float> &maxima_;  // of each block
  std::vector<float> &some_;    // scratch
  int32_t has_nan_ = 0;
  int64_t fullest_ = 0;         // the block with the largest logit
  float largest_ = 0.0f;        // scaled logit
  float cut_ = LOWEST;          // smaller scaled logits are dropped
  int64_t first_tie_ = 0;       // so are equal ones before this token
};

}  // namespace

// logits: [rows, size]; settings: [rows, 6]; token_ids: [size] or null; tokens, scores: [rows, count].
extern "C" void choose_tokens(const float *logits, const double *settings, const int64_t *token_ids, int64_t rows,
                              int64_t size, int64_t count, int64_t threads, int64_t *tokens, float *scores) {
#pragma omp parallel num_threads(std::min(threads, rows))
  {
    std::vector<float> maxima, some;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < rows; ++row) {
      Best best{count, tokens + row * count, scores + row * count};
      for (int64_t rank = 0; rank < count; ++rank) {
        best.tokens[rank] = rank;
        best.scores[rank] = LOWEST;
      }
      Row(logits + row * size, token_ids, size, Settings(settings + row * 6), maxima, some).choose(best);
    }
  }
}

struct StepCall {
  const float *logits;       // [rows, size]
  const double *settings;    // [steps, rows, 6]
  const int64_t *token_ids;  // [size] or null
  const int64_t *step;
  int64_t rows, size, count, threads;
  int64_t *next;    // [rows], the best
  double *choices;  // [steps, rows, 2, count], tokens and scores
};

// Choose the tokens of a chain's step.
extern "C" void choose_step(const StepCall *call) {
  const int64_t rows = call->rows, count = call->count;
  std::vector<int64_t> tokens(rows * count);
  std::vector<float> scores(rows * count);
  choose_tokens(call->logits, call->settings + *call->step * rows * 6, call->token_ids, rows, call->size, count,
                call->threads, tokens.data(), scores.data());
  double *choices = call->choices + *call->step * rows * 2 * count;
  for (int64_t row = 0; row < rows; ++row, choices += 2 * count)
    for (int64_t rank = 0; rank < count; ++rank) {
      const int64_t column = tokens[row * count + rank], token = call->token_ids ? call->token_ids[column] : column;
      if (rank == 0) call->next[row] = token;
      choices[rank] = static_cast<double>(token);
      choices[count + rank] = scores[row * count + rank];
    }
}
