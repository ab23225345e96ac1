#include "ops/moe/plans/expert_exchange_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fathom::cuda {
namespace {

TEST(ExpertExchangePlan, SharesCoverAllRowsOnce) {
  for (const int64_t rows : {0, 1, 3, 4, 5, 8, 63, 64, 1000, 8191}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const RowShare share = share_of_rows(rows, ranks, rank);
        EXPECT_EQ(share.first, next) << rows << " rows, rank " << rank << " of " << ranks;
        EXPECT_GE(share.count, 0);
        if (share.count > 0) {
          EXPECT_EQ(share.first % 4, 0);
        }
        next = share.first + share.count;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(ExpertExchangePlan, ManyRowsAreDividedEvenly) {
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(share_of_rows(4096, 8, rank).count, 512);
}

// The shares of a round, as the device takes them, fit into its buffers whatever the ranks' counts.
TEST(ExpertExchangePlan, RoundsHaveRoomForEachRanksShare) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int ranks = 2 + static_cast<int>(random() % 7);
    const int64_t capacity = 1 + static_cast<int64_t>(random() % (repeat % 2 == 0 ? 9 : 900));
    std::vector<int64_t> counts;
    int64_t all = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      counts.push_back(random() % 4 == 0 ? capacity
                                         : static_cast<int64_t>(random()) % (capacity + 1));
      all += counts.back();
    }
    const ExchangeRounds plan = plan_exchange_rounds(all, capacity, ranks);
    EXPECT_EQ(plan.rounds, (all + capacity - 1) / capacity);
    EXPECT_LE(plan.most_rows, room_of_exchange(capacity));
    for (int64_t round = 0; round < plan.rounds; ++round) {
      int64_t rows = 0;
      for (const int64_t count : counts) {
        rows += count * (round + 1) / plan.rounds - count * round / plan.rounds;
      }
      EXPECT_LE(rows, plan.most_rows) << ranks << " ranks, " << all << " rows by " << capacity;
    }
  }
  EXPECT_EQ(plan_exchange_rounds(0, 64, 4).rounds, 0);
  EXPECT_EQ(plan_exchange_rounds(64, 64, 4).most_rows, 64);  // one round has them all
}

constexpr MoeManyRowsSizes kV3 = {.rows = 8192,
                                  .hidden = 7168,
                                  .num_experts = 32,
                                  .experts_per_token = 8,
                                  .inter = 2048,
                                  .shared_inter = 2048,
                                  .scaled = true};

// The experts' workspace is that of one rank with as many rows, and the exchange adds little.
TEST(ExpertExchangePlan, TakesTheWorkspaceOfOneRank) {
  const ExpertExchangePlan plan = plan_expert_exchange(kV3);
  EXPECT_EQ(plan.moe.workspace_bytes, plan_moe_many_rows(kV3).workspace_bytes);
  EXPECT_GE(plan.window_at, plan.offered_at + int64_t{sizeof(OfferedRows)});
  EXPECT_GT(plan.slots_at, plan.window_at);
  EXPECT_GE(plan.moe_at, plan.slots_at + int64_t{8192} * 8 * 4);
  EXPECT_GE(plan.workspace_bytes, plan.moe_at + plan.moe.workspace_bytes);
  EXPECT_LE(plan.workspace_bytes, plan.moe.workspace_bytes + (1 << 20));
}

// What ranks read of one another lies alike for experts in bf16 and in e4m3.
TEST(ExpertExchangePlan, FormsShareTheExchangesPlaces) {
  MoeManyRowsSizes bf16 = kV3;
  bf16.scaled = false;
  const ExpertExchangePlan scaled = plan_expert_exchange(kV3), plain = plan_expert_exchange(bf16);
  EXPECT_EQ(scaled.offered_at, plain.offered_at);
  EXPECT_EQ(scaled.window_at, plain.window_at);
  EXPECT_EQ(scaled.slots_at, plain.slots_at);
  EXPECT_EQ(scaled.moe_at, plain.moe_at);
}

// Tiles are those of the model's experts, wherever they are; the places stay.
TEST(ExpertExchangePlan, ARoundChoosesTilesAlone) {
  const ExpertExchangePlan plan = plan_expert_exchange(kV3);
  for (const int64_t rows : {1, 128, 1024, 4096, 8192}) {
    const MoeManyRowsPlan round = plan_exchange_round(plan, kV3, rows, 256);
    MoeManyRowsSizes whole = kV3;
    whole.rows = rows;
    whole.num_experts = 256;
    EXPECT_EQ(round.tile_tokens, plan_moe_many_rows(whole).tile_tokens);
    EXPECT_EQ(round.one_row_tile_an_expert, plan_moe_many_rows(whole).one_row_tile_an_expert);
    EXPECT_EQ(round.positions_at, plan.moe.positions_at);
    EXPECT_EQ(round.sorted_x_at, plan.moe.sorted_x_at);
    EXPECT_EQ(round.sorted_rows, plan.moe.sorted_rows);
  }
}

}  // namespace
}  // namespace fathom::cuda
