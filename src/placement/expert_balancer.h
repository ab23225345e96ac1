// Counts experts' tokens and says when experts should move, and where to.
//
// Every rebalance_steps steps it plans each layer anew from the window's tokens, by EPLB's global
// policy. A layer moves only where its balance gets better by kLeastGain, so that evenly loaded
// experts stay where they are. Tables depend on the counts alone.
//
// Owned and called by one thread; any thread may ask for stats().
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "placement/expert_load.h"
#include "placement/expert_table.h"

namespace fathom {

struct ExpertBalancerOptions {
  bool rebalances = false;
  int64_t rebalance_steps = 1000;  // >= 1: steps between two plans, and those that a plan looks at
  // Layers that move between two steps; 0: all that the plan moves. Where a moved expert's weights
  // have to be read, it bounds the pause and the memory for them.
  int64_t layers_a_step = 0;
};

// For metrics and reports.
struct ExpertStats {
  int ranks = 0;
  int64_t experts = 0;                       // of a layer
  ExpertLoadSnapshot window;                 // of the last rebalance_steps steps
  std::vector<double> layer_balance;         // [layers] mean / max over ranks, of the same steps
  std::vector<int64_t> tokens;               // [layers * experts] since the start
  int64_t moves = 0;                         // plans that moved an expert
  std::shared_ptr<const ExpertTable> table;  // where the experts are
};

class ExpertBalancer {
 public:
  // A layer's mean / max over ranks gets better by at least this factor, or nothing moves.
  static constexpr double kLeastGain = 1.02;

  // Ranks have room for as many slots as their largest share of the table's experts and
  // `redundant_experts` copies.
  ExpertBalancer(std::shared_ptr<const ExpertTable> table, int64_t redundant_experts,
                 const ExpertBalancerOptions& options);

  // Adds the tokens of one rank in the current step: [layers * experts].
  void count(std::span<const int32_t> tokens);

  // Ends the current step. Returns the table that the next step uses, if it is another one than
  // table(), which it becomes; null: experts stay. There is no new plan while layers of the last
  // one have yet to move.
  std::shared_ptr<const ExpertTable> end_step();

  const std::shared_ptr<const ExpertTable>& table() const { return table_; }
  ExpertStats stats() const;

 private:
  std::shared_ptr<const ExpertTable> plan() const;
  std::shared_ptr<const ExpertTable> next_towards_target();

  mutable std::mutex mutex_;                   // guards what follows
  std::shared_ptr<const ExpertTable> table_;   // written by the owner alone
  std::shared_ptr<const ExpertTable> target_;  // of the last plan
  const int64_t replicas_;                     // slots of all ranks
  const ExpertBalancerOptions options_;
  ExpertLoad load_;
  std::vector<int64_t> tokens_;  // [layers * experts] since the start
  int64_t steps_ = 0;            // since the last plan
  int64_t moves_ = 0;
};

}  // namespace fathom
