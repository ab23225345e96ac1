#include "checkpoint/inventory.h"

#include "base/math.h"
#include "checkpoint/four_bit_layout.h"
#include "tensor/scale_form.h"

namespace fathom {
namespace {

void add(GroupTotals& totals, const GroupTotals& more) {
  totals.tensors += more.tensors;
  totals.parameters += more.parameters;
  totals.bytes += more.bytes;
}

// The weights that a tensor holds: two a byte where it has codes of four bits.
int64_t elements_of(const QuantizationConfig& quantization, std::string_view name,
                    const TensorEntry& entry) {
  if (quantization.is_four_bit() && name.ends_with(four_bit_codes_suffix(quantization))) {
    return 2 * entry.bytes;
  }
  return entry.bytes / size_of(entry.dtype);
}

Inventory count(const Checkpoint& checkpoint, const LoadOptions& options) {
  Inventory inventory;
  const WeightNames names(checkpoint.config());
  for (const auto& [name, entry] : checkpoint.tensors()) {
    const auto group = names.classify(name);
    const int64_t elements = elements_of(checkpoint.config().quantization, name, entry);
    const bool counts = group && *group != WeightGroup::kScales;
    add(group ? inventory.groups[static_cast<size_t>(*group)] : inventory.unused,
        {1, counts ? elements : 0, entry.bytes});
    if (group == WeightGroup::kScales) {
      const std::string weight = name.substr(0, name.rfind('.')) + ".weight";
      if (names.classify(weight) == WeightGroup::kExperts) {
        inventory.expert_scale_bytes += entry.bytes;
      }
    }
    if (is_quantized_while_loading(checkpoint, options, names.is_linear(name), entry.dtype)) {
      GroupTotals& group_totals = inventory.groups[static_cast<size_t>(*group)];
      group_totals.bytes -= entry.bytes - elements;
      int64_t scales = 1;
      for (const int64_t size : entry.shape) scales *= ceil_div(size, kScaleBlock);
      add(inventory.groups[static_cast<size_t>(WeightGroup::kScales)], {1, 0, 4 * scales});
      if (*group == WeightGroup::kExperts) inventory.expert_scale_bytes += 4 * scales;
    }
  }
  return inventory;
}

}  // namespace

GroupTotals Inventory::total() const {
  GroupTotals sum;
  for (const GroupTotals& group : groups) add(sum, group);
  return sum;
}

int64_t Inventory::active_parameters(const ModelConfig& config) const {
  int64_t active = total().parameters - of(WeightGroup::kMtp).parameters;
  if (config.num_experts > 0) {
    const int64_t one_of_each = of(WeightGroup::kExperts).parameters / config.num_experts;
    active -= one_of_each * (config.num_experts - config.experts_per_token);
  }
  return active;
}

Inventory take_inventory(const Checkpoint& checkpoint) { return count(checkpoint, LoadOptions()); }

Inventory take_loaded_inventory(const Checkpoint& checkpoint, const LoadOptions& options) {
  Inventory inventory = count(checkpoint, options);
  if (checkpoint.config().tied_embeddings) {
    // The table of rows is kept as it is and packed once more as the head's matrix.
    inventory.groups[static_cast<size_t>(WeightGroup::kHead)].bytes +=
        inventory.of(WeightGroup::kEmbedding).bytes;
  }
  return inventory;
}

}  // namespace fathom
