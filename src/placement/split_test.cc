#include "placement/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "placement/test_configs.h"

namespace fathom {
namespace {

std::vector<int64_t> blocks_of(int64_t columns, int ranks) {
  std::vector<int64_t> blocks;
  blocks.reserve(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    blocks.push_back(ceil_div(split_columns(columns, ranks, rank).count, kColumnBlock));
  }
  return blocks;
}

TEST(Split, CoversExactlyInWholeUnitsThatDifferByOneAtMost) {
  for (const int64_t unit : {1, 2, 128}) {
    for (const int64_t size : {0, 1, 2, 127, 128, 129, 255, 256, 1408, 1536, 2048, 10944, 129280}) {
      for (int ranks = 1; ranks <= 64; ++ranks) {
        int64_t next = 0, least = size, most = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const Slice slice = split_units(size, unit, ranks, rank);
          ASSERT_EQ(slice.first, next)
              << size << " in units of " << unit << ", " << rank << " of " << ranks;
          ASSERT_GE(slice.count, 0);
          ASSERT_TRUE(slice.end() % unit == 0 || slice.end() == size) << "a unit is cut";
          next = slice.end();
          const int64_t units = ceil_div(slice.count, unit);
          least = std::min(least, units);
          most = std::max(most, units);
        }
        ASSERT_EQ(next, size);
        ASSERT_LE(most - least, 1) << size << " in units of " << unit << " over " << ranks;
      }
    }
  }
}

TEST(Split, ColumnsOfDeepSeekModels) {
  // DeepSeek-V2's experts have 12 blocks, V2-Lite's 11, V3's 16.
  EXPECT_EQ(blocks_of(1536, 8), (std::vector<int64_t>{2, 2, 2, 2, 1, 1, 1, 1}));
  EXPECT_EQ(blocks_of(1408, 8), (std::vector<int64_t>{2, 2, 2, 1, 1, 1, 1, 1}));
  EXPECT_EQ(blocks_of(2048, 8), (std::vector<int64_t>(8, 2)));
  EXPECT_EQ(blocks_of(18432, 8), (std::vector<int64_t>(8, 18)));
}

std::vector<int64_t> columns_of(int64_t columns, int ranks) {
  std::vector<int64_t> counts(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    counts[static_cast<size_t>(rank)] = split_columns(columns, ranks, rank).count;
  }
  return counts;
}

TEST(Split, FewerBlocksThanRanksAreCut) {
  EXPECT_EQ(columns_of(128, 2), (std::vector<int64_t>{64, 64}));
  EXPECT_EQ(columns_of(256, 2), (std::vector<int64_t>{128, 128}));
  EXPECT_EQ(columns_of(256, 3), (std::vector<int64_t>{128, 64, 64}));
  EXPECT_EQ(columns_of(136, 3), (std::vector<int64_t>{64, 64, 8}));
  EXPECT_EQ(columns_of(128, 3), (std::vector<int64_t>{64, 32, 32}));
  EXPECT_EQ(columns_of(128, 5), (std::vector<int64_t>{32, 32, 32, 32, 0}));
}

TEST(Split, NoSliceOfColumnsHasScalesOfTwoBlocksUnlessItBeginsOne) {
  for (int64_t columns = 8; columns <= 2048; columns += 8) {
    for (int ranks = 1; ranks <= 64; ++ranks) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Slice slice = split_columns(columns, ranks, rank);
        ASSERT_EQ(slice.first, next) << columns << " over " << ranks;
        next = slice.end();
        const int64_t begin = slice.first % kColumnBlock;
        ASSERT_TRUE(begin == 0 || slice.count <= kColumnBlock - begin)
            << columns << " columns, rank " << rank << " of " << ranks << ": " << slice.first << "+"
            << slice.count;
      }
      ASSERT_EQ(next, columns);
    }
  }
}

TEST(Split, LastBlockOfV2LitesDenseLayerIsHalfFull) {
  EXPECT_EQ(blocks_of(10944, 8), (std::vector<int64_t>{11, 11, 11, 11, 11, 11, 10, 10}));
  EXPECT_EQ(split_columns(10944, 8, 5), (Slice{7040, 1408}));
  EXPECT_EQ(split_columns(10944, 8, 7), (Slice{9728, 1216}));
  EXPECT_EQ(split_columns(10944, 1, 0), (Slice{0, 10944}));
}

TEST(Split, VocabularyTakesAnySize) {
  EXPECT_EQ(split_vocabulary(129280, 8, 1), (Slice{16160, 16160}));
  EXPECT_EQ(split_vocabulary(102400, 3, 0), (Slice{0, 34136}));
  EXPECT_EQ(split_vocabulary(102400, 3, 1), (Slice{34136, 34136}));
  EXPECT_EQ(split_vocabulary(102400, 3, 2), (Slice{68272, 34128}));
  EXPECT_EQ(split_vocabulary(2, 3, 2), (Slice{2, 0}));
}

TEST(Split, HeadsThatFillBlocksOfTheOutputAreSingle) {
  const ModelConfig v3 = published_config("deepseek_v3");
  EXPECT_EQ(head_unit(v3), 1);
  EXPECT_EQ(split_heads(v3, 8, 3), (Slice{48, 16}));
  // 128 heads over 6 ranks: 22, 22, 21, 21, 21, 21.
  EXPECT_EQ(split_heads(v3, 6, 1), (Slice{22, 22}));
  EXPECT_EQ(split_heads(v3, 6, 2), (Slice{44, 21}));
}

TEST(Split, HeadsOfOtherMatricesAreSingle) {
  const ModelConfig lite = published_config("deepseek_v2_lite");
  EXPECT_EQ(head_unit(lite), 1);
  EXPECT_EQ(split_heads(lite, 16, 5), (Slice{5, 1}));
  EXPECT_EQ(split_heads(lite, 3, 0), (Slice{0, 6}));
  EXPECT_EQ(split_heads(lite, 3, 1), (Slice{6, 5}));
  ModelConfig rows = lite;
  rows.quantization.kind = QuantizationConfig::Kind::kFp8Row;
  EXPECT_EQ(head_unit(rows), 1);
}

TEST(Split, HeadsOfBlockScaledMatricesFillBlocksOfTheOutput) {
  ModelConfig config = published_config("deepseek_v3");
  config.v_dim = 32;
  EXPECT_EQ(head_unit(config), 4);
  config.v_dim = 192;
  EXPECT_EQ(head_unit(config), 2);
  config.num_heads = 5;
  EXPECT_EQ(split_heads(config, 3, 1), (Slice{2, 2}));
  EXPECT_EQ(split_heads(config, 3, 2), (Slice{4, 1}));
}

}  // namespace
}  // namespace fathom
