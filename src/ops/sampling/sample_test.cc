#include "ops/sampling/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "base/math.h"
#include "ops/sampling/chi_square.h"
#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/logits_test_data.h"
#include "ops/sampling/reference_sampler.h"

namespace fathom {
namespace {

SampledToken sample_once(std::span<const float> logits, const SampleOptions& options,
                         SampleRow row = {}) {
  row.options = &options;
  SampleScratch scratch;
  SampledToken out{.id = -77, .logprob = NAN, .top = {{-5, NAN}}};
  sample(logits, row, scratch, out);
  return out;
}

double one_of(std::mt19937& random, std::initializer_list<double> values) {
  return values.begin()[random() % values.size()];
}

struct Case {
  SampleOptions options;
  std::vector<int32_t> prompt, output;
  std::set<int32_t> masked;
};

Case random_case(std::mt19937& random, int64_t vocab) {
  const auto some_id = [&] { return static_cast<int32_t>(random() % vocab); };
  Case c;
  c.options.temperature = one_of(random, {0, 0.3, 0.7, 1, 1, 2});
  c.options.top_p = one_of(random, {1, 1, 0.1, 0.5, 0.9, 0.999});
  c.options.min_p = one_of(random, {0, 0, 0.02, 0.3, 1});
  c.options.top_k =
      static_cast<int64_t>(one_of(random, {0, -1, 1, 2, 40, static_cast<double>(vocab) - 1, 1e9}));
  c.options.repetition_penalty = one_of(random, {1, 1, 1.3, 0.8});
  c.options.presence_penalty = one_of(random, {0, 0, 1.5, -2});
  c.options.frequency_penalty = one_of(random, {0, 0, 0.7, -0.5});
  c.options.seed = random();
  c.options.stream = random() % 4;
  for (size_t i = random() % 4; i > 0; --i) {
    c.options.logit_bias.emplace_back(some_id(), one_of(random, {-100, -1, 2, 5}));
  }
  for (size_t i = random() % 20; i > 0; --i) c.prompt.push_back(some_id());
  for (size_t i = random() % 20; i > 0; --i) c.output.push_back(some_id());
  if (!c.output.empty()) c.output.push_back(c.output[0]);
  for (size_t i = random() % 3; i > 0; --i) c.masked.insert(some_id());
  return c;
}

TEST(Sample, EveryMixtureOfOptionsAgainstThePlainOne) {
  std::mt19937 random(11);
  SampleScratch scratch;
  SampledToken out;
  int compared = 0, total = 0;
  for (int64_t vocab : {1, 2, 63, 97, 1000, 5000}) {
    for (int i = 0; i < 1500; ++i, ++total) {
      Case c = random_case(random, vocab);
      if (vocab == 1) c.masked.clear();
      if (std::ssize(c.masked) == vocab) c.masked.clear();
      const auto row = random_row(random, vocab, static_cast<float>(one_of(random, {0.1, 2, 6})));
      TokenHistory history;
      history.add_prompt(c.prompt);
      for (const int32_t id : c.output) history.add_output(id);
      const std::vector<int32_t> masked(c.masked.begin(), c.masked.end());
      const uint64_t position = random() % 1000;
      sample(row,
             {.options = &c.options, .history = &history, .masked = masked, .position = position},
             scratch, out);

      const auto expected = reference_distribution(row, c.options, c.prompt, c.output, c.masked);
      double lead = 0;
      const int32_t id =
          reference_draw(expected, noise_key(c.options.seed, c.options.stream, position), &lead);
      if ((lead < 1e-4 || expected.margin < 1e-6) && out.id != id) continue;
      ++compared;
      ASSERT_EQ(out.id, id) << "vocab " << vocab << " case " << i << " T " << c.options.temperature
                            << " top_p " << c.options.top_p << " top_k " << c.options.top_k
                            << " min_p " << c.options.min_p;
    }
  }
  EXPECT_GT(compared, total * 0.998) << "near ties are rare";
}

// Denormals, negative zeros and the last number before each limit, over logits that are spread
// wide, equal or denormal themselves: always a token that the options keep.
TEST(Sample, OptionsAtTheirLimitsAgainstThePlainOne) {
  constexpr double kDenormal = 5e-324, kLargerDenormal = 1e-310;
  constexpr double kSmallest = std::numeric_limits<double>::min();
  constexpr int64_t kVocab = 997;
  std::mt19937 random(23);
  SampleScratch scratch;
  SampledToken out;
  int compared = 0;
  constexpr int kCases = 3000;
  for (int i = 0; i < kCases; ++i) {
    Case c = random_case(random, kVocab);
    c.options.temperature = one_of(random, {-0.0, kDenormal, kLargerDenormal, kSmallest,
                                            kGreedyTemperature, 1, std::nextafter(2.0, 0.0), 2});
    c.options.top_p = one_of(
        random, {kDenormal, kLargerDenormal, kSmallest, 0.5, std::nextafter(1.0, 0.0), 1, 1});
    c.options.min_p = one_of(
        random, {0, -0.0, kDenormal, kLargerDenormal, kSmallest, std::nextafter(1.0, 0.0), 1});
    c.options.top_k = std::array<int64_t, 3>{0, 1, std::numeric_limits<int64_t>::max()}[i % 3];
    c.options.repetition_penalty = one_of(random, {1, 0.01, 10, std::nextafter(1.0, 2.0)});
    c.options.presence_penalty = one_of(random, {-0.0, kDenormal, -kLargerDenormal, 2, -2});
    c.options.frequency_penalty = one_of(random, {-0.0, -kDenormal, kLargerDenormal, 2, -2});
    for (auto& [id, bias] : c.options.logit_bias) {
      bias = static_cast<float>(one_of(random, {-0.0, kDenormal, 1e-40, -1e-40, 100, -100}));
    }
    const float spread = static_cast<float>(one_of(random, {3, 1e4, 1e30, 1e-40, 1e-45}));
    const auto row = random_row(random, kVocab, spread);
    TokenHistory history;
    history.add_prompt(c.prompt);
    for (const int32_t id : c.output) history.add_output(id);
    const std::vector<int32_t> masked(c.masked.begin(), c.masked.end());
    sample(row, {.options = &c.options, .history = &history, .masked = masked, .num_logprobs = 1},
           scratch, out);

    ASSERT_GE(out.id, 0) << "case " << i;
    ASSERT_FALSE(c.masked.contains(out.id)) << "case " << i;
    ASSERT_TRUE(std::isfinite(out.logprob) && std::isfinite(out.top[0].second)) << "case " << i;
    const auto expected = reference_distribution(row, c.options, c.prompt, c.output, c.masked);
    double lead = 0;
    const int32_t id =
        reference_draw(expected, noise_key(c.options.seed, c.options.stream, 0), &lead);
    // In single precision a denormal penalty does not tell equal logits apart, nor does 2 large
    // ones.
    if (spread != 3) continue;
    // What single precision makes of logits up to some 30, over the temperature.
    const double doubt = 1e-4 + 3e-5 / std::max(c.options.temperature, kGreedyTemperature);
    if ((lead < doubt || expected.margin < 1e-5) && out.id != id) continue;
    ++compared;
    ASSERT_EQ(out.id, id) << "case " << i << " T " << c.options.temperature << " top_p "
                          << c.options.top_p << " min_p " << c.options.min_p << " top_k "
                          << c.options.top_k;
  }
  EXPECT_GT(compared, kCases * 0.19) << "a fifth has the spread that is compared";
}

TEST(Sample, GreedyTakesTheLowestIdOfEquals) {
  std::vector<float> row(300, 1);
  row[70] = row[71] = row[299] = 4;
  EXPECT_EQ(sample_once(row, {.temperature = 0}).id, 70);
  EXPECT_EQ(sample_once(row, {.temperature = 9e-6}).id, 70);
  const int32_t mask[] = {70};
  EXPECT_EQ(sample_once(row, {.temperature = 0}, {.masked = mask}).id, 71);
}

TEST(Sample, TopKKeepsExactlyKOfEquals) {
  const std::vector<float> row(500, 2);
  std::set<int32_t> seen;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    seen.insert(sample_once(row, {.top_k = 3, .seed = seed}).id);
  }
  EXPECT_EQ(seen, (std::set<int32_t>{0, 1, 2}));
}

// Shares that equal logits reach exactly: among the largest, over the whole row, after top-k.
TEST(Sample, TopPEndsWithTheTokenThatReachesIt) {
  const auto kept = [](size_t size, const SampleOptions& options) {
    const std::vector<float> row(size, 2);
    std::set<int32_t> seen;
    SampleOptions drawn = options;
    for (drawn.seed = 0; drawn.seed < 8000; ++drawn.seed) seen.insert(sample_once(row, drawn).id);
    return seen;
  };
  const auto first = [](int32_t count) {
    std::set<int32_t> ids;
    for (int32_t id = 0; id < count; ++id) ids.insert(id);
    return ids;
  };
  EXPECT_EQ(kept(8, {.top_p = 0.25}), first(2));
  EXPECT_EQ(kept(400, {.top_p = 0.75}), first(300));
  EXPECT_EQ(kept(400, {.top_p = 0.5, .top_k = 4}), first(2));
}

TEST(Sample, NoFiniteLogitIsReported) {
  const std::vector<float> nan(100, std::nanf("")), low(100, -kInf);
  std::vector<float> high(100, 0);
  high[7] = kInf;
  for (const double temperature : {0.0, 1.0}) {
    const SampleOptions options{.temperature = temperature};
    EXPECT_EQ(sample_once(nan, options, {.num_logprobs = 2}).id, -1);
    EXPECT_EQ(sample_once(low, options).id, -1);
    EXPECT_EQ(sample_once(high, options).id, -1);
  }
  EXPECT_EQ(sample_once(nan, {}, {.num_logprobs = 2, .given_id = 3}).id, -1);
  std::vector<float> one(100, std::nanf(""));
  one[99] = -3;
  EXPECT_EQ(sample_once(one, {}).id, 99) << "NaN is never chosen";
}

TEST(Sample, LogprobsAreOfTheRawRow) {
  std::mt19937 random(5);
  for (const int64_t vocab : {1, 7, 100, 5000}) {
    const auto row = random_row(random, vocab, 3);
    const auto expected = reference_logprobs(row);
    const SampleOptions options{.temperature = 0.5, .top_k = 2, .logit_bias = {{0, 50}}};
    const SampledToken out = sample_once(row, options, {.num_logprobs = 20});
    EXPECT_NEAR(out.logprob, expected[out.id], 2e-6);
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    ASSERT_EQ(out.top.size(), std::min<size_t>(20, order.size()));
    for (size_t i = 0; i < out.top.size(); ++i) {
      EXPECT_EQ(out.top[i].first, order[i]);
      EXPECT_NEAR(out.top[i].second, expected[order[i]], 2e-6);
    }
    const SampledToken given = sample_once(row, options, {.num_logprobs = 0, .given_id = 0});
    EXPECT_EQ(given.id, 0);
    EXPECT_NEAR(given.logprob, expected[0], 2e-6);
    EXPECT_TRUE(given.top.empty());
  }
}

// At many positions; and of many choices and seeds at one.
TEST(Sample, DrawsFollowTheDistribution) {
  std::mt19937 random(8);
  const auto row = random_row(random, 41, 1);
  constexpr uint64_t kDraws = 100'000;
  for (const double temperature : {1.0, 0.6}) {
    for (const SampleOptions& filters :
         {SampleOptions{}, SampleOptions{.top_k = 12}, SampleOptions{.top_p = 0.8},
          SampleOptions{.min_p = 0.2}, SampleOptions{.top_p = 0.9, .min_p = 0.05, .top_k = 20}}) {
      SampleOptions options = filters;
      options.temperature = temperature;
      const auto distribution = reference_distribution(row, options, {}, {}, {});
      std::map<int32_t, int> counts;
      for (uint64_t i = 0; i < kDraws; ++i) {
        ++counts[sample_once(row, options, {.position = i}).id];
      }
      EXPECT_LT(chi_square_deviation(counts, distribution.kept), kMostDeviation)
          << "T " << temperature << " top_p " << options.top_p << " top_k " << options.top_k
          << " min_p " << options.min_p;
    }
  }
  const auto distribution = reference_distribution(row, {}, {}, {}, {});
  std::map<int32_t, int> of_choices, of_seeds;
  for (uint64_t i = 0; i < kDraws; ++i) {
    ++of_choices[sample_once(row, {.seed = 9, .stream = i}, {.position = 7}).id];
    ++of_seeds[sample_once(row, {.seed = i}, {.position = 7}).id];
  }
  EXPECT_LT(chi_square_deviation(of_choices, distribution.kept), kMostDeviation);
  EXPECT_LT(chi_square_deviation(of_seeds, distribution.kept), kMostDeviation);
}

// Tokens in the tail, each of a probability below 10^-6, win as often as they should together.
TEST(Sample, ALongTailIsDrawnFrom) {
  constexpr int64_t kVocab = 8000;
  std::vector<float> row(kVocab, -14);
  row[kVocab / 2] = 0;
  const double tail = (kVocab - 1) * std::exp(-14.0), p = tail / (1 + tail);
  std::map<int32_t, int> counts;
  for (uint64_t i = 0; i < 60'000; ++i) {
    ++counts[sample_once(row, {.seed = 3}, {.position = i}).id == kVocab / 2 ? 0 : 1];
  }
  EXPECT_LT(chi_square_deviation(counts, std::map<int32_t, double>{{0, 1 - p}, {1, p}}),
            kMostDeviation);
}

// Successive draws, draws of neighbouring choices and of neighbouring seeds: pairs of tokens are as
// frequent as independence has it.
TEST(Sample, DrawsAreIndependent) {
  constexpr int32_t kVocab = 6;
  const std::vector<float> row(kVocab, 1);
  constexpr uint64_t kDraws = 60'000;
  const auto draw = [&](uint64_t seed, uint64_t choice, uint64_t position) {
    return sample_once(row, {.seed = seed, .stream = choice}, {.position = position}).id;
  };
  std::map<int32_t, double> pairs;
  for (int32_t pair = 0; pair < kVocab * kVocab; ++pair) pairs[pair] = 1.0 / (kVocab * kVocab);
  std::map<int32_t, int> of_positions, of_choices, of_seeds, of_sums;
  for (uint64_t i = 0; i < kDraws; ++i) {
    ++of_positions[draw(1, 2, 2 * i) * kVocab + draw(1, 2, 2 * i + 1)];
    ++of_choices[draw(1, 0, i) * kVocab + draw(1, 1, i)];
    ++of_seeds[draw(0, 2, i) * kVocab + draw(1, 2, i)];
    // Key parts that add up to the same.
    ++of_sums[draw(5, 1, i + 1) * kVocab + draw(5, 2, i)];
  }
  for (const auto& counts : {of_positions, of_choices, of_seeds, of_sums}) {
    EXPECT_LT(chi_square_deviation(counts, pairs), kMostDeviation);
  }
}

// What filters keep does not change who wins among it.
TEST(Sample, TheWinnerOfAllWinsWhereverItIsKept) {
  std::mt19937 random(29);
  int kept = 0, dropped = 0;
  for (const int64_t vocab : {5, 200, 3000}) {
    for (int i = 0; i < 2000; ++i) {
      const auto row = random_row(random, vocab, static_cast<float>(one_of(random, {0.5, 2, 4})));
      SampleOptions options = {
          .temperature = one_of(random, {0.6, 1, 1.5}), .seed = random(), .stream = random() % 3};
      const uint64_t position = random();
      const int32_t winner = sample_once(row, options, {.position = position}).id;
      SampleScratch scratch;
      EXPECT_EQ(draft_token(row, options, position, scratch), winner);
      options.top_k = static_cast<int64_t>(one_of(random, {0, 3, 40}));
      options.top_p = one_of(random, {1, 0.5, 0.95});
      options.min_p = one_of(random, {0, 0.05, 0.3});
      std::vector<int32_t> masked;
      for (size_t k = random() % 4; k > 0; --k) {
        masked.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(vocab)));
      }
      const std::set<int32_t> masked_ids(masked.begin(), masked.end());
      if (std::ssize(masked_ids) == vocab) continue;
      const auto distribution = reference_distribution(row, options, {}, {}, masked_ids);
      const bool is_kept = distribution.kept.contains(winner) && !masked_ids.contains(winner);
      const int32_t id = sample_once(row, options, {.masked = masked, .position = position}).id;
      if (distribution.margin < 1e-6) continue;
      is_kept ? ++kept : ++dropped;
      if (is_kept) {
        ASSERT_EQ(id, winner);
      } else {
        ASSERT_NE(id, winner);
      }
      // A drafter takes no notice of them.
      EXPECT_EQ(draft_token(row, options, position, scratch), winner);
    }
  }
  EXPECT_GT(kept, 1000);
  EXPECT_GT(dropped, 1000);
}

