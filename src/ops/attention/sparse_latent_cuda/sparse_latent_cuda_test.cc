// Sparse latent attention on the GPU against double precision and the CPU's sparse attention.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "device/cuda/random_data.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_plan.h"
#include "ops/attention/sparse_latent_cuda/sparse_latent_trial_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512;

struct Way {
  CacheFormat format;
  int32_t heads, top_k, split_keys;
};

std::string name_of_way(const testing::TestParamInfo<Way>& info) {
  const Way& way = info.param;
  std::string format(name_of(way.format));
  std::ranges::replace(format, ' ', '_');
  return format + "_" + std::to_string(way.heads) + "heads_" + std::to_string(way.top_k) + "keys_" +
         std::to_string(way.split_keys) + "each";
}

// bf16 probabilities, partial results and a bf16 result: each rounds by 2^-9 at most.
constexpr double kTolerance = 4e-3;

void expect_near_lse(const SparseTrialResult& actual, const std::vector<double>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual.lse[i], expected[i], 4e-3 + 1e-3 * std::abs(expected[i])) << i;
  }
}

// Tolerance for one query rather than for a row; a wrong key would be off by the order of 1.
constexpr double kQueryTolerance = 1e-2;

class SparseLatent : public testing::TestWithParam<Way> {
 protected:
  static SparseTrialShape shape_of(std::vector<int32_t> sequence_lens,
                                   std::vector<SparseRow> rows) {
    const Way& way = GetParam();
    return {.format = way.format,
            .heads = way.heads,
            .top_k = way.top_k,
            .split_keys = way.split_keys,
            .sequence_lens = std::move(sequence_lens),
            .rows = std::move(rows),
            .seed = static_cast<uint32_t>(way.heads + way.split_keys)};
  }
};

// Lists around a tile's and the list's own size, rows that have no keys, rows that see more keys
// than their list has.
TEST_P(SparseLatent, EqualsDoublePrecision) {
  const int32_t top_k = GetParam().top_k;
  const SparseLatentTrial trial(
      shape_of({3000, 65, 1, 2 * top_k}, {{.sequence = 0, .length = 1},
                                          {.sequence = 0, .length = 63},
                                          {.sequence = 1, .length = 0},
                                          {.sequence = 1, .length = 64},
                                          {.sequence = 1, .length = 65},
                                          {.sequence = 2, .length = 1},
                                          {.sequence = 3, .length = top_k - 1},
                                          {.sequence = 0, .length = -5},
                                          {.sequence = 3, .length = top_k},
                                          {.sequence = 3, .length = top_k + 1},
                                          {.sequence = 0, .length = 3000}}));
  std::vector<double> lse;
  const auto expected = trial.in_double(lse);
  const auto result = trial.on_gpu(3);
  EXPECT_LE(worst_row_error(trial, result, expected), kTolerance);
  expect_near_lse(result, lse);
}

TEST_P(SparseLatent, ARowsBitsDoNotDependOnTheBatch) {
  const int32_t top_k = GetParam().top_k;
  std::vector<SparseRow> rows;
  for (int32_t i = 0; i < 150; ++i) {
    rows.push_back({.sequence = i % 3, .length = i % 11 == 7 ? 0 : 1 + i * 97 % (2 * top_k)});
  }
  const SparseLatentTrial trial(shape_of({2 * top_k, 2 * top_k, 2 * top_k}, rows));
  const auto all = trial.on_gpu(2);
  const int64_t heads = trial.shape().heads;
  std::vector<int32_t> backwards(rows.size());
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  const auto reversed = trial.on_gpu(backwards);
  for (int32_t r = 0; r < std::ssize(rows); ++r) {
    const auto its = all.out.begin() + r * heads * kLatent;
    EXPECT_TRUE(
        std::equal(its, its + heads * kLatent, reversed.out.end() - (r + 1) * heads * kLatent))
        << "row " << r << " of " << rows[static_cast<size_t>(r)].length << " keys, backwards";
    if (r % 10 != 3) continue;
    const auto alone = trial.on_gpu(std::vector{r});
    EXPECT_TRUE(std::equal(its, its + heads * kLatent, alone.out.begin()))
        << "row " << r << " of " << rows[static_cast<size_t>(r)].length << " keys, alone";
    EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(), all.lse.begin() + r * heads));
  }
}

