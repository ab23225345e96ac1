// What the tests of latent decode attention on a GPU share: random queries and a random cache of
// any format, attention over them on the CPU in fp32 and on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cache_format.h"
#include "ops/attention/latent_decode_problem_cuda.h"

namespace fathom::cuda {

class LatentDecodeTrial {
 public:
  // Pages are just enough and shuffled; what holds no token is NaN. Keys are of different sizes,
  // and so are each one's blocks of 128 columns.
  LatentDecodeTrial(CacheFormat format, int heads, const std::vector<int32_t>& total_lens,
                    const std::vector<int32_t>& queries);

  void scale_queries(float factor);

  // absorbed_attention() over the same rows, decoded.
  std::vector<float> on_cpu();

  // Launches `launches` times over one scratch memory. Expects equal bits of all of them, and the
  // scratch memory left as it was.
  std::vector<float> on_gpu(int launches) const;

  // The GPU's relative error, ||gpu - cpu|| / ||cpu||; NaN where the GPU wrote one.
  double error(int launches);

 private:
  CacheFormat format_;
  LatentDecodeProblem problem_;
  std::vector<uint16_t> q_latent_, q_rope_;
  std::vector<std::byte> pages_;
  std::vector<float> decoded_;  // the pages in fp32
};

}  // namespace fathom::cuda
