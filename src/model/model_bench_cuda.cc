#include "model/model_bench_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cache/latent_row.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {

DeviceArray<std::byte> random_cache(const LatentLayout& layout, int64_t pages) {
  constexpr int64_t kDifferent = 257;
  std::mt19937 random(3);
  const int64_t rows = std::min(kDifferent, pages) * kPageSize;
  const std::vector<float> latent = random_f32(rows * layout.latent_dim, 1, random),
                           rope = random_f32(rows * layout.rope_dim, 1, random);
  std::vector<std::byte> some(static_cast<size_t>(rows * layout.row_bytes()));
  for (int64_t row = 0; row < rows; ++row) {
    encode_row(layout, latent.data() + row * layout.latent_dim, rope.data() + row * layout.rope_dim,
               some.data() + row * layout.row_bytes());
  }
  DeviceArray<std::byte> cache(pages * layout.page_bytes());
  const auto piece = std::ssize(some);
  for (int64_t at = 0; at < cache.size(); at += piece) {
    check(
        cudaMemcpy(cache.data() + at, some.data(),
                   static_cast<size_t>(std::min(piece, cache.size() - at)), cudaMemcpyHostToDevice),
        "filling the cache");
  }
  return cache;
}

int model_bench_main(int argc, char** argv, std::string model,
                     int (*run)(const Checkpoint& checkpoint, bool json)) {
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else {
      model = argv[i];
    }
  }
  const auto checkpoint = Checkpoint::open_dummy(model);
  if (!checkpoint) {
    std::fprintf(stderr, "%s\n", checkpoint.error().message.c_str());
    return 2;
  }
  return run(*checkpoint, json);
}

}  // namespace fathom::cuda
