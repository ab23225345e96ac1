#include "ops/linear/panel_product.h"

#include <algorithm>
#include <cstring>

#include "base/math.h"
#include "ops/linear/panel_layout.h"

namespace fathom {
namespace {

// Columns [column, column + count) of the rows, zero up to 128: dense, so that rows whose stride is
// a multiple of 4 KiB do not fall into the same cache sets. `columns`: the order of the weight's
// columns, or null.
template <typename T>
void gather_block(const ProductRows& x, int64_t rows, int64_t column, int64_t count,
                  const int32_t* columns, T* out) {
  const bool same_type = x.x.dtype() == kDTypeOf<T>;
  for (int64_t r = 0; r < rows; ++r, out += kBlockColumns) {
    if (columns != nullptr) {
      for (int64_t k = 0; k < count; ++k) out[k] = x.value<T>(r, columns[column + k]);
      if (count < kBlockColumns) std::fill(out + count, out + kBlockColumns, T{});
      continue;
    }
    const std::byte* row = x.row(r) + column * size_of(x.x.dtype());
    if (same_type) {
      std::memcpy(out, row, static_cast<size_t>(count) * sizeof(T));
    } else if constexpr (std::is_same_v<T, float>) {
      for (int64_t k = 0; k < count; ++k) {
        bf16 value;
        std::memcpy(&value, row + k * 2, sizeof value);
        out[k] = to_float(value);
      }
    }
    if (count < kBlockColumns) std::fill(out + count, out + kBlockColumns, T{});
  }
}

// A pair and what follows it in its group, from `block` on.
PackedBlocks packed_blocks(const PackedMatrix& weight, const PanelLayout& layout, int64_t pair,
                           int64_t block) {
  const int64_t in_group = layout.pairs_of_group(pair);
  return {.data = weight.data() + layout.block_offset(pair, block),
          .step_stride = layout.step_stride(in_group),
          .block_stride = layout.block_stride(in_group),
          .scales_shift = pair % 2 * (kPairRows * 4 - layout.step_bytes()),
          .columns = weight.cols() - block * kBlockColumns,
          .rare_steps = weight.rare_steps(pair / 2, block)};
}

// A pair's first block in four bits, and what follows it in its group.
FourBitBlocks four_bit_blocks(const PackedMatrix& weight, const PanelLayout& layout, int64_t pair) {
  FourBitBlocks blocks;
  blocks.packed = packed_blocks(weight, layout, pair, 0);
  blocks.packed.scales_shift = pair % 2 * (layout.scale_bytes() - layout.step_bytes());
  blocks.block_columns = layout.block_columns();
  blocks.scale_bytes = layout.scale_bytes();
  blocks.table = &four_bit_table(weight.form().code, weight.form().zeros);
  blocks.bf16_scales = weight.form().scales == DType::kBF16;
  blocks.zeros = weight.form().zeros;
  return blocks;
}

// Group by group, the rows in passes of up to four: the first pass brings the group's weights into
// L2 (64 rows x 2,048 columns of bf16 are 256 KiB), and the others hit there.
void multiply_few_rows(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                       const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs,
                       float* sums) {
  const PanelLayout layout(weight);
  const bool four_bit = weight.format() == WeightFormat::kFourBit;
  const bool fp8 = weight.format() == WeightFormat::kF8E4M3;
  const auto dot = fp8 ? kernels.dot_fp8 : kernels.dot_bf16;
  const uint16_t* pointers[kFewRows];
  for (int64_t r = 0; r < rows; ++r) pointers[r] = reinterpret_cast<const uint16_t*>(x.row(r));
  const int64_t passes = ceil_div(rows, kMaxDotRows);
  for (int64_t pair = first_pair; pair < first_pair + num_pairs;) {
    const int64_t pairs = layout.rest_of_group(pair, first_pair + num_pairs);
    FourBitBlocks blocks;
    if (four_bit) {
      blocks = four_bit_blocks(weight, layout, pair);
    } else {
      blocks.packed = packed_blocks(weight, layout, pair, 0);
    }
    float* const group_sums = sums + (pair - first_pair) * rows * kPairRows;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t begin = rows * pass / passes;
      const int64_t end = rows * (pass + 1) / passes;
      const auto count = static_cast<int>(end - begin);
      float* const pass_sums = group_sums + begin * kPairRows;
      if (four_bit) {
        kernels.dot_four_bit(pointers + begin, count, blocks, static_cast<int>(pairs), pass_sums,
                             rows * kPairRows);
      } else {
        dot(pointers + begin, count, blocks.packed, static_cast<int>(pairs), pass_sums,
            rows * kPairRows);
      }
    }
    pair += pairs;
  }
}

// Multiplies one block of columns of several pairs; x_block is the rows' block, bf16 or fp32.
class BlockProduct {
 public:
  BlockProduct(const LinearKernels& kernels, const PackedMatrix& weight, bool bf16_dot)
      : kernels_(kernels), weight_(weight), layout_(weight), bf16_dot_(bf16_dot) {}

