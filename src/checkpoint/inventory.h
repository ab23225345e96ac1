// A checkpoint's contents by weight group, counted from the headers alone.
#pragma once

#include <array>
#include <cstdint>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/weight_names.h"

namespace fathom {

struct GroupTotals {
  int64_t tensors = 0;
  int64_t parameters = 0;  // elements, without those of scales
  int64_t bytes = 0;       // as stored
};

struct Inventory {
  std::array<GroupTotals, kNumWeightGroups> groups;  // by WeightGroup
  int64_t expert_scale_bytes = 0;                    // of kScales: what belongs to routed experts
  GroupTotals unused;                                // tensors that do not belong to such a model

  const GroupTotals& of(WeightGroup group) const { return groups[static_cast<size_t>(group)]; }

  GroupTotals total() const;  // all groups, without the unused

  // The parameters that one token's forward pass reads: all but MTP, and of the routed experts only
  // the selected ones. Embedding and head count in full, as in the published figures.
  int64_t active_parameters(const ModelConfig& config) const;
};

Inventory take_inventory(const Checkpoint& checkpoint);

// The same with the bytes that these options load: fewer if weights are quantized while loading,
// more if the embedding is the head, too.
Inventory take_loaded_inventory(const Checkpoint& checkpoint, const LoadOptions& options);

}  // namespace fathom
