// Latent decode attention over caches of 8 bits on the GPU, against the CPU's absorbed attention in
// fp32 over the same rows, decoded.
#include "ops/attention/latent_decode_8_bit_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "cache/latent_layout.h"
#include "ops/attention/latent_decode_trial_cuda.h"

namespace fathom::cuda {
namespace {

// A bf16 result rounds by 2^-9 at most, by 0.0017 on average, and so do parts of a row tile before
// they are joined; queries and probabilities of two values in e4m3 have bf16's bits. Tiles of 64
// rows multiply in f16, values times their scales rounded to it.
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

// Every path of a kernel in few pages, which is what the sanitizers take time for.
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

// Queries that f16 does not hold, nor their products with keys; and none at all.
TEST(LatentDecode8BitBatch, QueriesOfAnySize) {
  for (const float size : {1e-30f, 1e6f, 0.0f}) {
    LatentDecodeTrial trial(CacheFormat::kFp8Scaled, 16, {200}, {1});
    trial.scale_queries(size);
    EXPECT_LE(trial.error(1), most_error(16)) << size;
  }
}

}  // namespace
}  // namespace fathom::cuda