  // `block` counts 128 columns, which are several blocks of four-bit weights with narrow groups.
  void multiply(const void* x_block, int64_t rows, int64_t pair, int64_t block, float* sums) {
    const int64_t parts = kBlockColumns / layout_.block_columns();
    const int64_t x_bytes = layout_.block_columns() * (bf16_dot_ ? 2 : 4);
    const int64_t last = std::min((block + 1) * parts, layout_.num_blocks());
    for (int64_t part = block * parts; part < last; ++part) {
      multiply_part(static_cast<const std::byte*>(x_block) + part % parts * x_bytes, rows, pair,
                    part, sums);
    }
  }

 private:
  void multiply_part(const void* x_block, int64_t rows, int64_t pair, int64_t block, float* sums) {
    const int64_t in_group = layout_.pairs_of_group(pair);
    const std::byte* packed = weight_.data() + layout_.block_offset(pair, block);
    const int64_t packed_stride = layout_.step_stride(in_group);
    const int packed_steps = static_cast<int>(layout_.steps_of_block(block));
    const float* const scales = scales_of(pair, block);
    if (!bf16_dot_ &&
        multiply_packed(static_cast<const float*>(x_block), rows, pair, block, scales, sums)) {
      return;
    }
    const Steps steps = expand(packed, packed_stride, packed_steps, zeros_of(pair, block));

    // The first tile prefetches the same pair's next block; the others prefetch nothing.
    const std::byte* ahead = packed + layout_.block_stride(in_group);
    int64_t ahead_stride = packed_stride;
    const int64_t tiles = ceil_div(rows, kernels_.tile_rows);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles;
      const int count = static_cast<int>(rows * (t + 1) / tiles - begin);
      if (bf16_dot_) {
        kernels_.tile_bf16(static_cast<const uint16_t*>(x_block) + begin * kBlockColumns, count,
                           steps.data, steps.stride, steps.count, scales, sums + begin * kPairRows,
                           ahead, ahead_stride);
      } else {
        kernels_.tile_f32(static_cast<const float*>(x_block) + begin * kBlockColumns, count,
                          steps.data, steps.stride, steps.count, scales, sums + begin * kPairRows,
                          ahead, ahead_stride);
      }
      ahead = steps.data;
      ahead_stride = 0;
    }
  }

  // Few rows of fp32 by the kernels that need no upconverted copy. Returns false where there are
  // none.
  bool multiply_packed(const float* x_block, int64_t rows, int64_t pair, int64_t block,
                       const float* scales, float* sums) const {
    if (rows > kMaxPackedRows) return false;
    const auto count = static_cast<int>(rows);
    const int64_t stride = layout_.step_stride(layout_.pairs_of_group(pair));
    const std::byte* const packed = weight_.data() + layout_.block_offset(pair, block);
    const auto steps = static_cast<int>(layout_.steps_of_block(block));
    if (weight_.format() == WeightFormat::kF8E4M3 && kernels_.tile_packed_fp8 != nullptr) {
      const uint64_t rare_steps = *weight_.rare_steps(pair / 2, block);
      kernels_.tile_packed_fp8(x_block, count, packed, stride, steps, rare_steps, scales, sums);
      return true;
    }
    if (weight_.format() == WeightFormat::kBF16 && kernels_.tile_packed_bf16 != nullptr) {
      kernels_.tile_packed_bf16(x_block, count, packed, stride, steps, sums);
      return true;
    }
    return false;
  }