TEST(Sample, DraftTokenIsTheLargestWhereNothingIsDrawn) {
  SampleScratch scratch;
  const std::vector<float> row = {1, 5, 5, 2};
  EXPECT_EQ(draft_token(row, {.temperature = 0, .logit_bias = {{3, 100}}}, 0, scratch), 1);
  EXPECT_EQ(draft_token(std::vector<float>(70, -kInf), {}, 0, scratch), -1);
}

TEST(Sample, TheOnlyOneLeftIsDrawn) {
  constexpr int32_t kVocab = 300;
  const std::vector<float> row(kVocab, 2);
  std::vector<float> others_impossible(kVocab, -kInf);
  for (const int32_t id : {0, 63, 64, 137, kVocab - 1}) {
    std::vector<uint32_t> allowed(ceil_div(int64_t{kVocab}, int64_t{32}));
    allowed[id / 32] = uint32_t{1} << id % 32;
    others_impossible[id] = -80;
    for (uint64_t position = 0; position < 200; ++position) {
      EXPECT_EQ(sample_once(row, {}, {.allowed = allowed, .position = position}).id, id);
      EXPECT_EQ(sample_once(others_impossible, {}, {.position = position}).id, id);
    }
    others_impossible[id] = -kInf;
  }
}

TEST(Sample, WhatIsNotAllowedIsAsIfMasked) {
  std::mt19937 random(17);
  for (const int64_t vocab : {1, 31, 32, 33, 97, 1000, 5000}) {
    for (int i = 0; i < 300; ++i) {
      const Case c = random_case(random, vocab);
      const auto row = random_row(random, vocab, 3);
      // Few, some, nearly all; and words that end before the row does, or after it.
      const double share = one_of(random, {0.01, 0.5, 0.99, 1});
      std::vector<uint32_t> allowed(static_cast<size_t>(vocab / 32 + random() % 3));
      std::vector<int32_t> others(c.masked.begin(), c.masked.end());
      if (allowed.empty()) allowed.resize(1);
      for (int32_t id = 0; id < vocab; ++id) {
        const bool in_words = id / 32 < std::ssize(allowed);
        if (in_words && std::uniform_real_distribution<>()(random) < share) {
          allowed[id / 32] |= uint32_t{1} << id % 32;
        } else {
          others.push_back(id);
        }
      }
      TokenHistory history;
      history.add_prompt(c.prompt);
      for (const int32_t id : c.output) history.add_output(id);
      const std::vector<int32_t> masked(c.masked.begin(), c.masked.end());
      const SampledToken out = sample_once(
          row, c.options,
          {.history = &history, .masked = masked, .allowed = allowed, .num_logprobs = 3});
      const SampledToken expected =
          sample_once(row, c.options, {.history = &history, .masked = others, .num_logprobs = 3});
      ASSERT_EQ(out.id, expected.id) << "vocab " << vocab << " case " << i;
      ASSERT_EQ(out.logprob, expected.logprob);
      ASSERT_EQ(out.top, expected.top) << "log-probabilities are of the raw row";
      if (std::ssize(std::set(others.begin(), others.end())) == vocab) {
        ASSERT_EQ(out.id, -1);
      }
    }
  }
}

