// Shared by the tests of latent decode attention on a GPU: random queries and a random cache of any
// format, attention over them on the CPU in fp32 and on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/cache_format.h"
#include "ops/attention/latent_decode_cuda/latent_decode_problem_cuda.h"
#include "ops/attention/latent_decode_cuda/score_certainty_cuda.h"

namespace fathom::cuda {

class LatentDecodeTrial {
 public:
  // The cache has just enough pages, shuffled; bytes without a token are NaN. Keys have different
  // magnitudes, and so have each one's blocks of 128 columns.
  LatentDecodeTrial(CacheFormat format, int heads, const std::vector<int32_t>& total_lens,
                    const std::vector<int32_t>& queries);

  void scale_queries(float factor);
  void scale_latents(float factor);

  // Gives key k of each sequence latent values whose largest scale is scales[k % size]. No query
  // sees keys with scales from `hidden_from` on: their rotary scores are far below all others.
  void scale_keys(const std::vector<float>& scales, float hidden_from);

  // absorbed_attention() over the same dequantized rows.
  std::vector<float> on_cpu();
  // Reference in double precision, from the definition.
  std::vector<double> in_double() const;

  // Launches `launches` times over one scratch memory. Expects bitwise identical results and
  // unchanged scratch memory.
  std::vector<float> on_gpu(int launches) const;

  // The GPU's relative error, ||gpu - cpu|| / ||cpu||; NaN where the GPU wrote one.
  double error(int launches);
  // The GPU's relative error against in_double().
  double error_to_double(int launches) const;
  // The largest such error of a query whose scores are certain; NaN where the GPU wrote one.
  // Adds to the numbers of these queries and of all.
  double worst_certain_error(int64_t& certain, int64_t& all) const;

 private:
  // Query `row` of problem_.rows(): its values in double precision over its sequence's keys.
  struct Softmax {
    std::vector<double> out;
    ScoreCertainty certainty;
  };
  Softmax softmax_of(int32_t sequence, int64_t row) const;
  int32_t sequence_of(int64_t row) const;

  CacheFormat format_;
  LatentDecodeProblem problem_;
  std::vector<uint16_t> q_latent_, q_rope_;
  std::vector<std::byte> pages_;
  std::vector<float> decoded_;  // the pages in fp32
};

}  // namespace fathom::cuda
