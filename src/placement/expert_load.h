// Expert load: how many tokens each expert of each layer got in the last steps.
//
// The window is the last `panes` panes of `steps_per_pane` steps each, the pane that is being
// filled among them: a routed token costs one addition, and the window slides once a pane. With one
// step a pane it slides with every step.
//
// Owned and called by one thread, without locks. Another thread gets a snapshot(), which is plain
// data. Memory: 8 bytes * layers * experts * (panes + 1).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement/expert_table.h"
#include "placement/rank_balance.h"

namespace fathom {

// For metrics, of the tokens in the window. Balances are mean / max over ranks (RankBalance).
struct ExpertLoadSnapshot {
  int64_t steps = 0;           // ended steps in the window
  int64_t routed_tokens = 0;   // all layers; a token counts once for each of its experts
  double balance = 1;          // sum of layers' means / sum of their maxima: every layer waits
  double worst_balance = 1;    // the layer with the lowest mean / max
  int64_t worst_layer = 0;     // the first such layer
  double heaviest_expert = 0;  // the largest share that an expert has of its layer's tokens
};

class ExpertLoad {
 public:
  ExpertLoad(int64_t num_layers, int64_t num_experts, int64_t panes, int64_t steps_per_pane);

  // Counts tokens routed to an expert in the current step. Hot: indices are not checked.
  void add(int64_t layer, int64_t expert, int64_t tokens = 1) {
    counts_[static_cast<size_t>(pane_begin_ + layer * num_experts_ + expert)] += tokens;
  }

  // Ends the current step. A step without tokens counts as well.
  void end_step();

  // Tokens in the window, [layers * experts]: what balance_experts() takes.
  std::vector<double> loads() const;

  // What `table` makes of the window's tokens. The table need not be the one in use.
  RankBalance balance(const ExpertTable& table, int64_t layer) const;
  ExpertLoadSnapshot snapshot(const ExpertTable& table) const;

 private:
  int64_t tokens(int64_t layer, int64_t expert) const;
  std::vector<double> loads_of(int64_t layer) const;

  int64_t num_layers_ = 0, num_experts_ = 0;
  int64_t panes_ = 0, steps_per_pane_ = 0;
  std::vector<int64_t> counts_;  // [panes][layers][experts]
  std::vector<int64_t> closed_;  // [layers][experts], the sums of all panes but the current one
  int64_t pane_begin_ = 0;       // the current pane in counts_
  int64_t closed_panes_ = 0;     // of the window, at most panes_ - 1
  int64_t steps_in_pane_ = 0;    // ended steps in the current pane
};

}  // namespace fathom
