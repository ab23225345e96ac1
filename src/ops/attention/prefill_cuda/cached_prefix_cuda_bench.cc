// Gathering cached rows: time of a launch in a CUDA graph of 24 that take different memory; median
// of 11 replays.
//
//   cached_prefix_cuda_bench [--json]
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "ops/attention/prefill_cuda/cached_prefix_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope, kPageKeys = 64;
constexpr int kCopies = 24;

struct Row {
  const char* operation;
  int64_t size;
  double us, bytes;
};

Row gather(int32_t keys) {
  const int32_t pages = (keys + kPageKeys - 1) / kPageKeys;
  std::vector<int32_t> table(static_cast<size_t>(pages) * kCopies);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  const DeviceArray<uint16_t> cache(std::ssize(table) * kPageKeys * kColumns);
  const DeviceArray<uint16_t> latent(int64_t{kCopies} * keys * kLatent);
  const DeviceArray<uint16_t> k_rope(int64_t{kCopies} * keys * kRope);
  const DeviceArray<int32_t> tables(table), zero(std::vector<int32_t>{0}),
      starts(std::vector<int32_t>{0, keys});
  const double us = time_in_graph(kCopies, [&](int copy, cudaStream_t stream) {
    gather_latent({.pages = cache.data(),
                   .block_tables = tables.data() + copy * pages,
                   .max_pages = pages,
                   .sequences = zero.data(),
                   .first_keys = zero.data(),
                   .key_starts = starts.data(),
                   .num_sequences = 1,
                   .keys = keys,
                   .latent = latent.data() + copy * keys * kLatent,
                   .k_rope = k_rope.data() + copy * keys * kRope},
                  stream);
  });
  return {"gather_latent", keys, us, 2.0 * kColumns * 2 * keys};
}

int run(bool json) {
  const Row rows[] = {gather(512), gather(8192), gather(65536)};
  if (json) {
    std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
  } else {
    std::printf("%s\noperation            rows        us   GB/s  %% of 4,300\n",
                device_line().c_str());
  }
  const char* separator = "";
  for (const Row& row : rows) {
    if (json) {
      std::printf("%s\n  {\"operation\": \"%s\", \"rows\": %lld, \"us\": %.2f}", separator,
                  row.operation, static_cast<long long>(row.size), row.us);
      separator = ",";
    } else {
      std::printf("%-15s %9lld  %8.2f  %5.0f  %10.0f\n", row.operation,
                  static_cast<long long>(row.size), row.us, row.bytes / row.us / 1e3,
                  100 * row.bytes / row.us / kReadBytesPerUs);
    }
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  return fathom::cuda::run(argc > 1 && std::strcmp(argv[1], "--json") == 0);
}
