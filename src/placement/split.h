// Splits of one dimension over ranks, by whole units: rank r of R has n/R + (r < n%R) of n units,
// so that ranks differ by at most one unit. The last unit of a dimension may be partial.
//
// Columns are split by whole 128-blocks, whatever the weights' format: no scale of a block-wise FP8
// matrix is shared between ranks, and activations are quantized in the same groups as on one rank.
// Only where there are fewer blocks than ranks are blocks cut, so that no rank is idle.
#pragma once

#include <cstdint>

#include "checkpoint/model_config.h"
#include "tensor/slice.h"

namespace fathom {

inline constexpr int64_t kColumnBlock = 128;  // FP8 scales: 128x128 weights, 1x128 activations

// The share of `rank` (0 to ranks - 1) in `size` elements. Units are `unit` elements each.
Slice split_units(int64_t size, int64_t unit, int ranks, int rank);

// Inner columns of a dense or shared MLP, or of each expert without expert parallelism. Units are
// blocks; with fewer blocks than ranks halves of them, with fewer halves quarters. No slice of
// several units crosses a block's border then.
Slice split_columns(int64_t columns, int ranks, int rank);

// Heads of attention. The unit is head_unit().
Slice split_heads(const ModelConfig& config, int ranks, int rank);

// Rows of embedding and LM head, by units of kVocabularyUnit where no rank is without one: a GPU's
// kernels write a rank's logits beside those of the others in whole vectors.
inline constexpr int64_t kVocabularyUnit = 8;
Slice split_vocabulary(int64_t rows, int ranks, int rank);

// Heads that stay together: the fewest whose columns of o_proj are whole blocks of a block-scaled
// checkpoint, so that activations are quantized in the same groups as on one rank. Rows of q and
// kv_b may begin inside a block of scales.
int64_t head_unit(const ModelConfig& config);

}  // namespace fathom
