#include "device/cuda/planted_fault.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string_view>

namespace fathom::cuda {
namespace {

// In the order of PlantedFault.
constexpr std::string_view kNames[] = {"none",
                                       "wrong_key",
                                       "swapped_head",
                                       "skipped_handoff",
                                       "dropped_expert",
                                       "wrong_layer_scale",
                                       "extra_row",
                                       "dropped_peer",
                                       "shared_expert_once",
                                       "hidden_neighbour",
                                       "stale_keys",
                                       "foreign_keys",
                                       "skipped_key_handoff",
                                       "half_logit",
                                       "skipped_activations",
                                       "wrong_row",
                                       "swapped_query_head",
                                       "stale_token",
                                       "skipped_launch_wait",
                                       "any_packet",
                                       "unordered_peers",
                                       "skipped_begin",
                                       "skipped_end",
                                       "wrong_owner",
                                       "skipped_meet",
                                       "wrong_peer",
                                       "unordered_experts",
                                       "dropped_list_key",
                                       "neighbour_list_key",
                                       "other_sequence",
                                       "lost_split",
                                       "batch_order",
                                       "swapped_scale",
                                       "repeated_tokens",
                                       "wrong_index_row",
                                       "wrong_index_page",
                                       "coarse_limit",
                                       "seen_hidden_key",
                                       "unbounded_queries",
                                       "rounded_reference"};
static_assert(std::size(kNames) == static_cast<size_t>(PlantedFault::kLast) + 1);

PlantedFault fault_of_environment() {
  const char* const name = std::getenv("FATHOM_PLANT");
  if (name == nullptr) return PlantedFault::kNone;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<PlantedFault>(i);
  }
  std::fprintf(stderr, "FATHOM_PLANT: no fault \"%s\"\n", name);
  std::_Exit(2);
}

}  // namespace

PlantedFault planted_fault() {
  static const PlantedFault fault = fault_of_environment();
  return fault;
}

}  // namespace fathom::cuda
