#include "ops/gate/gate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Choice run_gate(const std::vector<float>& logits, const std::vector<float>& bias, int64_t rows,
                const GateOptions& options, int threads = 1) {
  ThreadPool pool(threads);
  const int64_t experts = static_cast<int64_t>(logits.size()) / rows;
  const int64_t k = options.experts_per_token;
  Choice choice{std::vector<int32_t>(static_cast<size_t>(rows * k + 1), -7),
                std::vector<float>(static_cast<size_t>(rows * k + 1), std::nanf(""))};
  const ConstTensorView bias_view =
      bias.empty() ? ConstTensorView() : ConstTensorView(bias.data(), {experts});
  gate(Stream(pool), ConstTensorView(logits.data(), {rows, experts}), bias_view, options,
       TensorView(choice.ids.data(), {rows, k}), TensorView(choice.weights.data(), {rows, k}));
  EXPECT_EQ(choice.ids.back(), -7);
  EXPECT_TRUE(std::isnan(choice.weights.back()));
  choice.ids.pop_back();
  choice.weights.pop_back();
  return choice;
}

const std::vector<float> kLogits = {0.2f, -1, 0.5f, 0.4f, 2, -3, 0.1f, 0};
const std::vector<float> kBias = {0, 0.6f, 0, 0, -0.5f, 0, 0.1f, 0.15f};

// Computed by hand from the published model code.
TEST(Gate, V3Example) {
  const GateOptions options{GateScoring::kSigmoidBias, 4, 2, 2, true, 2.5f};
  const Choice choice = run_gate(kLogits, kBias, 1, options);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{1, 7}));
  EXPECT_NEAR(choice.weights[0], 0.874389, 2e-6);
  EXPECT_NEAR(choice.weights[1], 1.625611, 2e-6);
}

TEST(Gate, V2Example) {
  const GateOptions options{GateScoring::kSoftmaxGroupLimited, 4, 2, 2, false, 16};
  const Choice choice = run_gate(kLogits, {}, 1, options);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{4, 2}));
  EXPECT_NEAR(choice.weights[0], 8.282626, 1e-5);
  EXPECT_NEAR(choice.weights[1], 1.848104, 1e-5);
}

TEST(Gate, NormalisedSoftmaxIsNotScaled) {
  GateOptions options{GateScoring::kSoftmaxGreedy, 1, 1, 2, true, 16};
  const Choice two = run_gate(kLogits, {}, 1, options);
  EXPECT_NEAR(two.weights[0] + two.weights[1], 1, 1e-6);
  EXPECT_NEAR(two.weights[0] / two.weights[1], std::exp(1.5), 1e-4);
  options.experts_per_token = 1;  // one expert: scaled, not normalised
  EXPECT_NEAR(run_gate(kLogits, {}, 1, options).weights[0], 8.282626, 1e-5);
}

// All biased scores negative: experts of dropped groups, were they 0 instead of -inf, would win.
TEST(Gate, DroppedGroupsLoseToNegativeScores) {
  const std::vector<float> bias(8, -3.0f);
  const GateOptions options{GateScoring::kSigmoidBias, 4, 1, 2, true, 1};
  EXPECT_EQ(run_gate(kLogits, bias, 1, options).ids, (std::vector<int32_t>{2, 3}));
}

TEST(Gate, TiesGoToTheLowerIndex) {
  const std::vector<float> logits(6, 0.5f);
  const GateOptions greedy{GateScoring::kSoftmaxGreedy, 1, 1, 3, false, 1};
  EXPECT_EQ(run_gate(logits, {}, 1, greedy).ids, (std::vector<int32_t>{0, 1, 2}));
  const GateOptions sigmoid{GateScoring::kSigmoidBias, 3, 2, 3, true, 1};
  EXPECT_EQ(run_gate(logits, std::vector<float>(6, 0), 1, sigmoid).ids,
            (std::vector<int32_t>{0, 1, 2}));
}

TEST(Gate, NotANumberStillChoosesDistinctExperts) {
  std::vector<float> logits = kLogits;
  logits[0] = logits[3] = std::nanf("");
  logits[5] = -std::numeric_limits<float>::infinity();
  for (const auto scoring : {GateScoring::kSoftmaxGroupLimited, GateScoring::kSigmoidBias}) {
    const GateOptions options{scoring, 4, 2, 4, true, 1};
    std::vector<int32_t> ids = run_gate(logits, kBias, 1, options).ids;
    std::ranges::sort(ids);
    EXPECT_EQ(std::ranges::adjacent_find(ids), ids.end());
    EXPECT_GE(ids.front(), 0);
    EXPECT_LT(ids.back(), 8);
  }
}

