// Expert table: on which ranks each routed expert of each layer is, and in which slots.
//
// A slot is a place for one expert's weights of one layer on one rank; a rank's slots count from 0.
// An expert has one copy or more. Copies hold equal weights, and a token's expert outputs are
// combined in the order of its top-k list, so answers do not depend on which copy computes it.
// Layers are those with routed experts, counted from 0 in the model's order (num_moe_layers()).
//
// A table is immutable and may be read by any number of threads. It moves no weights.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "placement/placement.h"

namespace fathom {

struct ExpertCopy {
  int32_t rank = 0;
  int32_t slot = 0;

  friend bool operator==(const ExpertCopy&, const ExpertCopy&) = default;
};

// [rank] the experts in its slots, in order: one layer.
using RankLists = std::vector<std::vector<int32_t>>;
using ExpertLists = std::vector<RankLists>;  // [layer]

class ExpertTable {
 public:
  // A table of lists that come from a file, a user or a plan. `where` begins every error. Refused:
  // an expert that does not exist or has no copy, layers whose ranks differ in number, and sizes
  // above the limits below. Ranks may differ in slots; one without any is allowed.
  static Result<ExpertTable> create(int64_t num_experts, int num_ranks, const ExpertLists& lists,
                                    std::string_view where);

  // Consecutive experts by rank, the first num_experts % num_ranks ranks with one more; ranks have
  // equal numbers of slots, or the first ones one more. What a rank's slots have left holds copies
  // of the experts that follow its own. The same in every layer. Sizes as check_placement() allows.
  static ExpertTable contiguous(int64_t num_layers, int64_t num_experts, int num_ranks,
                                int64_t redundant_experts = 0);

  // The same for a model's layers without MTP ones.
  static ExpertTable contiguous(const ModelConfig& config, const Placement& placement);

  int64_t num_layers() const { return num_layers_; }
  int64_t num_experts() const { return num_experts_; }
  int num_ranks() const { return num_ranks_; }

  // The experts in a rank's slots, in order.
  std::span<const int32_t> experts_of(int64_t layer, int rank) const;

  // The copies of an expert, ascending by rank, then slot. At least one.
  std::span<const ExpertCopy> copies_of(int64_t layer, int64_t expert) const;

  // The copy that computes `row` of the batch of the token's home rank: a pure function, so that
  // runs repeat. Copies are taken in turn, one row after the other. The rank is added so that small
  // batches of several ranks do not meet on one copy, the expert so that experts of one token do
  // not all take their first copies.
  ExpertCopy copy_for(int64_t layer, int64_t expert, int home_rank, int64_t row) const;

  // The largest number of slots that a rank needs in a layer: what to allocate on each rank.
  int64_t max_slots() const;

  ExpertLists lists() const;
  RankLists lists_of(int64_t layer) const;

  // A hash of where every expert is: equal in all processes that have equal tables.
  uint64_t fingerprint() const { return fingerprint_; }

  friend bool operator==(const ExpertTable&, const ExpertTable&) = default;

 private:
  ExpertTable(int64_t num_experts, int num_ranks, const ExpertLists& checked);

  int64_t num_layers_ = 0, num_experts_ = 0;
  int num_ranks_ = 0;
  std::vector<int32_t> experts_;     // all slots, by layer and rank
  std::vector<int64_t> rank_begin_;  // [layers * ranks + 1] into experts_
  std::vector<ExpertCopy> copies_;   // all slots, by layer and expert
  std::vector<int64_t> copy_begin_;  // [layers * experts + 1] into copies_
  uint64_t fingerprint_ = 0;
};

// Limits of a table; create() names the one that is exceeded.
inline constexpr int64_t kMaxTableLayers = 1032;      // config.json's 1024, and 8 of MTP
inline constexpr int64_t kMaxTableExperts = 1 << 14;  // as n_routed_experts
inline constexpr int kMaxTableRanks = 1024;
inline constexpr int64_t kMaxTableSlots = 1 << 22;  // all layers and ranks

// Refuses a table that is not for this model and placement: other layers, experts or ranks, or a
// rank with more slots than an equal share of experts and redundant copies.
Result<> check_expert_table(const ExpertTable& table, const ModelConfig& config,
                            const Placement& placement, bool with_mtp);

}  // namespace fathom
