// Splits of one dimension over ranks, by whole units: rank r of R has n/R + (r < n%R) of n units,
// so that ranks differ by at most one unit. The last unit of a dimension may be partial.
//
// Columns are split by whole 128-blocks, whatever the weights' format: no scale of a block-wise FP8
// matrix is shared between ranks, and activations are quantized in the same groups as on one rank.
#pragma once

#include <cstdint>

#include "checkpoint/model_config.h"

namespace fathom {

inline constexpr int64_t kColumnBlock = 128;  // FP8 scales: 128x128 weights, 1x128 activations

// Consecutive elements of a dimension; count 0 is a rank that has none of them.
struct Slice {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  friend bool operator==(const Slice&, const Slice&) = default;
};

// The share of `rank` (0 to ranks - 1) in `size` elements. Units are `unit` elements each.
Slice split_units(int64_t size, int64_t unit, int ranks, int rank);

// Inner columns of a dense or shared MLP, or of each expert without expert parallelism.
Slice split_columns(int64_t columns, int ranks, int rank);

// Heads of attention. The unit is head_unit().
Slice split_heads(const ModelConfig& config, int ranks, int rank);

// Rows of embedding and LM head, which are not block-scaled: any size.
Slice split_vocabulary(int64_t rows, int ranks, int rank);

// Heads that stay together: the fewest whose rows of q and kv_b and columns of o_proj are whole
// blocks of a block-scaled checkpoint (2 for heads of 192 rows), 1 for all others.
int64_t head_unit(const ModelConfig& config);

}  // namespace fathom
