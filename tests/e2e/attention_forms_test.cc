// Logits do not depend on the attention form, the chunk size or the batch composition.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "e2e/golden.h"

namespace fathom {
namespace {

std::vector<int32_t> random_ids(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = 3 + static_cast<int32_t>(random() % 8000);
  return ids;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    largest = difference <= largest ? largest : difference;
  }
  return largest;
}

ModelOptions options_with(DType compute, AttentionForm form, int64_t key_chunk = 1024) {
  ModelOptions options;
  options.compute = compute;
  options.attention.form = form;
  options.attention.mha_key_chunk = key_chunk;
  return options;
}

// In float32 only the order of summation differs. Logits are up to about 20.
constexpr double kTolerance = 1e-4;

TEST(AttentionForms, AbsorbedEqualsMultiHead) {
  const auto ids = random_ids(300, 1);
  ModelHarness absorbed(bundled_model(), options_with(DType::kF32, AttentionForm::kAbsorbed),
                        CacheFormat::kF32);
  const auto expected = absorbed.run({{ids, {300}}});
  for (const int64_t key_chunk : {1024, 64, 37}) {
    ModelHarness mha(bundled_model(), options_with(DType::kF32, AttentionForm::kMha, key_chunk),
                     CacheFormat::kF32);
    EXPECT_LE(largest_difference(mha.run({{ids, {300}}})[0], expected[0]), kTolerance) << key_chunk;
    EXPECT_LE(largest_difference(mha.run({{ids, {90, 1, 64, 200}}})[0], expected[0]), kTolerance);
  }
}

TEST(AttentionForms, EveryChunkSizeAgrees) {
  const auto ids = random_ids(150, 2);
  ModelHarness model(bundled_model(), options_with(DType::kF32, AttentionForm::kAuto),
                     CacheFormat::kF32);
  const auto expected = model.run({{ids, {150}}});
  for (const int64_t chunk : {1, 2, 7, 8, 9, 31, 63, 64, 65, 100, 149}) {
    EXPECT_LE(largest_difference(model.run({{ids, {chunk}}})[0], expected[0]), kTolerance) << chunk;
  }
}

TEST(AttentionForms, EveryBatchCompositionAgrees) {
  ModelHarness model(bundled_model(), options_with(DType::kF32, AttentionForm::kAuto),
                     CacheFormat::kF32, 128);
  std::mt19937 random(5);
  for (int round = 0; round < 4; ++round) {
    std::vector<TestSequence> sequences;
    for (uint32_t s = 0; s < 7; ++s) {
      TestSequence sequence{random_ids(1 + static_cast<int64_t>(random() % 200), 100 + s), {}};
      for (int i = 0; i < 5; ++i)
        sequence.chunks.push_back(1 + static_cast<int64_t>(random() % 50));
      sequences.push_back(std::move(sequence));
    }
    const auto together = model.run(sequences);
    for (size_t s = 0; s < sequences.size(); ++s) {
      const auto alone = model.run({{sequences[s].ids, {1 << 20}}});
      EXPECT_LE(largest_difference(together[s], alone[0]), kTolerance) << s;
    }
  }
}

// In bf16 the chunks determine where attention is rounded. Other sequences must not matter: with
// the same chunks, logits are bitwise identical alone and in a batch.
TEST(AttentionForms, NeighboursChangeNoBit) {
  ModelHarness model(bundled_model(), options_with(DType::kBF16, AttentionForm::kAuto),
                     CacheFormat::kBF16, 128);
  std::vector<TestSequence> sequences;
  for (uint32_t s = 0; s < 9; ++s) {
    sequences.push_back({random_ids(40 + 17 * s, 50 + s), {30 + s, 1, 1, 1, 12, 1}});
  }
  const auto together = model.run(sequences);
  for (size_t s = 0; s < sequences.size(); ++s) {
    EXPECT_EQ(model.run({sequences[s]})[0], together[s]) << s;
  }
}

TEST(AttentionForms, RepeatsBitForBit) {
  ModelHarness model(bundled_model(), options_with(DType::kBF16, AttentionForm::kAuto),
                     CacheFormat::kFp8Scaled);
  const auto ids = random_ids(200, 9);
  const auto first = model.run({{ids, {128, 1, 1, 40}}});
  for (int i = 0; i < 5; ++i) EXPECT_EQ(model.run({{ids, {128, 1, 1, 40}}}), first);
}

}  // namespace
}  // namespace fathom
