// Plan of MoE with four-bit experts: how a CTA's warps share a GEMM's columns, and the workspace.
// Host code, a function of the shape and the number of tokens alone.
#pragma once

#include <cstdint>

namespace fathom::cuda {

inline constexpr int kFourBitWarps = 16;      // of a CTA of the few-row launches
inline constexpr int kFourBitMostBlocks = 7;  // of 64 columns, whose x a warp holds in registers
inline constexpr int kFourBitMostColumns = kFourBitWarps * kFourBitMostBlocks * 64;
inline constexpr int kFourBitFewPairs = 4096;  // pairs of a token and an expert, at most

// A CTA's warps form groups that take 32 rows of weights at a time; a group's warps share the
// columns and add up what each has.
struct FourBitSlices {
  int slices = 1;  // warps of a group: 1, 2, 4, 8 or 16
  int blocks = 1;  // of 64 columns, at most, of a warp

  friend bool operator==(const FourBitSlices&, const FourBitSlices&) = default;
};
// `columns`: a multiple of 64, up to kFourBitMostColumns.
FourBitSlices plan_four_bit_slices(int64_t columns);

struct FourBitMoeSizes {
  int64_t rows = 0, hidden = 0, experts_per_token = 0, inter = 0;
};

// Plan of the few-row launches; offsets in bytes.
struct FourBitFewRowsPlan {
  FourBitSlices up, down;
  int64_t activations_at = 0;  // [pairs, inter] bf16
  int64_t results_at = 0;      // [pairs, hidden] f32
  int64_t workspace_bytes = 0;
};
FourBitFewRowsPlan plan_four_bit_few_rows(const FourBitMoeSizes& sizes);

}  // namespace fathom::cuda
