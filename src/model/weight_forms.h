// The type in which a GPU holds each matrix of a checkpoint: e4m3 with scales where the checkpoint
// has FP8, or is quantized during loading, and e4m3 GEMMs support it; four bits where routed
// experts have them; otherwise bf16. The type chooses the operation: linear() or scaled_linear(),
// scaled_absorb(), moe(), scaled_moe() or four_bit_moe().
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "model/model_spec.h"
#include "tensor/four_bit.h"

namespace fathom {

// Treatment of matrices stored in FP8.
enum class StoredFp8 { kKept, kExpandedToBF16 };

struct WeightForm {
  DType type = DType::kBF16;  // or kF8E4M3
  bool by_row = false;        // per-row scales, beside the block-wise ones

  friend bool operator==(const WeightForm&, const WeightForm&) = default;
};

// Matrices stacked by rows, all with the same columns.
using StackedParts = std::initializer_list<const TensorPart*>;

// The forms of a checkpoint's matrices. Keeps references to both arguments.
class WeightForms {
 public:
  WeightForms(const Checkpoint& checkpoint, StoredFp8 stored_fp8, const LoadOptions& options)
      : checkpoint_(checkpoint), keep_fp8_(stored_fp8 == StoredFp8::kKept), options_(options) {}

  // e4m3 if all parts are, and each begins a block of 128x128 and ends one in its columns: in the
  // stored matrix, whose scales it keeps, and among the stacked ones.
  WeightForm matrix(StackedParts parts) const;

  // The form of kv_b_proj's halves, W_UK transposed: each head's must be a scale block, as
  // scaled_absorb() takes them.
  WeightForm kv_b_halves(const TensorPart& kv_b, int64_t nope, int64_t v) const;

  // The form of SwiGLU blocks: all or none. Their intermediate width can be padded, and per-row
  // scales become block scales.
  DType mlps(std::span<const MlpSpec> blocks) const;

  // The codes of SwiGLU blocks that stay in four bits: all or none. Their scales are bf16, of
  // multiples of 32 columns, and there are no zero points. Others are dequantized.
  std::optional<FourBitCode> four_bit(std::span<const MlpSpec> blocks) const;
  bool is_four_bit(const TensorPart& part) const;  // as stored

  // bf16 if the matrix is stored so, otherwise f32.
  DType router(const TensorPart& part) const;

 private:
  bool is_e4m3(const TensorPart& part) const;
  bool is_scaled_by_row(const TensorPart& part) const;

  const Checkpoint& checkpoint_;
  const bool keep_fp8_;
  const LoadOptions& options_;
};

// The forms of one layer's weights; of attention's, and of the feed-forward block.
struct LayerForms {
  WeightForm q_kv_a;       // q_a or q_proj, an indexer's wk, and kv_a
  WeightForm q_b;          // with query compression
  WeightForm kv_b;         // for multi-head attention
  WeightForm kv_b_halves;  // for absorbed attention
  WeightForm o;
  DType mlps = DType::kBF16;       // of all blocks: one launch takes routed and shared experts
  DType router = DType::kF32;      // of a MoE layer; bf16 takes a third of the instructions
  WeightForm index_q = {};         // with an indexer
  WeightForm mtp_projection = {};  // of the MTP layer: eh_proj
  // The routed experts' codes, if they stay in four bits; the shared one is of `mlps` then.
  std::optional<FourBitCode> four_bit_experts = {};
  bool dequantizes_four_bits = false;  // some of its matrices, to bf16

  friend bool operator==(const LayerForms&, const LayerForms&) = default;
};

// Forms of each layer, the MTP layer's last.
std::vector<LayerForms> layer_forms(const ModelSpec& spec, const WeightForms& forms);

}  // namespace fathom