// Reference in double precision, by sorting.
Choice expected_row(const float* logits, const float* bias, int64_t experts,
                    const GateOptions& options) {
  const bool sigmoid = options.scoring == GateScoring::kSigmoidBias;
  std::vector<double> scores(static_cast<size_t>(experts));
  double total = 0;
  for (int64_t i = 0; i < experts; ++i) total += std::exp(static_cast<double>(logits[i]));
  for (int64_t i = 0; i < experts; ++i) {
    scores[i] = sigmoid ? 1 / (1 + std::exp(-static_cast<double>(logits[i])))
                        : std::exp(static_cast<double>(logits[i])) / total;
  }
  std::vector<double> choice = scores;
  for (int64_t i = 0; sigmoid && i < experts; ++i) choice[i] += bias[i];
  if (options.scoring != GateScoring::kSoftmaxGreedy && options.num_groups > 1) {
    const int64_t size = experts / options.num_groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < options.num_groups; ++g) {
      std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::ranges::sort(members, std::greater<>());
      groups.push_back({-(sigmoid ? members[0] + members[1] : members[0]), g});
    }
    std::ranges::sort(groups);
    for (int64_t g = options.groups_per_token; g < options.num_groups; ++g) {
      for (int64_t i = 0; i < size; ++i) {
        choice[groups[g].second * size + i] =
            sigmoid ? -std::numeric_limits<double>::infinity() : 0;
      }
    }
  }
  std::vector<std::pair<double, int32_t>> order;
  for (int64_t i = 0; i < experts; ++i) order.push_back({-choice[i], static_cast<int32_t>(i)});
  std::ranges::sort(order);
  Choice result;
  double sum = 0;
  for (int64_t i = 0; i < options.experts_per_token; ++i) {
    result.ids.push_back(order[i].second);
    sum += scores[order[i].second];
  }
  for (const int32_t id : result.ids) {
    const double weight = scores[id] / (options.normalize ? sum : 1);
    result.weights.push_back(static_cast<float>(
        weight * (options.normalize && !sigmoid ? 1 : static_cast<double>(options.scaling))));
  }
  return result;
}

TEST(Gate, MatchesTheRulesOnRandomLogits) {
  const std::vector<std::pair<int64_t, GateOptions>> cases = {
      {16, {GateScoring::kSigmoidBias, 4, 2, 4, true, 2.5f}},          // the bundled model
      {256, {GateScoring::kSigmoidBias, 8, 4, 8, true, 2.5f}},         // V3
      {384, {GateScoring::kSigmoidBias, 1, 1, 8, true, 2.827f}},       // Kimi K2
      {160, {GateScoring::kSoftmaxGroupLimited, 8, 3, 6, false, 16}},  // V2
      {64, {GateScoring::kSoftmaxGreedy, 1, 1, 6, false, 1}},          // V2-Lite
      {15, {GateScoring::kSigmoidBias, 3, 2, 4, true, 1.5f}},          // 5 experts a group
  };
  for (const auto& [experts, options] : cases) {
    constexpr int64_t kRows = 97;
    std::vector<float> logits(static_cast<size_t>(kRows * experts));
    std::vector<float> bias(static_cast<size_t>(experts));
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = static_cast<float>(6 * random_uniform(3, 1, i) - 3);
    }
    for (size_t i = 0; i < bias.size(); ++i) {
      bias[i] = static_cast<float>(random_uniform(3, 2, i) - 1);
    }
    const Choice actual = run_gate(logits, bias, kRows, options, 3);
    for (int64_t row = 0; row < kRows; ++row) {
      const Choice expected =
          expected_row(logits.data() + row * experts, bias.data(), experts, options);
      for (int64_t i = 0; i < options.experts_per_token; ++i) {
        const int64_t at = row * options.experts_per_token + i;
        ASSERT_EQ(actual.ids[at], expected.ids[i]) << experts << " experts, row " << row;
        ASSERT_NEAR(actual.weights[at], expected.weights[i], 2e-6 * options.scaling);
      }
    }
  }
}

}  // namespace
}  // namespace fathom
