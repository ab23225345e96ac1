// The race against one that computes the noise of every token, on every level of instructions.
#include "ops/sampling/race.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "ops/sampling/logit_row.h"
#include "ops/sampling/logits_test_data.h"

namespace fathom {
namespace {

// Backwards, so that nothing depends on who runs first.
int32_t plain_race(std::span<const float> logits, const Cutoff& cutoff, float inverse_temperature,
                   const NoiseKey& key) {
  int32_t best = -1;
  double best_score = 0;
  for (auto id = static_cast<int32_t>(logits.size()) - 1; id >= 0; --id) {
    if (!(logits[id] > -kInf) || !cutoff.keeps(logits[id], id)) continue;
    const PhiloxWords words = noise_words(key, static_cast<uint32_t>(id / kNoiseGroup));
    const double score = race_score(logits[id], inverse_temperature,
                                    token_noise(key, id, words.words[id % kNoiseGroup]));
    if (best < 0 || score >= best_score) {
      best = id;
      best_score = score;
    }
  }
  return best;
}

void compare(std::span<const float> logits, const Cutoff& cutoff, float inverse_temperature,
             const NoiseKey& key) {
  std::vector<float> maxima(static_cast<size_t>(num_logit_blocks(std::ssize(logits))));
  block_maxima(logits, maxima);
  const float most = *std::max_element(maxima.begin(), maxima.end());
  const auto largest =
      static_cast<int32_t>(std::find(logits.begin(), logits.end(), most) - logits.begin());
  const int32_t expected = plain_race(logits, cutoff, inverse_temperature, key);
  for (const CpuIsa isa : runnable_levels()) {
    ASSERT_EQ(race(logits, maxima, largest, cutoff, inverse_temperature, key, isa), expected)
        << name_of(isa) << " vocab " << logits.size() << " 1/T " << inverse_temperature
        << " position " << key.position;
  }
}

TEST(Race, RowsOfEveryShape) {
  std::mt19937 random(5);
  for (const int64_t vocab : {1, 2, 63, 64, 65, 130, 1000, 8192}) {
    for (int i = 0; i < 150; ++i) {
      const float spreads[] = {0, 0.01f, 0.3f, 3, 10, 1000};
      auto row = random_row(random, vocab, spreads[i % 6]);
      if (i % 7 == 3) row[0] = std::nanf("");
      if (i % 7 == 4) row[vocab / 2] = -kInf;
      if (i % 7 == 5) std::fill(row.begin(), row.begin() + vocab / 2, -kInf);
      if (vocab == 1) row[0] = -3;
      const float inverse_temperatures[] = {0.5f, 1, 1 / 0.6f, 20, 1e5f};
      compare(row, {}, inverse_temperatures[i % 5],
              {(uint64_t{random()} << 32) + random(), random()});
    }
  }
}

TEST(Race, RowsOfAWholeVocabulary) {
  std::mt19937 random(6);
  for (const float spread : {0.0f, 0.3f, 3.0f, 6.0f}) {
    const auto row = random_row(random, 129'280, spread);
    for (uint64_t position = 0; position < 12; ++position) {
      compare(row, {}, 1.25f, noise_key(1, 0, position));
    }
  }
}

TEST(Race, OnlyWhatTheCutoffKeeps) {
  std::mt19937 random(7);
  for (int i = 0; i < 600; ++i) {
    auto row = random_row(random, 700, 2);
    // Many equals at the cutoff.
    for (float& value : row) value = i % 2 ? value : std::round(value);
    const float most = *std::max_element(row.begin(), row.end());
    const Cutoff cutoff = {most - static_cast<float>(i % 5), static_cast<int32_t>(random() % 700)};
    const bool keeps_most = std::find(row.begin(), row.end(), most) - row.begin() <= cutoff.id;
    if (cutoff.logit == most && !keeps_most) continue;
    compare(row, cutoff, 1, {random(), random()});
  }
}

// Logits so large that a score has no room for the noise: all are equal, and the lowest id wins.
TEST(Race, EqualScoresGoToTheLowestId) {
  for (const float logit : {1e20f, -1e20f}) {
    std::vector<float> row(500, logit * 2);
    if (logit < 0) std::fill(row.begin(), row.end(), logit * 4);
    for (const int32_t id : {77, 78, 300, 499}) row[id] = std::max(logit, 4 * logit);
    std::vector<float> maxima(static_cast<size_t>(num_logit_blocks(500)));
    block_maxima(row, maxima);
    for (uint64_t position = 0; position < 20; ++position) {
      for (const CpuIsa isa : runnable_levels()) {
        // Whoever runs first.
        EXPECT_EQ(race(row, maxima, 300, {}, 1, noise_key(1, 2, position), isa), 77);
      }
    }
  }
}

// Logits that a score has little room beside.
TEST(Race, CoarseScores) {
  std::mt19937 random(9);
  for (const float middle : {1e6f, 1e9f, 1e13f, 1e16f, -1e13f}) {
    for (uint64_t i = 0; i < 60; ++i) {
      std::vector<float> row(300);
      for (float& value : row) value = std::nextafter(middle, random() % 3 ? kInf : -kInf);
      compare(row, {}, i % 2 ? 1.0f : 1e5f, noise_key(2, 0, i));
    }
  }
}

}  // namespace
}  // namespace fathom
