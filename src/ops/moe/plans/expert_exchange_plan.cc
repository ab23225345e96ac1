#include "ops/moe/plans/expert_exchange_plan.h"

#include <algorithm>

#include "base/math.h"
#include "device/most_peers.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kShareUnit = 4;  // scales of 16 bytes
constexpr int64_t kAlignment = 1024;
// Bytes reserved for the window on the device (expert_exchange_cuda.cu).
constexpr int64_t kWindowBytes = kAlignment;

}  // namespace

RowShare share_of_rows(int64_t rows, int ranks, int rank) {
  if (ranks == 1) return {0, rows};
  const int64_t each = round_up(ceil_div(rows, ranks), kShareUnit);
  const int64_t first = std::min(rows, rank * each);
  return {first, std::min(rows - first, each)};
}

ExchangeRounds plan_exchange_rounds(int64_t all_rows, int64_t capacity, int ranks) {
  const int64_t rounds = ceil_div(all_rows, capacity);
  if (rounds <= 1) return {rounds, all_rows};
  // Each rank rounds up its share of a round by less than a row.
  return {rounds, ceil_div(all_rows, rounds) + ranks - 1};
}

int64_t room_of_exchange(int64_t capacity) { return capacity + kMostPeers - 1; }

ExpertExchangePlan plan_expert_exchange(const MoeManyRowsSizes& sizes) {
  ExpertExchangePlan plan;
  int64_t bytes = 0;
  const auto reserve = [&](int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kAlignment);
    return at;
  };
  plan.offered_at = reserve(sizeof(OfferedRows));
  plan.window_at = reserve(kWindowBytes);
  plan.slots_at =
      reserve(sizes.rows * sizes.experts_per_token * static_cast<int64_t>(sizeof(int32_t)));
  plan.moe = plan_moe_many_rows(sizes);
  plan.moe_at = reserve(plan.moe.workspace_bytes);
  plan.workspace_bytes = bytes;
  return plan;
}

MoeManyRowsPlan plan_exchange_round(const ExpertExchangePlan& plan, const MoeManyRowsSizes& sizes,
                                    int64_t rows, int64_t num_experts) {
  MoeManyRowsSizes round = sizes;
  round.rows = rows;
  round.num_experts = num_experts;
  const MoeManyRowsPlan tiles = plan_moe_many_rows(round);
  MoeManyRowsPlan moe = plan.moe;
  moe.tile_tokens = tiles.tile_tokens;
  moe.one_row_tile_an_expert = tiles.one_row_tile_an_expert;
  return moe;
}

}  // namespace fathom::cuda
