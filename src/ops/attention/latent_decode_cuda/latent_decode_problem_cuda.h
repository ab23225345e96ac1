// A batch for the tests and the benchmark of latent decode attention on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention/paged_batch.h"

namespace fathom::cuda {

// A problem's arrays on the host; pages are assigned in shuffled order.
struct LatentDecodeProblem {
  LatentDecodeProblem(int heads, std::vector<int32_t> total_lens, std::vector<int32_t> queries,
                      int64_t num_pages, uint32_t seed);

  PagedBatch batch() const { return {query_start, context_lens, block_tables, max_pages}; }
  int64_t rows() const { return int64_t{query_start.back()} * heads; }

  int heads;
  std::vector<int32_t> query_start = {0}, context_lens, block_tables, sequences;
  int32_t max_pages = 0;
};

}  // namespace fathom::cuda
