// Measures the deviation of a model on the GPU from one on the CPU: texts through both runners in
// steps of every kind.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "cache/cache_format.h"
#include "checkpoint/checkpoint.h"
#include "engine/runner.h"

namespace fathom {

std::unique_ptr<Runner> on_cpu(const Checkpoint& checkpoint, DType compute, CacheFormat format);

// A text and its chunking: `chunks` lists the tokens of each step; the last entry repeats.
struct Text {
  std::vector<int32_t> ids;
  std::vector<int64_t> chunks;
};

// Random tokens below 8,003.
Text random_text(std::mt19937& random, size_t length, std::vector<int64_t> chunks);

// Texts of all kinds: prompts whole and in chunks, over cached prefixes, in decode.
std::vector<Text> random_texts(std::mt19937& random);

// The next-token distribution at every position of every text, all texts running together.
std::vector<std::vector<SampledToken>> run(Runner& runner, const std::vector<Text>& texts);

// Expects equal tokens and log-probabilities, to the bit.
void expect_equal(const std::vector<std::vector<SampledToken>>& actual,
                  const std::vector<std::vector<SampledToken>>& expected);

// Deviation between results: the share of positions with another token, and the mean difference of
// the likely tokens' log-probabilities.
struct Deviation {
  double other_tokens = 0, logprobs = 0;
};

// Also prints it, labelled `what`.
Deviation deviation(const std::vector<std::vector<SampledToken>>& actual,
                    const std::vector<std::vector<SampledToken>>& expected, const char* what);

}  // namespace fathom
