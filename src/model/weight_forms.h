// The type in which a GPU holds each matrix of a checkpoint: e4m3 with scales where the checkpoint
// has FP8, or is quantized during loading, and e4m3 GEMMs support it; otherwise bf16.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"

namespace fathom {

// Treatment of matrices stored in FP8.
enum class StoredFp8 { kKept, kExpandedToBF16 };

// A stored matrix, one of several stacked by rows.
struct MatrixPart {
  std::string name;
  int64_t rows = 0;
};

struct WeightForm {
  DType type = DType::kBF16;  // or kF8E4M3
  bool by_row = false;        // per-row scales, beside the block-wise ones
};

// Keeps references to both arguments.
class WeightForms {
 public:
  WeightForms(const Checkpoint& checkpoint, StoredFp8 stored_fp8, const LoadOptions& options)
      : checkpoint_(checkpoint), keep_fp8_(stored_fp8 == StoredFp8::kKept), options_(options) {}

  // The form of matrices stacked by rows: e4m3 if all are, and each begins a block of 128x128 and
  // ends one in its columns.
  WeightForm matrix(const std::vector<MatrixPart>& parts, int64_t cols) const;

  // The form of kv_b_proj's halves, W_UK transposed: each head's must be whole blocks.
  WeightForm kv_b_halves(const MatrixPart& kv_b, int64_t latent, int64_t nope, int64_t v) const;

  // The form of `count` SwiGLU blocks, block i's tensors under prefix_of(i): all or none. Their
  // intermediate width can be padded, and per-row scales become block scales.
  using PrefixOf = std::function<std::string(int64_t)>;
  WeightForm mlps(const PrefixOf& prefix_of, int64_t count, int64_t hidden) const;

 private:
  bool is_e4m3(const std::string& name) const;
  bool is_scaled_by_row(const MatrixPart& part, int64_t cols) const;

  const Checkpoint& checkpoint_;
  const bool keep_fp8_;
  const LoadOptions& options_;
};

}  // namespace fathom
