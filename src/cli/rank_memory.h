// What the CPU ranks of this process take of the machine's memory.
#pragma once

#include <utility>

#include "checkpoint/memory_plan.h"
#include "engine/model_runner.h"

namespace fathom {

// First local rank and number of local ranks.
std::pair<int, int> ranks_here(const ModelRunnerOptions& options);

// The memory that the ranks here may use, and the part of it that is not for the cache. Nodes that
// share a machine's memory share it by their ranks.
Result<MemoryRequest> rank_memory(const Checkpoint& checkpoint, const AvailableMemory& available,
                                  int num_threads, const ModelRunnerOptions& options);

}  // namespace fathom
