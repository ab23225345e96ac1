// Placement: how many ranks there are and what each of them is. Plain data; the splits that follow
// from it are in split.h, the experts' ranks in expert_table.h.
//
// The world has tp * dp ranks. A lane is one attention group: `tp` consecutive ranks that share
// heads, dense columns and vocabulary, with sequences and a cache of their own. With expert
// parallelism whole routed experts are spread over the world; without it every lane has all of
// them, by columns of each over its ranks.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "checkpoint/model_config.h"

namespace fathom {

// One leader plans for at most this many ranks; beyond that several engines stand behind a router.
inline constexpr int kMaxRanks = 64;

struct Placement {
  int tp = 1;                     // ranks of a lane
  int dp = 1;                     // lanes
  bool expert_parallel = false;   // whole experts by rank
  int64_t redundant_experts = 0;  // a layer's expert copies beyond one of each, over the world

  int world() const { return tp * dp; }
  // Whether tokens go to the ranks of their experts. One rank has all experts.
  bool exchanges_tokens() const { return expert_parallel && world() > 1; }
  int lane_of(int rank) const { return rank / tp; }
  int tp_rank_of(int rank) const { return rank % tp; }
  int rank_of(int lane, int tp_rank) const { return lane * tp + tp_rank; }
};

// Refuses a placement that does not fit the model; the sentence names field, value and limit. A
// rank without heads or without an expert's slot is refused: it would hold a cache, or wait at
// every layer, for nothing. Ranks without columns of a matrix are fine: zeros add nothing.
Result<> check_placement(const Placement& placement, const ModelConfig& config);

// Layers with routed experts, in the model's order. `with_mtp` counts the MTP layers behind them.
int64_t num_moe_layers(const ModelConfig& config, bool with_mtp);

}  // namespace fathom
