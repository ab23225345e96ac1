#include "ops/attention/sparse_latent_cuda/sparse_latent_plan.h"

#include <gtest/gtest.h>

#include "base/math.h"

namespace fathom::cuda {
namespace {

constexpr int kSms = 132;

TEST(SparseLatentPlan, SplitsAreWholeTilesAndCoverTheList) {
  for (const int64_t rows : {1, 2, 3, 5, 8, 33, 66, 67, 500, 4096}) {
    for (const int32_t heads : {1, 16, 64, 65, 128}) {
      for (const int32_t top_k : {1, 63, 64, 100, 512, 2048, 2049}) {
        const int32_t keys = sparse_latent_split_keys(rows, heads, top_k, kSms);
        SCOPED_TRACE(testing::Message() << rows << " rows, " << heads << " heads, " << top_k);
        EXPECT_TRUE(keys == top_k || keys % kSparseTileKeys == 0) << keys;
        EXPECT_GE(keys, 1);
        EXPECT_LE(keys, top_k);
        // A wave of CTAs at most, unless one split a row is more.
        const int64_t ctas = rows * ceil_div(heads, kSparseTileHeads);
        if (keys < top_k) {
          EXPECT_LE(ctas * ceil_div(top_k, keys), kSms);
        }
      }
    }
  }
}

TEST(SparseLatentPlan, FewRowsAreSplitAndManyAreNot) {
  EXPECT_EQ(sparse_latent_split_keys(1, 128, 2048, kSms), 128);
  EXPECT_EQ(sparse_latent_split_keys(4, 128, 2048, kSms), 256);
  EXPECT_EQ(sparse_latent_split_keys(16, 128, 2048, kSms), 512);
  EXPECT_EQ(sparse_latent_split_keys(128, 128, 2048, kSms), 2048);
  EXPECT_EQ(sparse_latent_split_keys(4096, 128, 2048, kSms), 2048);
  EXPECT_EQ(sparse_latent_split_keys(66, 128, 2048, kSms), 2048);
  EXPECT_EQ(sparse_latent_split_keys(16, 16, 2048, kSms), 256);
}

TEST(SparseLatentPlan, ScratchHasASlotForEachSplitAndTileOfHeads) {
  EXPECT_EQ(sparse_latent_scratch_words(100, 128, 2048, 2048), 0);
  EXPECT_EQ(sparse_latent_scratch_words(1, 64, 128, 64), 2 * (512 * 64 / 2 + 64));
  EXPECT_EQ(sparse_latent_scratch_words(3, 65, 129, 64), 3 * 2 * 3 * (512 * 64 / 2 + 64));
  // Beyond 32 bits.
  EXPECT_EQ(sparse_latent_scratch_words(65536, 128, 2048, 64),
            int64_t{65536} * 2 * 32 * (512 * 64 / 2 + 64));
}

}  // namespace
}  // namespace fathom::cuda
