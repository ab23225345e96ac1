#include "ops/attention/mha_prefill_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/math.h"

namespace fathom::cuda {
namespace {

struct Starts {
  std::vector<int32_t> queries = {0}, keys = {0};

  void add(int32_t num_queries, int32_t num_keys) {
    queries.push_back(queries.back() + num_queries);
    keys.push_back(keys.back() + num_keys);
  }
};

std::span<const MhaPrefillTile> tiles_of(const MhaPrefillPlan& plan, int block) {
  const auto tiles = std::span(plan.tiles)
                         .subspan(static_cast<size_t>(plan.first_tile[static_cast<size_t>(block)]));
  size_t count = 0;
  while (tiles[count].rows > 0) ++count;
  return tiles.first(count);
}

int64_t load_of(const MhaPrefillPlan& plan, int block) {
  int64_t steps = 0;
  for (const MhaPrefillTile& tile : tiles_of(plan, block)) steps += tile.steps;
  return steps;
}

// Every row of every head once, with the keys that its mask lets it see; blocks equally busy.
void check(const Starts& starts, MhaMask mask, int heads, int processors) {
  const auto plan = plan_mha_prefill(starts.queries, starts.keys, mask, heads, processors);
  ASSERT_EQ(std::ssize(plan.first_tile), processors);
  std::vector<int> seen(static_cast<size_t>(starts.queries.back()) * heads);
  int64_t total = 0, longest = 0, most = 0, most_tiles = 0;
  for (const MhaPrefillTile& tile : plan.tiles) {
    if (tile.rows == 0) continue;
    ASSERT_LE(tile.rows, MhaPrefillTile::kRows);
    const auto s = static_cast<size_t>(std::ranges::upper_bound(starts.queries, tile.first_row) -
                                       starts.queries.begin() - 1);
    const int32_t queries = starts.queries[s + 1] - starts.queries[s];
    ASSERT_LE(tile.first_row + tile.rows, starts.queries[s + 1]);
    EXPECT_EQ(tile.first_key, starts.keys[s]);
    EXPECT_EQ(tile.num_keys, starts.keys[s + 1] - starts.keys[s]);
    for (int32_t i = 0; i < tile.rows; ++i) {
      const int32_t row = tile.first_row + i, query = row - starts.queries[s];
      const int32_t visible =
          mask == MhaMask::kCausal ? tile.num_keys - queries + query + 1 : tile.num_keys;
      EXPECT_EQ(tile.visible + tile.causal * i, visible);
      EXPECT_LE(visible, tile.steps * MhaPrefillTile::kKeys);
      ++seen[static_cast<size_t>(row) * heads + tile.head];
    }
    EXPECT_EQ(tile.steps, ceil_div(tile.visible + tile.causal * (tile.rows - 1), 128));
    longest = std::max<int64_t>(longest, tile.steps);
    total += tile.steps;
  }
  for (const int times : seen) EXPECT_EQ(times, 1);
  for (int block = 0; block < processors; ++block) {
    most = std::max(most, load_of(plan, block));
    most_tiles = std::max<int64_t>(most_tiles, std::ssize(tiles_of(plan, block)));
  }
  // A tile's own cost shifts the balance by a step a tile.
  EXPECT_LE(most, ceil_div(total, processors) + longest + most_tiles);
}

TEST(MhaPrefillPlan, CoversEveryRowOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    Starts starts;
    const int count = 1 + static_cast<int>(random() % (round % 3 == 0 ? 40 : 4));
    const MhaMask mask = round % 2 == 0 ? MhaMask::kCausal : MhaMask::kNone;
    for (int i = 0; i < count; ++i) {
      const auto queries = static_cast<int32_t>(random() % (round % 5 == 0 ? 3000 : 300));
      const auto keys = static_cast<int32_t>(random() % 1000);
      starts.add(queries, mask == MhaMask::kCausal ? queries + keys : keys);
    }
    check(starts, mask, round % 7 == 0 ? 32 : 3, round % 4 == 0 ? 5 : 132);
  }
}

TEST(MhaPrefillPlan, NothingToDo) {
  Starts starts;
  EXPECT_TRUE(
      plan_mha_prefill(starts.queries, starts.keys, MhaMask::kCausal, 16, 132).tiles[0].rows == 0);
  starts.add(0, 100);
  EXPECT_TRUE(
      plan_mha_prefill(starts.queries, starts.keys, MhaMask::kCausal, 16, 132).tiles[0].rows == 0);
}

TEST(MhaPrefillPlan, ACausalSequenceIsSharedEvenly) {
  Starts starts;
  starts.add(2048, 2048);
  const auto plan = plan_mha_prefill(starts.queries, starts.keys, MhaMask::kCausal, 16, 132);
  // 16 heads of 1 + ... + 16 steps are 16.5 for each block, the longest tile 16.
  for (int block = 0; block < 132; ++block) EXPECT_LE(load_of(plan, block), 18);
}

// 8,192 keys of a head are 4 MB: two heads are computed at a time.
TEST(MhaPrefillPlan, HeadsThatDoNotFitTheCacheTogetherComeOneAfterTheOther) {
  Starts starts;
  starts.add(8192, 8192);
  const auto plan = plan_mha_prefill(starts.queries, starts.keys, MhaMask::kCausal, 128, 132);
  for (int block = 0; block < 132; ++block) {
    const auto tiles = tiles_of(plan, block);
    for (size_t t = 1; t < tiles.size(); ++t) {
      EXPECT_GE(tiles[t].head / 2, tiles[t - 1].head / 2);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