TEST(Sample, BiasDoesNotBringBackWhatIsNotAllowed) {
  const std::vector<float> row(100, 1);
  const std::vector<uint32_t> allowed = {0, 1u << 5};
  for (const double temperature : {0.0, 1.0}) {
    const SampleOptions options{.temperature = temperature, .logit_bias = {{3, 100}}};
    EXPECT_EQ(sample_once(row, options, {.allowed = allowed}).id, 37);
  }
}

TEST(Sample, SeedChoiceAndPositionDecide) {
  const std::vector<float> row(5000, 1);
  const auto draw = [&](uint64_t seed, uint64_t choice, uint64_t position) {
    return sample_once(row, {.seed = seed, .stream = choice}, {.position = position}).id;
  };
  std::set<int32_t> ids;
  // Both halves of each part count.
  for (uint64_t part = 1; part <= 40; ++part) {
    for (const int shift : {0, 32, 58}) {
      ids.insert(draw(part << shift, 0, 0));
      ids.insert(draw(0, part << shift, 0));
      ids.insert(draw(0, 0, part << shift));
    }
  }
  EXPECT_GT(ids.size(), 330u) << "of 360 draws of 5,000 tokens some 13 are a repetition";
  EXPECT_EQ(draw(7, 1, 3), draw(7, 1, 3));
}

