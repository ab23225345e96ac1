// Latent decode attention on the GPU against the CPU's absorbed attention in fp32.
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"

#include <gtest/gtest.h>

#include <random>

#include "ops/attention/latent_decode_cuda/latent_decode_trial_cuda.h"

namespace fathom::cuda {
namespace {

// bf16 probabilities, partial results and a bf16 result: each rounds by 2^-9 at most.
void compare(int heads, const std::vector<int32_t>& lens, const std::vector<int32_t>& queries,
             int launches = 3) {
  LatentDecodeTrial trial(CacheFormat::kBF16, heads, lens, queries);
  EXPECT_LE(trial.error(launches), 4e-3) << heads << " heads, " << lens.size() << " sequences";
}

class LatentDecode : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(LatentDecode, EqualsTheCpu) {
  const auto [heads, queries] = GetParam();
  compare(heads, {64}, {queries});
  compare(heads, {queries, 63, 64, 65, 300, 4000}, {queries, 1, queries, queries, 1, queries});
  compare(heads, {1000, 1000, 1000}, {queries, queries, queries});
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentDecode,
                         testing::Combine(testing::Values(4, 16, 24, 64, 128),
                                          testing::Values(1, 2, 3, 4, 5, 8)));

// Every path of a kernel in few pages, because the sanitizers are slow: one page, an odd and an
// even number of them, full and partial row tiles, partial last pages.
TEST(LatentDecodeShort, EqualsTheCpu) {
  for (const int heads : {16, 32, 64, 128}) {
    compare(heads, {40}, {1}, 1);
    compare(heads, {500, 129}, {1, 2}, 1);
    compare(heads, std::vector<int32_t>(140, 150), std::vector<int32_t>(140, 1), 1);
  }
}

TEST(LatentDecodeBatch, MoreSequencesThanMultiprocessors) {
  std::mt19937 random(5);
  std::vector<int32_t> lens(300), queries(300, 1);
  for (int32_t& len : lens) len = 1 + static_cast<int32_t>(random() % 700);
  lens[7] = 9000;
  compare(16, lens, queries);
}

TEST(LatentDecodeBatch, MoreRowTilesThanBlocks) {
  std::mt19937 random(6);
  for (const int heads : {64, 128}) {
    std::vector<int32_t> lens(150), queries(150);
    for (int32_t& count : queries) count = 1 + static_cast<int32_t>(random() % 2);
    for (int32_t& len : lens) len = 2 + static_cast<int32_t>(random() % 700);
    lens[7] = 9000;  // more than a CTA's share: split
    compare(heads, lens, queries);
  }
}

TEST(LatentDecodeBatch, ManyHeadsOverAllMultiprocessorsFiftyTimes) {
  compare(64, {20000}, {1}, 50);
  compare(128, {20000}, {1}, 50);
}

TEST(LatentDecodeBatch, OneSequenceOverAllMultiprocessorsFiftyTimes) {
  compare(16, {20000}, {1}, 50);
}

}  // namespace
}  // namespace fathom::cuda
