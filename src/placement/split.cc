#include "placement/split.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace fathom {
namespace {

// The fewest heads of `size` columns that fill whole blocks.
int64_t heads_of_whole_blocks(int64_t size, int64_t block) { return block / std::gcd(size, block); }

// The smallest piece of a block: as many weight rows as the CPU's kernels multiply at a time.
constexpr int64_t kLeastColumns = 32;

}  // namespace

Slice split_units(int64_t size, int64_t unit, int ranks, int rank) {
  FATHOM_CHECK(size >= 0 && unit > 0, "{} elements in units of {}", size, unit);
  FATHOM_CHECK(ranks > 0 && rank >= 0 && rank < ranks, "rank {} of {}", rank, ranks);
  const int64_t units = ceil_div(size, unit);
  const int64_t each = units / ranks;
  const int64_t left_over = units % ranks;
  const int64_t first_unit = rank * each + std::min<int64_t>(rank, left_over);
  const int64_t num_units = each + (rank < left_over ? 1 : 0);
  const int64_t first = std::min(first_unit * unit, size);
  const int64_t end = std::min((first_unit + num_units) * unit, size);
  return {first, end - first};
}

Slice split_columns(int64_t columns, int ranks, int rank) {
  int64_t unit = kColumnBlock;
  while (unit > kLeastColumns && ceil_div(columns, unit) < ranks) unit /= 2;
  return split_units(columns, unit, ranks, rank);
}

Slice split_heads(const ModelConfig& config, int ranks, int rank) {
  return split_units(config.num_heads, head_unit(config), ranks, rank);
}

Slice split_vocabulary(int64_t rows, int ranks, int rank) {
  return split_units(rows, rows >= kVocabularyUnit * ranks ? kVocabularyUnit : 1, ranks, rank);
}

int64_t head_unit(const ModelConfig& config) {
  const QuantizationConfig& quantization = config.quantization;
  if (quantization.kind != QuantizationConfig::Kind::kFp8Block) return 1;
  return heads_of_whole_blocks(config.v_dim, quantization.block_cols);
}

}  // namespace fathom
