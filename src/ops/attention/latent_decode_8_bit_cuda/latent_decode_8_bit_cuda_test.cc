// Latent decode attention over 8-bit caches on the GPU, against the CPU's absorbed attention in
// fp32 over the same dequantized rows.
#include "ops/attention/latent_decode_8_bit_cuda/latent_decode_8_bit_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "cache/latent_layout.h"
#include "ops/attention/latent_decode_cuda/latent_decode_trial_cuda.h"

namespace fathom::cuda {
namespace {

// A bf16 result rounds by 2^-9 at most, by 0.0017 on average, and so do a row tile's partial
// results before the combine; queries and probabilities of two e4m3 values have bf16's bits. Tiles
// of 64 rows multiply in f16, with values times their scales rounded to it.
double most_error(int rows) { return rows > 32 ? 4e-3 : 3.5e-3; }

void compare(CacheFormat format, int heads, const std::vector<int32_t>& lens,
             const std::vector<int32_t>& queries, int launches = 3) {
  LatentDecodeTrial trial(format, heads, lens, queries);
  EXPECT_LE(trial.error(launches), most_error(heads * std::ranges::max(queries)))
      << name_of(format) << ", " << heads << " heads, " << lens.size() << " sequences";
}

constexpr auto kFormats = {CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2};

class LatentDecode8Bit : public testing::TestWithParam<std::tuple<CacheFormat, int, int>> {};

TEST_P(LatentDecode8Bit, EqualsTheCpu) {
  const auto [format, heads, queries] = GetParam();
  compare(format, heads, {64}, {queries});
  compare(format, heads, {queries, 63, 64, 65, 300, 2500},
          {queries, 1, queries, queries, 1, queries});
  compare(format, heads, {1000, 1000, 1000}, {queries, queries, queries});
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentDecode8Bit,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::Values(4, 16, 24, 128),
                                          testing::Values(1, 2, 5, 8)));

// Every path of a kernel in few pages, because the sanitizers are slow.
TEST(LatentDecode8BitShort, EqualsTheCpu) {
  for (const CacheFormat format : kFormats) {
    for (const int heads : {16, 32, 64, 128}) {
      compare(format, heads, {40}, {1}, 1);
      compare(format, heads, {500, 129}, {1, 2}, 1);
      compare(format, heads, std::vector<int32_t>(140, 150), std::vector<int32_t>(140, 1), 1);
    }
  }
}

TEST(LatentDecode8BitBatch, MoreSequencesThanMultiprocessors) {
  std::mt19937 random(5);
  std::vector<int32_t> lens(300), queries(300, 1);
  for (int32_t& len : lens) len = 1 + static_cast<int32_t>(random() % 700);
  lens[7] = 9000;
  for (const CacheFormat format : kFormats) compare(format, 16, lens, queries);
}

TEST(LatentDecode8BitBatch, OneSequenceOverAllMultiprocessorsFiftyTimes) {
  for (const CacheFormat format : kFormats) compare(format, 16, {20000}, {1}, 50);
}

// Queries beyond f16's range, and with key dot products beyond it; and all zero.
TEST(LatentDecode8BitBatch, QueriesOfAnySize) {
  for (const float size : {1e-30f, 1e6f, 0.0f}) {
    LatentDecodeTrial trial(CacheFormat::kFp8Scaled, 16, {200}, {1});
    trial.scale_queries(size);
    EXPECT_LE(trial.error(1), most_error(16)) << size;
  }
}

// Logits up to some 2^34 over all formats, as SparseLatentScales.LogitsOfAnySize has them.
TEST(LatentDecodeScales, LogitsOfAnySize) {
  int64_t certain = 0, all = 0;
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    for (const auto& [latents, queries] : kLogitSizes) {
      for (const int heads : {16, 32, 64, 128}) {
        LatentDecodeTrial trial(format, heads, {1, 70, 200}, {1, 1, 1});
        trial.scale_latents(latents);
        trial.scale_queries(queries);
        EXPECT_LE(trial.worst_certain_error(certain, all), 1e-2)
            << name_of(format) << ", " << heads << " heads, latents times " << latents
            << ", queries times " << queries;
      }
    }
  }
  std::printf("%.3f of the queries have certain scores\n",
              static_cast<double>(certain) / static_cast<double>(all));
  EXPECT_GT(certain, all * 7 / 10);
}

// Scales whose products with e4m3 exceed f16: 448 * 9 * 16 is its limit. For all keys, for some
// keys of a page, for a few pages, and for masked keys, which must not change the others' bits.
TEST(LatentDecode8BitScales, OfAnySizeEqualDoublePrecision) {
  constexpr float kNone = 1e30f;
  struct Case {
    const char* name;
    std::vector<float> scales;  // scales of the keys, in turn
    float hidden_from;
    float queries;  // so that scores are of the order of 1
  };
  std::vector<float> late(300, 0.01f), early(300, 20.0f), rising;
  for (size_t i = 170; i < 180; ++i) late[i] = 1000;
  for (size_t i = 64; i < early.size(); ++i) early[i] = 0.5f;
  for (int i = 0; i < 400; ++i) rising.push_back(0.01f * std::exp2(static_cast<float>(i / 16)));
  const std::vector<Case> cases = {
      {"just below", {8.9f}, kNone, 3e-4f},
      {"just above", {9.1f}, kNone, 3e-4f},
      {"20", {20}, kNone, 1e-4f},
      {"1000", {1000}, kNone, 2e-6f},
      {"1e6", {1e6f}, kNone, 2e-9f},
      {"mixed", {20, 0.004f, 1000, 0.3f, 8}, kNone, 2e-6f},
      {"late", late, kNone, 2e-6f},
      {"early", early, kNone, 1e-4f},
      {"rising", rising, kNone, 1e-8f},
      {"hidden among small ones", {0.004f, 1000, 0.004f}, 100, 1},
      {"hidden late", late, 100, 0.3f},
  };
  for (const Case& one : cases) {
    for (const int heads : {16, 64, 128}) {
      // Tiles of few rows fold scales into 8-bit probabilities, relative to a page's largest.
      if (heads == 16 && one.hidden_from < kNone) continue;
      LatentDecodeTrial trial(CacheFormat::kFp8Scaled, heads, {40, 700, 2500}, {1, 1, 1});
      trial.scale_keys(one.scales, one.hidden_from);
      trial.scale_queries(one.queries);
      EXPECT_LE(trial.error_to_double(2), most_error(heads)) << one.name << ", " << heads;
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
