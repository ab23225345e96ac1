#include "e2e/forced_answers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "e2e/gpu_deviation.h"

namespace fathom {
namespace {

constexpr int64_t kRowsAStep = 2048;  // on_cpu()'s limit
constexpr int32_t kEndOfSequence = 1;

// The float32 bundled model's distribution after each token of each text.
std::vector<std::vector<SampledToken>> forced(const std::vector<Text>& texts) {
  static const std::unique_ptr<Runner> runner =
      on_cpu(bundled_checkpoint(), DType::kF32, CacheFormat::kF32);
  std::vector<std::vector<SampledToken>> all;
  for (size_t first = 0; first < texts.size();) {
    std::vector<Text> some;
    int64_t rows = 0;
    for (; first < texts.size(); ++first) {
      rows += std::ssize(texts[first].ids);
      if (rows > kRowsAStep && !some.empty()) break;
      some.push_back(texts[first]);
    }
    for (auto& text : run(*runner, some)) all.push_back(std::move(text));
  }
  return all;
}

float logprob_of(const SampledToken& row, int32_t id) {
  for (const auto& [top, logprob] : row.top) {
    if (top == id) return logprob;
  }
  return row.top.back().second;  // an upper bound
}

// The score of the best token minus that of the chosen one, with the request's bias and penalty.
double behind_best(const SampledToken& row, const SamplingParams& params,
                   const std::vector<int32_t>& before, int32_t chosen) {
  const auto score = [&](int32_t id, float logprob) {
    double result = logprob;
    for (const auto& [biased, bias] : params.logit_bias) result += biased == id ? bias : 0;
    return result - params.frequency_penalty *
                        static_cast<double>(std::count(before.begin(), before.end(), id));
  };
  double best = -INFINITY;
  for (const auto& [id, logprob] : row.top) best = std::max(best, score(id, logprob));
  return best - score(chosen, logprob_of(row, chosen));
}

}  // namespace

void expect_as_forced(const std::vector<Request>& requests, const std::vector<Answer>& answers,
                      const ForcedLimits& limits) {
  ASSERT_EQ(answers.size(), requests.size());
  std::vector<Text> texts;
  for (size_t r = 0; r < requests.size(); ++r) {
    Text text{requests[r].prompt_ids, {kRowsAStep}};
    text.ids.insert(text.ids.end(), answers[r].ids.begin(), answers[r].ids.end());
    texts.push_back(std::move(text));
  }
  const auto expected = forced(texts);
  double sum = 0, most = 0, most_behind = 0;
  int64_t rows = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    const Answer& answer = answers[r];
    const SamplingParams& params = requests[r].sampling;
    const bool ended = !answer.ids.empty() && answer.ids.back() == kEndOfSequence;
    EXPECT_TRUE(ended || std::ssize(answer.ids) == *params.max_tokens)
        << "answer " << r << " ends after " << answer.ids.size() << " of " << *params.max_tokens;
    ASSERT_EQ(answer.logprobs.size(), answer.ids.size()) << "answer " << r;
    std::vector<int32_t> before;
    for (size_t i = 0; i < answer.ids.size(); ++i) {
      const int32_t id = answer.ids[i];
      const SampledToken& row = expected[r][requests[r].prompt_ids.size() - 1 + i];
      EXPECT_EQ(answer.logprobs[i].id, id);
      const double off = std::abs(answer.logprobs[i].logprob - logprob_of(row, id));
      const double behind = behind_best(row, params, before, id);
      EXPECT_LE(off, limits.row) << "answer " << r << ", token " << i;
      EXPECT_LE(behind, limits.row) << "answer " << r << ", token " << i;
      most = std::max(most, off);
      most_behind = std::max(most_behind, behind);
      sum += off;
      ++rows;
      before.push_back(id);
    }
  }
  const double mean = sum / static_cast<double>(std::max<int64_t>(rows, 1));
  std::printf(
      "%ld rows: log-probabilities %.4f off on average, %.3f at most; choices %.3f behind "
      "float32's at most\n",
      rows, mean, most, most_behind);
  EXPECT_LE(mean, limits.mean);
}

}  // namespace fathom