TEST_P(SparseLatent, AGraphTakesTheLengthsOfItsReplay) {
  const int32_t top_k = GetParam().top_k;
  const SparseLatentTrial trial(shape_of({2 * top_k, 100}, {{.sequence = 0, .length = 2 * top_k},
                                                            {.sequence = 1, .length = 70},
                                                            {.sequence = 0, .length = 0},
                                                            {.sequence = 0, .length = top_k - 3}}));
  EXPECT_TRUE(trial.in_graph() == trial.on_gpu());
}

INSTANTIATE_TEST_SUITE_P(Ways, SparseLatent,
                         testing::Values(Way{CacheFormat::kBF16, 128, 2048, 2048},
                                         Way{CacheFormat::kBF16, 128, 512, 128},
                                         Way{CacheFormat::kBF16, 16, 2048, 256},
                                         Way{CacheFormat::kBF16, 96, 300, 64},
                                         Way{CacheFormat::kFp8Scaled, 128, 2048, 2048},
                                         Way{CacheFormat::kFp8Scaled, 128, 512, 128},
                                         Way{CacheFormat::kFp8Scaled, 16, 2048, 256},
                                         Way{CacheFormat::kFp8Scaled, 96, 300, 64},
                                         Way{CacheFormat::kE4M3, 64, 512, 512},
                                         Way{CacheFormat::kE4M3, 16, 512, 128},
                                         Way{CacheFormat::kE5M2, 64, 512, 128}),
                         name_of_way);

// Every path in few tiles, because the sanitizers are slow: an odd and an even number of tiles,
// partial ones, more units than CTAs, splits.
TEST(SparseLatentShort, EqualsTheCpu) {
  for (const CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFp8Scaled}) {
    for (const int32_t split_keys : {64, 192}) {
      std::vector<SparseRow> rows;
      for (int32_t i = 0; i < 72; ++i) {
        rows.push_back({.sequence = i % 2, .length = i % 6 == 5 ? 150 + i : i % 3 * 33});
      }
      const SparseLatentTrial trial({.format = format,
                                     .heads = 128,
                                     .top_k = 192,
                                     .split_keys = split_keys,
                                     .sequence_lens = {300, 300},
                                     .rows = rows});
      std::vector<float> lse;
      const auto expected = trial.on_cpu(lse);
      const auto result = trial.on_gpu();
      EXPECT_LE(worst_row_error(trial, result, {expected.begin(), expected.end()}), kTolerance);
      expect_near_lse(result, {lse.begin(), lse.end()});
    }
  }
}

// Lists of all keys against the kernels of dense attention, which round in other places.
TEST(SparseLatentLists, TheIdentityIsDenseAttention) {
  for (const CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFp8Scaled}) {
    for (const int32_t heads : {16, 128}) {
      const SparseLatentTrial trial({.format = format,
                                     .heads = heads,
                                     .top_k = 2048,
                                     .split_keys = kInvariantSplitKeys,
                                     .sequence_lens = {2048, 1000, 1},
                                     .rows = {{.sequence = 0, .length = 2048},
                                              {.sequence = 1, .length = 1000},
                                              {.sequence = 2, .length = 1}}});
      const auto dense = widen(trial.dense_on_gpu());
      EXPECT_LE(worst_row_error(trial, trial.on_gpu(), {dense.begin(), dense.end()}),
                2 * kTolerance)
          << name_of(format) << ", " << heads << " heads";
    }
  }
}

// Scales above what f16 holds: dequantized values are divided by powers of two.
TEST(SparseLatentScales, LargeOnesAreExact) {
  SparseLatentTrial trial(
      {.format = CacheFormat::kFp8Scaled,
       .heads = 64,
       .top_k = 512,
       .split_keys = 128,
       .sequence_lens = {900},
       .rows = {{.sequence = 0, .length = 900}, {.sequence = 0, .length = 400}}});
  trial.scale_keys(7, 3e4f);
  trial.scale_queries(1e-4f);  // the others still count
  std::vector<double> lse;
  const auto expected = trial.in_double(lse);
  const auto result = trial.on_gpu();
  EXPECT_LE(worst_row_error(trial, result, expected), kTolerance);
  expect_near_lse(result, lse);
}

