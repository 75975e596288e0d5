// Repetition, frequency and presence penalty on the tokens of each row's text, in place. Equal to the torch version.
#include <algorithm>
#include <cstdint>
#include <vector>

// logits: [rows, size]. lengths, firsts: [rows], each row's part of tokens and counts. settings: [3, rows]. before: the
// values that were changed, row after row.
extern "C" void penalise(float *logits, int64_t rows, int64_t size, const int64_t *lengths, const int64_t *firsts,
                         const int64_t *tokens, const float *counts, const float *settings, int64_t threads,
                         float *before) {
  std::vector<int64_t> starts(rows + 1, 0);
  for (int64_t row = 0; row < rows; ++row) starts[row + 1] = starts[row] + lengths[row];
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float repetition = settings[row], frequency = settings[rows + row], presence = settings[2 * rows + row];
    float *values = logits + row * size, *saved = before + starts[row];
    for (int64_t i = 0; i < lengths[row]; ++i) {
      const float count = counts[firsts[row] + i];
      float &value = values[tokens[firsts[row] + i]];
      saved[i] = value;
      const float repeated = value < 0 ? value * repetition : value / repetition;
      value = repeated - frequency * count - presence * (count > 0 ? 1.0f : 0.0f);
    }
  }
}

// Undo `penalise`.
extern "C" void restore(float *logits, int64_t rows, int64_t size, const int64_t *lengths, const int64_t *firsts,
                        const int64_t *tokens, int64_t threads, const float *before) {
  std::vector<int64_t> starts(rows + 1, 0);
  for (int64_t row = 0; row < rows; ++row) starts[row + 1] = starts[row] + lengths[row];
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < lengths[row]; ++i) logits[row * size + tokens[firsts[row] + i]] = before[starts[row] + i];
}
