// How evenly ranks share the routed tokens of a layer: a step waits for the rank with the most.
#pragma once

#include <span>

#include "placement/expert_table.h"

namespace fathom {

struct RankBalance {
  double mean = 0;  // load of a rank
  double max = 0;

  // mean / max, from 1 / ranks to 1. Without any load 1.
  double ratio() const { return max > 0 ? mean / max : 1; }
};

// `loads` [experts] in any unit, such as tokens; copies of an expert share its load equally.
RankBalance rank_balance(const RankLists& ranks, std::span<const double> loads);
RankBalance rank_balance(const ExpertTable& table, int64_t layer, std::span<const double> loads);

}  // namespace fathom