TEST(Sample, RowsOnThreadsAreTheSameAsAlone) {
  std::mt19937 random(21);
  constexpr int64_t kRows = 37, kVocab = 4000;
  const auto logits = random_row(random, kRows * kVocab, 2);
  const SampleOptions options{.top_p = 0.9, .seed = 5};
  std::vector<SampleRow> rows;
  for (int64_t i = 0; i < kRows; ++i) {
    rows.push_back({.row = kRows - 1 - i,
                    .options = &options,
                    .position = static_cast<uint64_t>(i),
                    .num_logprobs = static_cast<int>(i % 3) - 1});
  }
  ThreadPool pool(3);
  const Stream stream(pool);
  std::vector<SampleScratch> scratch;
  std::vector<SampledToken> alone(kRows), together(kRows);
  const ConstTensorView view(logits.data(), {kRows, kVocab});
  sample_rows(nullptr, view, rows, scratch, alone);
  sample_rows(&stream, view, rows, scratch, together);
  for (int64_t i = 0; i < kRows; ++i) {
    EXPECT_EQ(alone[i].id, together[i].id);
    EXPECT_EQ(alone[i].logprob, together[i].logprob);
    EXPECT_EQ(alone[i].top, together[i].top);
    const std::span<const float> row{view.row<float>(rows[i].row), static_cast<size_t>(kVocab)};
    EXPECT_EQ(alone[i].id, sample_once(row, options, rows[i]).id);
  }
}