  // The block's 32 scales in fp32; null without scales.
  const float* scales_of(int64_t pair, int64_t block) {
    if (layout_.scale_bytes() == 0) return nullptr;
    const std::byte* const stored = weight_.data() + layout_.scales_offset(pair, block);
    if (weight_.form().scales == DType::kF32) return reinterpret_cast<const float*>(stored);
    for (int i = 0; i < kPairRows; ++i) {
      bf16 scale;
      std::memcpy(&scale, stored + 2 * i, sizeof scale);
      scales_[i] = to_float(scale);
    }
    return scales_;
  }

  // The block's 32 zero points (16 - zero); null without them.
  const uint8_t* zeros_of(int64_t pair, int64_t block) const {
    if (!weight_.form().zeros) return nullptr;
    return reinterpret_cast<const uint8_t*>(weight_.data() + layout_.scales_offset(pair, block) +
                                            kPairRows * size_of(weight_.form().scales));
  }

  struct Steps {
    const std::byte* data;
    int64_t stride;
    int count;
  };

  // Converts the block to the tile kernels' layout.
  Steps expand(const std::byte* packed, int64_t stride, int steps, const uint8_t* zeros) {
    constexpr int64_t kStep = 128;
    auto* const out = reinterpret_cast<float*>(expanded_);
    switch (weight_.format()) {
      case WeightFormat::kF32:
        return {packed, stride, steps};
      case WeightFormat::kBF16:
        if (bf16_dot_) return {packed, stride, steps};
        kernels_.expand_bf16_to_f32(packed, stride, steps, out);
        return {expanded_, kStep, 2 * steps};
      case WeightFormat::kF8E4M3:
        if (bf16_dot_) {
          kernels_.expand_fp8_to_bf16(packed, stride, steps, expanded_, kStep);
          return {expanded_, kStep, steps};
        }
        kernels_.expand_fp8_to_f32(packed, stride, steps, out);
        return {expanded_, kStep, 2 * steps};
      case WeightFormat::kFourBit:
        const FourBitTable& table = four_bit_table(weight_.form().code, weight_.form().zeros);
        if (bf16_dot_) {
          kernels_.expand_four_bit_to_bf16(packed, stride, steps, table, zeros, expanded_);
          return {expanded_, kStep, 2 * steps};
        }
        kernels_.expand_four_bit_to_f32(packed, stride, steps, table, zeros, out);
        return {expanded_, kStep, 4 * steps};
    }
    return {};
  }

  const LinearKernels& kernels_;
  const PackedMatrix& weight_;
  const PanelLayout layout_;
  const bool bf16_dot_;
  alignas(64) std::byte expanded_[kPairRows * kBlockColumns * sizeof(float)];
  alignas(64) float scales_[kPairRows];
};

// Gathers as many blocks of the rows as fit into 128 KiB at a time, and calls body(first block,
// blocks, x [blocks][rows][128]) for each such run. The memory after the last row is readable.
template <typename T, typename Body>
void for_each_run(const ProductRows& x, int64_t rows, const PackedMatrix& weight,
                  const Body& body) {
  const int64_t columns = weight.cols();
  constexpr int64_t kScratch = (128 << 10) / sizeof(T);
  // Bytes, because an array of bf16 would be zeroed first.
  alignas(64) std::byte memory[(kScratch + (kMatrixRows - 1) * kBlockColumns) * sizeof(T)];
  T* const x_blocks = reinterpret_cast<T*>(memory);
  const int64_t num_blocks = ceil_div(columns, kBlockColumns);
  const int64_t x_block = rows * kBlockColumns;
  for (int64_t first = 0; first < num_blocks; first += kScratch / x_block) {
    const int64_t count = std::min(kScratch / x_block, num_blocks - first);
    for (int64_t b = 0; b < count; ++b) {
      const int64_t column = (first + b) * kBlockColumns;
      gather_block(x, rows, column, std::min<int64_t>(kBlockColumns, columns - column),
                   weight.columns(), x_blocks + b * x_block);
    }
    body(first, count, x_blocks);
  }
}

