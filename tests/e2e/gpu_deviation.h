// How far a model on the GPU is from one on the CPU: texts through both runners in steps of every
// kind.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "cache/cache_format.h"
#include "checkpoint/checkpoint.h"
#include "engine/runner.h"

namespace fathom {

std::unique_ptr<Runner> on_cpu(const Checkpoint& checkpoint, DType compute, CacheFormat format);

// A text that goes through a runner in chunks: as many tokens in a step as `chunks` says, the last
// of them again and again.
struct Text {
  std::vector<int32_t> ids;
  std::vector<int64_t> chunks;
};

// Of random tokens below 8,003.
Text random_text(std::mt19937& random, size_t length, std::vector<int64_t> chunks);

// Of all kinds: in prompts whole and in chunks, over cached prefixes, in decode.
std::vector<Text> random_texts(std::mt19937& random);

// What every position of every text says about the next token, all texts going through together.
std::vector<std::vector<SampledToken>> run(Runner& runner, const std::vector<Text>& texts);

// How far results are from others: the share of positions with another token, and the likely
// tokens' log-probabilities, on average.
struct Deviation {
  double other_tokens = 0, logprobs = 0;
};

// Also printed, as what `what` is.
Deviation deviation(const std::vector<std::vector<SampledToken>>& actual,
                    const std::vector<std::vector<SampledToken>>& expected, const char* what);

}  // namespace fathom
