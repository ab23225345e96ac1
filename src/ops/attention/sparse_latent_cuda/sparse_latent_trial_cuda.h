// Shared by the tests of sparse latent attention on a GPU: random queries, a random cache of any
// format and random lists; attention over them on the CPU and on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/cache_format.h"
#include "cache/latent_layout.h"
#include "ops/attention/latent_decode_cuda/score_certainty_cuda.h"
#include "ops/attention/sparse_row.h"

namespace fathom::cuda {

struct SparseTrialShape {
  CacheFormat format = CacheFormat::kBF16;
  int32_t heads = 128;
  int32_t top_k = 2048;
  int32_t split_keys = 2048;
  std::vector<int32_t> sequence_lens;
  // Rows by sequence and length; `row` is ignored. A length of 0 is an unused row.
  std::vector<SparseRow> rows;
  uint32_t seed = 1;
};

// What a launch gives: [rows, heads, 512] and [rows, heads].
struct SparseTrialResult {
  std::vector<uint16_t> out;
  std::vector<float> lse;

  friend bool operator==(const SparseTrialResult&, const SparseTrialResult&) = default;
};

class SparseLatentTrial {
 public:
  // The layer is the second of three, whose pages have a tail behind them; all bytes that no token
  // of the layer has are NaN. Block table entries and list entries that must not be read are beyond
  // all memory. Keys have different magnitudes, and so have each one's blocks of 128 columns.
  explicit SparseLatentTrial(const SparseTrialShape& shape);

  // Multiplies the latent values of every n-th key of each sequence.
  void scale_keys(int32_t n, float factor);
  void scale_queries(float factor);

  // Certainty of each query's scores, [rows, heads].
  std::vector<ScoreCertainty> certainties() const;

  // The rows of `which`, in that order, in one batch, launched `launches` times: expects equal bits
  // every time, and unused rows left alone.
  SparseTrialResult on_gpu(const std::vector<int32_t>& which, int launches = 1) const;
  SparseTrialResult on_gpu(int launches = 1) const;
  // A graph of the launch, captured with all rows unused and replayed over the rows.
  SparseTrialResult in_graph() const;

  // latent_decode() of each sequence's last token; row i is that of sequence i.
  std::vector<uint16_t> dense_on_gpu() const;

  // sparse_attention() over the same dequantized rows, in fp32: [rows, heads, 512].
  std::vector<float> on_cpu(std::vector<float>& lse) const;
  // The same in double precision, from the definition.
  std::vector<double> in_double(std::vector<double>& lse) const;

  int64_t rows() const { return std::ssize(shape_.rows); }
  const SparseTrialShape& shape() const { return shape_; }

 private:
  friend class SparseLatentLaunch;

  LatentLayout layout() const { return {.format = shape_.format}; }
  int64_t page_stride() const;
  // Where key `key` of a sequence lies, as a row of all pages of the layer.
  int64_t place_of(int32_t sequence, int32_t key) const;
  std::byte* row_at(int64_t place);
  void store(int64_t place, const float* values);
  int32_t count_of(int64_t row) const;
  const float* values_of(int64_t row, int32_t entry) const;
  // Scores of query `at` of [rows, heads] over its list; returns the largest sum of absolute
  // products.
  double scores_of(int64_t at, std::vector<double>& scores) const;

  SparseTrialShape shape_;
  int32_t max_pages_ = 1;
  int64_t num_pages_ = 0;
  std::vector<int32_t> tables_, keys_;
  std::vector<uint16_t> q_latent_, q_rope_;
  std::vector<std::byte> memory_;  // all layers' pages
  std::vector<float> decoded_;     // the layer's in fp32
};

// ||actual - expected|| / ||expected||; NaN where one of `actual` is.
double relative_error(std::span<const uint16_t> actual, std::span<const double> expected);

// The largest relative_error() of a query whose scores are certain.
double worst_certain_error(const SparseTrialResult& actual, const std::vector<double>& expected,
                           const std::vector<ScoreCertainty>& certainties);

// The largest relative_error() of a row that is used.
double worst_row_error(const SparseLatentTrial& trial, const SparseTrialResult& actual,
                       const std::vector<double>& expected);

}  // namespace fathom::cuda
