// The memory budget, computed before a weight is read: weights, workspace, and as many pages of the
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

// One line per group that has tensors, with their stored bytes. MTP weights only if they are
// loaded.
std::vector<MemoryLine> weight_lines(const Inventory& inventory, bool with_mtp);

// What the largest of several ranks of a process has of it, besides its cache.
struct RankMemory {
  int ranks = 1;
  int64_t weights = 0;  // shared with ranks of other lanes
  int64_t working_space = 0;
};

struct MemoryRequest {
  int64_t budget = 0;             // total bytes; see available_memory()
  std::vector<MemoryLine> fixed;  // weights, workspace
  RankMemory rank;                // contained in the fixed lines
  int64_t cache_row_bytes = 0;    // latents, per token and layer, by the cache format; of all ranks
  int64_t cache_layers = 0;
  int64_t index_key_bytes = 0;  // the same of index keys; 0 without an indexer
  int64_t index_key_layers = 0;
  int64_t cache_state_bytes = 0;  // of a page, behind its layers
  int64_t page_tokens = 64;
  int64_t max_total_tokens = 0;  // --max-total-tokens; 0: as many as fit
};

struct MemoryPlan {
  MemoryRequest request;
  int64_t fixed_bytes = 0;
  int64_t bytes_per_token = 0;  // cache, all layers
  int64_t index_key_bytes_per_token() const {
    return request.index_key_bytes * request.index_key_layers;
  }
  int64_t pages_that_fit = 0;  // besides the fixed lines
  int64_t pages = 0;           // that will be allocated

  int64_t tokens() const { return pages * request.page_tokens; }
  int64_t cache_bytes() const { return tokens() * bytes_per_token; }
};

// Plans the memory. kResourceExhausted, naming the sizes and the flags, if it does not fit.
Result<MemoryPlan> plan_memory(const MemoryRequest& request);

// The plan as a table of text lines, with amounts in GiB.
std::string memory_plan_table(const MemoryPlan& plan);

struct AvailableMemory {
  // The bytes that this process can still allocate: the machine's MemAvailable, or the rest of the
  // control group's limit if that is less.
  int64_t bytes = 0;
  // Names whose memory that is, equal in processes that share it: the machine, or a control group
  // of it.
  std::string pool;
};
AvailableMemory available_memory();

}  // namespace fathom