// Within a run of blocks of x, group after group, so that the weights are read in long ascending
// runs.
template <typename T>
void multiply_many_rows(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                        const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs,
                        float* sums) {
  BlockProduct product(kernels, weight, std::is_same_v<T, bf16>);
  std::fill_n(sums, num_pairs * rows * kPairRows, 0.0f);
  for_each_run<T>(x, rows, weight, [&](int64_t first, int64_t count, const T* x_blocks) {
    for (int64_t pair = first_pair; pair < first_pair + num_pairs;) {
      const int64_t stop = std::min((pair | 1) + 1, first_pair + num_pairs);
      for (int64_t b = 0; b < count; ++b) {
        for (int64_t p = pair; p < stop; ++p) {
          product.multiply(x_blocks + b * rows * kBlockColumns, rows, p, first + b,
                           sums + (p - first_pair) * rows * kPairRows);
        }
      }
      pair = stop;
    }
  });
}

// The same by matrix tiles (AMX), which take any number of rows.
void multiply_by_matrix(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                        const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs,
                        float* sums) {
  const PanelLayout layout(weight);
  const auto multiply =
      weight.format() == WeightFormat::kF8E4M3 ? kernels.matrix_fp8 : kernels.matrix_bf16;
  std::fill_n(sums, num_pairs * rows * kPairRows, 0.0f);
  for_each_run<bf16>(x, rows, weight, [&](int64_t first, int64_t count, const bf16* run) {
    for (int64_t pair = first_pair; pair < first_pair + num_pairs;) {
      const int64_t pairs = layout.rest_of_group(pair, first_pair + num_pairs);
      multiply(reinterpret_cast<const uint16_t*>(run), static_cast<int>(rows),
               packed_blocks(weight, layout, pair, first), static_cast<int>(count),
               static_cast<int>(pairs), sums + (pair - first_pair) * rows * kPairRows,
               rows * kPairRows);
      pair += pairs;
    }
  });
}

}  // namespace

void multiply_block(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                    const PackedMatrix& weight, int64_t pair, int64_t block, float* sums) {
  FATHOM_CHECK(
      rows <= kFewRows && x.x.dtype() == DType::kF32 && weight.format() == WeightFormat::kF32,
      "{} rows of {}", rows, name_of(x.x.dtype()));
  alignas(64) float x_block[kFewRows * kBlockColumns];
  const int64_t column = block * kBlockColumns;
  gather_block(x, rows, column, std::min<int64_t>(kBlockColumns, weight.cols() - column),
               weight.columns(), x_block);
  std::fill_n(sums, rows * kPairRows, 0.0f);
  BlockProduct(kernels, weight, /*bf16_dot=*/false).multiply(x_block, rows, pair, block, sums);
}

void multiply_pairs(const LinearKernels& kernels, const ProductRows& x, int64_t rows,
                    const PackedMatrix& weight, int64_t first_pair, int64_t num_pairs,
                    float* sums) {
  FATHOM_CHECK(rows <= kMaxProductRows && num_pairs <= kMaxProductPairs, "{} rows, {} pairs", rows,
               num_pairs);
  const bool bf16_dot = x.x.dtype() == DType::kBF16 && weight.format() != WeightFormat::kF32 &&
                        kernels.tile_bf16 != nullptr;
  if (!bf16_dot) {
    multiply_many_rows<float>(kernels, x, rows, weight, first_pair, num_pairs, sums);
  } else if (kernels.matrix_bf16 != nullptr && weight.format() != WeightFormat::kFourBit) {
    multiply_by_matrix(kernels, x, rows, weight, first_pair, num_pairs, sums);
  } else if (rows <= kernels.few_rows && weight.columns() == nullptr) {
    multiply_few_rows(kernels, x, rows, weight, first_pair, num_pairs, sums);
  } else {
    multiply_many_rows<bf16>(kernels, x, rows, weight, first_pair, num_pairs, sums);
  }
}

}  // namespace fathom
