#include "ops/moe/plans/four_bit_moe_plan.h"

#include <gtest/gtest.h>

#include <vector>

#include "ops/moe/plans/four_bit_tiles.h"

namespace fathom::cuda {
namespace {

TEST(FourBitMoePlan, AWarpHoldsItsColumnsInRegisters) {
  EXPECT_EQ(plan_four_bit_slices(7168), (FourBitSlices{16, 7}));
  EXPECT_EQ(plan_four_bit_slices(2048), (FourBitSlices{8, 4}));
  EXPECT_EQ(plan_four_bit_slices(1408), (FourBitSlices{4, 6}));
  EXPECT_EQ(plan_four_bit_slices(256), (FourBitSlices{1, 4}));
  for (int64_t columns = 64; columns <= kFourBitMostColumns; columns += 64) {
    const FourBitSlices plan = plan_four_bit_slices(columns);
    EXPECT_LE(plan.blocks, kFourBitMostBlocks) << columns;
    EXPECT_LE(plan.slices, kFourBitWarps) << columns;
    EXPECT_GE(int64_t{plan.blocks} * plan.slices * 64, columns) << columns;
    EXPECT_GE(columns / 64, plan.slices) << "a warp without columns: " << columns;
  }
}

TEST(FourBitMoePlan, WorkspaceHoldsAllPairs) {
  const FourBitFewRowsPlan plan =
      plan_four_bit_few_rows({.rows = 3, .hidden = 7168, .experts_per_token = 8, .inter = 2048});
  EXPECT_GE(plan.results_at, 24 * 2048 * 2);
  EXPECT_GE(plan.workspace_bytes - plan.results_at, 24 * 7168 * 4);
  EXPECT_EQ(plan.results_at % 1024, 0);
}

// Each code and each scale has a place of its own, and all of a tile's bytes are used.
TEST(FourBitTiles, EachPlaceIsUsedOnce) {
  std::vector<int> nibbles(2 * kFourBitTileBytes);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 64; ++column) {
      const FourBitPlace place = four_bit_place(row, column);
      ++nibbles[static_cast<size_t>(place.at * 2 + place.shift / 4)];
      if (column % 32 != 0) continue;
      for (int i = 0; i < 4; ++i) {
        ++nibbles[static_cast<size_t>(four_bit_scale_at(row, column) * 2 + i)];
      }
    }
  }
  EXPECT_EQ(nibbles, std::vector<int>(2 * kFourBitTileBytes, 1));
}

TEST(FourBitTiles, TilesFollowOneAnother) {
  EXPECT_EQ(four_bit_bytes(64, 128), 4 * 1152);
  EXPECT_EQ(four_bit_tile_at(0, 0, 128), 0);
  EXPECT_EQ(four_bit_tile_at(16, 63, 128), 576);
  EXPECT_EQ(four_bit_tile_at(15, 64, 128), 1152);
  EXPECT_EQ(four_bit_tile_at(48, 127, 128), 3 * 1152 + 576);
  // A published layer's experts need 64 bits.
  EXPECT_GT(four_bit_tile_at(int64_t{384} * 4096 - 1, 7167, 7168), int64_t{1} << 32);
}

TEST(FourBitTiles, GateAndUpAlternate) {
  EXPECT_EQ(four_bit_gate_up_row(7, false), 7);
  EXPECT_EQ(four_bit_gate_up_row(7, true), 15);
  EXPECT_EQ(four_bit_gate_up_row(8, false), 16);
  EXPECT_EQ(four_bit_gate_up_row(17, true), 41);
}

}  // namespace
}  // namespace fathom::cuda
