#include "model/model_bench_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "device/cuda/random_data.h"

namespace fathom::cuda {

DeviceArray<std::byte> random_cache(int64_t bytes) {
  DeviceArray<std::byte> cache(bytes);
  std::mt19937 random(3);
  const auto some = random_bf16(1 << 22, 1, random);
  const auto piece = static_cast<int64_t>(some.size() * sizeof(some[0]));
  for (int64_t at = 0; at < bytes; at += piece) {
    check(cudaMemcpy(cache.data() + at, some.data(),
                     static_cast<size_t>(std::min(piece, bytes - at)), cudaMemcpyHostToDevice),
          "filling the cache");
  }
  return cache;
}

int model_bench_main(int argc, char** argv, int (*run)(const Checkpoint& checkpoint, bool json)) {
  std::string path = "bench/models/v2-lite";
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else {
      path = argv[i];
    }
  }
  const auto checkpoint = Checkpoint::open_dummy(path);
  if (!checkpoint) {
    std::fprintf(stderr, "%s\n", checkpoint.error().message.c_str());
    return 2;
  }
  return run(*checkpoint, json);
}

}  // namespace fathom::cuda
