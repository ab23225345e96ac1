#include "ops/attention/latent_decode_problem_cuda.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace fathom::cuda {

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

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
      // Beyond a sequence's end nobody may look.
      block_tables.push_back(page < (total_lens[s] + 63) / 64 ? pages[next++ % pages.size()]
                                                              : 2147480000);
    }
  }
}

std::vector<uint16_t> random_bf16(int64_t count, float deviation, std::mt19937& random) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    // The sum of four bytes: cheap, and near enough to normal.
    const uint32_t bits = static_cast<uint32_t>(random());
    const auto sum =
        static_cast<float>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24)) /
        255.0f;
    value = bf16_bits((sum - 2.0f) * 1.7f * deviation);
  }
  return values;
}

}  // namespace fathom::cuda
