// Memory budget, decided before a weight is read: weights, workspace, and as many pages of the
// latent cache as the rest holds. A model that does not fit is refused here, with the flag that
// would make it fit, instead of being killed by the kernel later.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/inventory.h"

namespace fathom {

struct MemoryLine {
  std::string what;
  int64_t bytes = 0;
};

// One line a group that has tensors, as stored; MTP weights only if they are to be loaded.
std::vector<MemoryLine> weight_lines(const Inventory& inventory, bool with_mtp);

struct MemoryRequest {
  int64_t budget = 0;             // bytes in all; see available_memory()
  std::vector<MemoryLine> fixed;  // weights, working space
  int64_t cache_row_bytes = 0;    // a token and layer, by the cache format
  int64_t cache_layers = 0;
  int64_t page_tokens = 64;
  int64_t max_total_tokens = 0;  // --max-total-tokens; 0: as many as fit
};

struct MemoryPlan {
  MemoryRequest request;
  int64_t fixed_bytes = 0;
  int64_t bytes_per_token = 0;  // cache, all layers
  int64_t pages_that_fit = 0;   // beside the fixed lines
  int64_t pages = 0;            // those that will be used

  int64_t tokens() const { return pages * request.page_tokens; }
  int64_t cache_bytes() const { return tokens() * bytes_per_token; }
};

// kResourceExhausted, naming the sizes and the flags, if it does not fit.
Result<MemoryPlan> plan_memory(const MemoryRequest& request);

// The plan as lines of text with amounts in GiB, each line ended.
std::string memory_plan_table(const MemoryPlan& plan);

// Bytes that this process could still take: the machine's MemAvailable, or what the control group
// has left where that is less.
int64_t available_memory();

}  // namespace fathom
