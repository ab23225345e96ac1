#include "ops/attention/prefill_cuda/mha_prefill_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/math.h"

namespace fathom::cuda {
namespace {

struct Parts {
  std::vector<MhaPrefillPart> list;
  int32_t rows = 0, keys = 0;

  // The last query sees num_keys + `more` keys, counted from the run's first.
  void add(int32_t num_queries, int32_t num_keys, int32_t more = 0, bool joined = false) {
    list.push_back({.first_row = rows,
                    .rows = num_queries,
                    .first_key = keys,
                    .num_keys = num_keys,
                    .visible = num_keys - num_queries + 1 + more,
                    .joined = joined});
    rows += num_queries;
    keys += num_keys;
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

// Checks that every row of every head is covered once, with the keys that it sees, and CTAs are
// equally busy.
void check(const Parts& parts, int heads, int processors) {
  const auto plan = plan_mha_prefill(parts.list, heads, processors);
  ASSERT_EQ(std::ssize(plan.first_tile), processors);
  std::vector<int> seen(static_cast<size_t>(parts.rows) * heads);
  int64_t total = 0, longest = 0, most = 0, most_tiles = 0;
  for (const MhaPrefillTile& tile : plan.tiles) {
    if (tile.rows == 0) continue;
    ASSERT_LE(tile.rows, MhaPrefillTile::kRows);
    const auto after =
        std::ranges::upper_bound(parts.list, tile.first_row, {}, &MhaPrefillPart::first_row);
    const MhaPrefillPart& part = *(after - 1);
    ASSERT_LE(tile.first_row + tile.rows, part.first_row + part.rows);
    EXPECT_EQ(tile.first_key, part.first_key);
    EXPECT_EQ(tile.num_keys, part.num_keys);
    EXPECT_EQ(tile.joined, part.joined);
    EXPECT_EQ(tile.visible, part.visible + tile.first_row - part.first_row);
    for (int32_t row = tile.first_row; row < tile.first_row + tile.rows; ++row) {
      ++seen[static_cast<size_t>(row) * heads + tile.head];
    }
    EXPECT_EQ(tile.steps, ceil_div(std::min(tile.visible + tile.rows - 1, tile.num_keys), 128));
    longest = std::max<int64_t>(longest, tile.steps);
    total += tile.steps;
  }
  for (const int times : seen) EXPECT_EQ(times, 1);
  for (int block = 0; block < processors; ++block) {
    most = std::max(most, load_of(plan, block));
    most_tiles = std::max<int64_t>(most_tiles, std::ssize(tiles_of(plan, block)));
  }
  // A tile's fixed cost shifts the balance by a step a tile.
  EXPECT_LE(most, ceil_div(total, processors) + longest + most_tiles);
}

TEST(MhaPrefillPlan, CoversEveryRowOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    Parts parts;
    const int count = 1 + static_cast<int>(random() % (round % 3 == 0 ? 40 : 4));
    for (int i = 0; i < count; ++i) {
      const auto queries = static_cast<int32_t>(1 + random() % (round % 5 == 0 ? 3000 : 300));
      const auto keys = static_cast<int32_t>(random() % 1000);
      if (random() % 2 == 0) {
        parts.add(queries, queries + keys, 0, random() % 2 == 0);
      } else {
        // A run before the queries' own keys, or with some of them.
        parts.add(queries, 128 * (1 + keys / 128), queries - static_cast<int32_t>(random() % 100),
                  random() % 2 == 0);
      }
    }
    check(parts, round % 7 == 0 ? 32 : 3, round % 4 == 0 ? 5 : 132);
  }
}

TEST(MhaPrefillPlan, NothingToDo) {
  Parts parts;
  EXPECT_EQ(plan_mha_prefill(parts.list, 16, 132).tiles[0].rows, 0);
  parts.add(0, 100);
  EXPECT_EQ(plan_mha_prefill(parts.list, 16, 132).tiles[0].rows, 0);
}

TEST(MhaPrefillPlan, ACausalSequenceIsSharedEvenly) {
  Parts parts;
  parts.add(2048, 2048);
  const auto plan = plan_mha_prefill(parts.list, 16, 132);
  // 16 heads of 1 + ... + 16 steps are 16.5 for each CTA, the longest tile 16.
  for (int block = 0; block < 132; ++block) EXPECT_LE(load_of(plan, block), 18);
}

// 8,192 keys of a head are 4 MB: two heads run at a time.
TEST(MhaPrefillPlan, HeadsThatDoNotFitTheCacheTogetherComeOneAfterTheOther) {
  Parts parts;
  parts.add(8192, 8192);
  const auto plan = plan_mha_prefill(parts.list, 128, 132);
  for (int block = 0; block < 132; ++block) {
    const auto tiles = tiles_of(plan, block);
    for (size_t t = 1; t < tiles.size(); ++t) {
      EXPECT_GE(tiles[t].head / 2, tiles[t - 1].head / 2);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
