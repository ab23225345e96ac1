// The experts on a runner's ranks, for whoever decides where experts are.
//
// The engine's thread only, between two steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "placement/expert_table.h"

namespace fathom {

class ExpertRanks {
 public:
  virtual ~ExpertRanks() = default;

  // Where the experts of all ranks are, those of other processes too.
  virtual const std::shared_ptr<const ExpertTable>& expert_table() const = 0;
  // Tokens that the runner's own ranks routed to each expert in the last step: [layers * experts].
  virtual std::span<const int32_t> expert_counts() = 0;
  // From the next step on, experts are where `table` says. Refuses one for other sizes or with more
  // slots than ranks have. Reads what no rank here has yet; an error leaves all as it was.
  virtual Result<> place_experts(std::shared_ptr<const ExpertTable> table) = 0;
};

}  // namespace fathom