TEST(TakesLargest, OnlyWhereNothingElseOfTheRowCounts) {
  SampleOptions options = {.temperature = 0};
  const std::array<int32_t, 1> masked = {3};
  const std::array<uint32_t, 1> allowed = {5};
  EXPECT_TRUE(takes_largest({.options = &options}));
  EXPECT_FALSE(takes_largest({.given_id = 3}));
  EXPECT_FALSE(takes_largest({.options = &options, .num_logprobs = 0}));
  EXPECT_FALSE(takes_largest({.options = &options, .masked = masked}));
  EXPECT_FALSE(takes_largest({.options = &options, .allowed = allowed}));
  // What truncation leaves begins with the largest.
  EXPECT_TRUE(
      takes_largest({.options = &(options = {.temperature = 0, .top_p = 0.5, .top_k = 4})}));
  EXPECT_FALSE(takes_largest({.options = &(options = {.temperature = 0.1})}));
  EXPECT_FALSE(takes_largest({.options = &(options = {.temperature = 0, .presence_penalty = 1})}));
  EXPECT_FALSE(takes_largest({.options = &(options = {.temperature = 0, .logit_bias = {{1, 2}}})}));
}

TEST(LargestLogit, CountsNanAsTheLeast) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  SampleScratch scratch;
  const auto largest = [&](std::vector<float> row) { return largest_logit(row, scratch).id; };
  EXPECT_EQ(largest({1, 3, 3, 2}), 1);
  EXPECT_EQ(largest({-1, -0.0f, 0, -2}), 1);
  EXPECT_EQ(largest({kNan, -5, kNan, -5}), 1);
  EXPECT_EQ(largest({1, kInf, kInf}), 1);
  EXPECT_EQ(largest({kNan, -kInf}), -1);
  EXPECT_EQ(largest({}), -1);
}

}  // namespace
}  // namespace fathom
