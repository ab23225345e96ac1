#include "ops/sampling/gumbel_noise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "ops/sampling/noise_block.h"

namespace fathom {
namespace {

std::vector<uint32_t> words_of(const PhiloxWords& made) { return {made.words, made.words + 4}; }

// kat_vectors of Random123, the authors' implementation.
TEST(Philox, KnownAnswers) {
  using Words = std::vector<uint32_t>;
  EXPECT_EQ(words_of(philox({{0, 0, 0, 0}}, 0)),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words_of(philox({{~0u, ~0u, ~0u, ~0u}}, ~0ull)),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      words_of(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822)),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

long double share(uint64_t n) { return static_cast<long double>(n) * 0x1p-64L; }

long double exact_gumbel(uint64_t n) {
  return -std::log(n >> 63 != 0 ? -std::log(share(0 - n)) : -std::log1p(-share(n)));
}

TEST(GumbelNoise, LogarithmsAgainstTheMathematicalLibrary) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> numbers = {1, 2, 3, uint64_t{3} << 62, (uint64_t{3} << 62) - 1};
  for (uint64_t i = 0; i < 300; ++i) {
    numbers.push_back(~uint64_t{0} - i);
    numbers.push_back((uint64_t{1} << 52) + i - 150);  // where gumbel() changes its formula
    numbers.push_back((uint64_t{1} << 63) + i - 150);
  }
  for (int i = 0; i < 500'000; ++i) numbers.push_back((random() >> random() % 64) | 1);
  for (const uint64_t n : numbers) {
    const long double log = static_cast<long double>(minus_log(n)) * 0x1p-57L;
    EXPECT_LT(std::abs(log + std::log(share(n))), 0x1p-51L) << n;
    EXPECT_LT(std::abs(gumbel(n | 1) - exact_gumbel(n | 1)), 0x1p-44L) << n;
  }
}

// Bits that every compiler and device has to find; computed while compiling, too.
TEST(GumbelNoise, Bits) {
  static_assert(gumbel(1) == 0x1.62e42fefa39efp+5);
  constexpr double kMiddle = gumbel((uint64_t{1} << 63) + 1);
  volatile uint64_t n = (uint64_t{1} << 63) + 1;
  EXPECT_EQ(gumbel(n), kMiddle);
  EXPECT_EQ(kMiddle, 0x1.774f29bdd6b9fp-2);
  EXPECT_EQ(gumbel(~uint64_t{0}), -0x1.e56c62afba973p+1);
  const NoiseKey key = noise_key(42, 1, (uint64_t{5} << 32) + 1234);
  EXPECT_EQ(token_noise(key, 129'279, noise_words(key, 129'279 / 4).words[3]),
            -0x1.48e0c3d04ec35p-1);
}

TEST(GumbelNoise, EachTokenOfAGroupHasTwoWordsOfItsOwn) {
  const NoiseKey key = noise_key(3, 0, 12);
  for (int32_t id = 1000; id < 1016; ++id) {
    const auto group = static_cast<uint32_t>(id / kNoiseGroup);
    const uint32_t upper = noise_words(key, group).words[id % kNoiseGroup];
    const uint32_t lower = noise_words(key, group, true).words[id % kNoiseGroup];
    EXPECT_EQ(token_noise(key, id, upper), gumbel(uint64_t{upper} << 32 | lower | 1)) << id;
    // A word so small that the other decides.
    EXPECT_EQ(token_noise(key, id, 0), gumbel(lower | 1)) << id;
  }
}

TEST(GumbelNoise, AScoreIsRoundedOnce) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal(0, 20);
  for (int i = 0; i < 100'000; ++i) {
    const float logit = normal(random), inverse_temperature = 1 / std::abs(normal(random));
    const double noise = gumbel(random() | 1);
    EXPECT_EQ(
        race_score(logit, inverse_temperature, noise),
        std::fma(static_cast<double>(logit), static_cast<double>(inverse_temperature), noise));
  }
}

TEST(GumbelNoise, EveryPartOfTheKeyAndTheTokenCount) {
  std::set<std::vector<uint32_t>> seen;
  size_t made = 0;
  const auto add = [&](const NoiseKey& key, uint32_t group) {
    for (const bool lower : {false, true}) {
      seen.insert(words_of(noise_words(key, group, lower)));
      ++made;
    }
  };
  add(noise_key(0, 0, 0), 0);
  for (int bit = 0; bit < 64; ++bit) {
    add(noise_key(uint64_t{1} << bit, 0, 0), 0);
    add(noise_key(0, uint64_t{1} << bit, 0), 0);
    add(noise_key(0, 0, uint64_t{1} << bit), 0);
  }
  for (int bit = 0; bit < 20; ++bit) add(noise_key(0, 0, 0), 1u << bit);
  EXPECT_EQ(seen.size(), made);
}

// Mean and variance of a Gumbel number, and no correlation with the neighbours', over tokens,
// positions and choices.
TEST(GumbelNoise, MomentsAndNeighbours) {
  constexpr int kTokens = 500, kPositions = 400;
  constexpr double kMean = 0.57721566490153286, kVariance = 1.6449340668482264;
  const auto noise = [](uint64_t choice, uint64_t position, int32_t id) {
    const NoiseKey key = noise_key(77, choice, position);
    const PhiloxWords words = noise_words(key, static_cast<uint32_t>(id / kNoiseGroup));
    return token_noise(key, id, words.words[id % kNoiseGroup]) - kMean;
  };
  double sum = 0, squares = 0, with_token = 0, with_position = 0, with_choice = 0;
  for (uint64_t position = 0; position < kPositions; ++position) {
    for (int32_t id = 0; id < kTokens; ++id) {
      const double g = noise(0, position, id);
      sum += g;
      squares += g * g;
      with_token += g * noise(0, position, id + 1);
      with_position += g * noise(0, position + 1, id);
      with_choice += g * noise(1, position, id);
    }
  }
  constexpr double kCount = kTokens * kPositions;
  const double deviation = 5 / std::sqrt(kCount);
  EXPECT_NEAR(sum / kCount, 0, deviation * std::sqrt(kVariance));
  EXPECT_NEAR(squares / kCount, kVariance, deviation * 3.6);  // kurtosis 5.4
  for (const double product : {with_token, with_position, with_choice}) {
    EXPECT_NEAR(product / kCount, 0, deviation * kVariance);
  }
}

TEST(NoiseBlock, EveryLevelHasTheWordsOfOneTokenAtATime) {
  std::mt19937_64 random(3);
  for (const CpuIsa isa : runnable_levels()) {
    const FillNoiseBlock fill = fill_noise_block(isa);
    for (int i = 0; i < 300; ++i) {
      const NoiseKey key = {random(), random() >> random() % 64};
      const auto block = static_cast<int64_t>(random() % 6250);
      const uint32_t zeros = i % 40 > 32 ? 0 : ~uint64_t{0} << (32 - i % 40);
      NoiseBlock noise;
      std::memset(&noise.lanes, 0x55, sizeof(noise.lanes));
      uint64_t expected = 0;
      std::set<int> tokens;
      const uint64_t found = fill(key, block, zeros, noise);
      for (int lane = 0; lane < kLogitBlock; ++lane) {
        const int token = NoiseBlock::token(lane);
        tokens.insert(token);
        const int64_t id = block * kLogitBlock + token;
        const uint32_t word =
            noise_words(key, static_cast<uint32_t>(id / kNoiseGroup)).words[id % kNoiseGroup];
        ASSERT_EQ(noise.upper(lane), word) << name_of(isa) << " token " << token;
        expected |= uint64_t{(word & zeros) == 0} << lane;
      }
      ASSERT_EQ(found, expected) << name_of(isa) << " zeros " << zeros;
      ASSERT_EQ(std::ssize(tokens), kLogitBlock);
    }
  }
}

}  // namespace
}  // namespace fathom
