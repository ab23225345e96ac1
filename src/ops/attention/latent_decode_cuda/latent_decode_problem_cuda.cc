#include "ops/attention/latent_decode_cuda/latent_decode_problem_cuda.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace fathom::cuda {

LatentDecodeProblem::LatentDecodeProblem(int num_heads, std::vector<int32_t> total_lens,
                                         std::vector<int32_t> queries, int64_t num_pages,
                                         uint32_t seed)
    : heads(num_heads) {
  for (const int32_t total : total_lens) max_pages = std::max(max_pages, (total + 63) / 64);
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
  size_t next = 0;
  for (size_t s = 0; s < total_lens.size(); ++s) {
    sequences.push_back(static_cast<int32_t>(s));
    query_start.push_back(query_start.back() + queries[s]);
    context_lens.push_back(total_lens[s] - queries[s]);
    for (int32_t page = 0; page < max_pages; ++page) {
      // Entries beyond a sequence's end must not be read.
      block_tables.push_back(page < (total_lens[s] + 63) / 64 ? pages[next++ % pages.size()]
                                                              : 2147480000);
    }
  }
}

}  // namespace fathom::cuda