// All keys count alike; those that are not there do not.
TEST(SparseLatentScales, QueriesOfZeroGiveTheMean) {
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    for (const float factor : {0.0f, 1e-36f}) {
      SparseLatentTrial trial({.format = format,
                               .heads = 64,
                               .top_k = 128,
                               .split_keys = 128,
                               .sequence_lens = {200},
                               .rows = {{.sequence = 0, .length = 1},
                                        {.sequence = 0, .length = 33},
                                        {.sequence = 0, .length = 64},
                                        {.sequence = 0, .length = 100}}});
      trial.scale_queries(factor);
      std::vector<double> lse;
      const auto expected = trial.in_double(lse);
      const auto result = trial.on_gpu();
      EXPECT_LE(worst_row_error(trial, result, expected), kTolerance) << name_of(format);
      expect_near_lse(result, lse);
    }
  }
}

// Logits up to some 2^34, whose exponentials are one key's alone, over all formats: no reference is
// rounded where the score is not. Queries whose largest scores are nearer to one another than the
// arithmetic tells apart are left out.
TEST(SparseLatentScales, LogitsOfAnySize) {
  int64_t certain = 0, all = 0;
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    for (const auto& [latents, queries] : kLogitSizes) {
      for (const int32_t split_keys : {128, 64}) {
        SparseLatentTrial trial({.format = format,
                                 .heads = 64,
                                 .top_k = 256,
                                 .split_keys = split_keys,
                                 .sequence_lens = {300},
                                 .rows = {{.sequence = 0, .length = 1},
                                          {.sequence = 0, .length = 33},
                                          {.sequence = 0, .length = 64},
                                          {.sequence = 0, .length = 100},
                                          {.sequence = 0, .length = 300}}});
        trial.scale_keys(1, latents);
        trial.scale_queries(queries);
        std::vector<double> lse;
        const auto expected = trial.in_double(lse);
        const auto certainties = trial.certainties();
        const auto result = trial.on_gpu();
        const auto name = std::string(name_of(format)) + ", latents times " +
                          std::to_string(latents) + ", queries times " + std::to_string(queries) +
                          ", splits of " + std::to_string(split_keys);
        EXPECT_LE(worst_certain_error(result, expected, certainties), kQueryTolerance) << name;
        EXPECT_TRUE(std::ranges::all_of(widen(result.out), [](float x) {
          return std::isfinite(x);
        })) << name;
        for (size_t at = 0; at < lse.size(); ++at) {
          ASSERT_NEAR(result.lse[at], lse[at],
                      4e-3 + 1e-6 * std::abs(lse[at]) + certainties[at].error)
              << name << ", query " << at;
          certain += certainties[at].is_certain;
        }
        all += std::ssize(lse);
      }
    }
  }
  std::printf("%.3f of the queries have certain scores\n",
              static_cast<double>(certain) / static_cast<double>(all));
  EXPECT_GT(certain, all * 7 / 10);
}

// A prompt's rows: each sees one key more than the row before.
TEST(SparseLatentPrompt, EqualsTheCpu) {
  for (const CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFp8Scaled}) {
    std::vector<SparseRow> rows;
    for (int32_t i = 0; i < 400; ++i) rows.push_back({.sequence = 0, .length = 600 + i});
    const SparseLatentTrial trial({.format = format,
                                   .heads = 128,
                                   .top_k = 512,
                                   .split_keys = 512,
                                   .sequence_lens = {1000},
                                   .rows = rows});
    std::vector<float> lse;
    const auto expected = trial.on_cpu(lse);
    const auto result = trial.on_gpu(2);
    EXPECT_LE(worst_row_error(trial, result, {expected.begin(), expected.end()}), kTolerance);
  }
}

}  // namespace
}  // namespace fathom::cuda
