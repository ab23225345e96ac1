// The inner loops of the GEMMs, one function table a CPU level.
//
// Plain types and no inline functions: the vector files are compiled with flags of their own, and
// nothing that they instantiate may be shared with code for an older CPU.
//
// Vocabulary (drawing in packed_matrix.cc): a panel is 16 weight rows, a pair two panels = 32 rows,
// a group two pairs; a block is 128 columns. A step is what one vector load of a panel covers: 2
// columns of a bf16 or FP8 weight, 1 of an fp32 one.
//
// Sums: every output is, in every kernel and for any number of rows, the chain
//   total = 0;  for each block: total = fma(sum of the block's products in order of k, scale,
//   total)
// (without scales: total + sum), so that a row's bits do not depend on the kernel that the number
// of rows selects.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cpu/isa.h"

namespace fathom {

enum class FourBitCode : uint8_t;  // tensor/four_bit.h

constexpr int kPairRows = 32;
constexpr int kBlockColumns = 128;
constexpr int kMaxDotRows = 4;
constexpr int kMatrixRows = 16;
constexpr int kMaxPackedRows = 2;

// Location of the weights of one or two pairs.
struct PackedBlocks {
  const std::byte* data;  // the first pair's first step in the first block
  int64_t step_stride;    // bytes from step to step
  int64_t block_stride;   // bytes from block to block
  int64_t scales_shift;   // a block's scales: data + steps * step_stride + scales_shift
  int64_t columns;        // columns from the first block on
  // FP8: bit s of a block's word says whether one of the group's codes in step s is rare: zero,
  // subnormal or NaN.
  const uint64_t* rare_steps;
};

// Values of four-bit codes (tensor/four_bit.h). A code's index is the code itself or, with zero
// points, code + 16 - zero; both tables hold the value of an index, f32 only of the first 16, whose
// values rise by 1 an index where there are zero points.
struct FourBitTable {
  alignas(64) uint16_t bf16[32];  // an index's fifth bit is ignored without zero points
  alignas(64) float f32[16];
};

// The weights of one or two pairs in four bits. A block is a group of columns, at most 128.
struct FourBitBlocks {
  PackedBlocks packed;
  int64_t block_columns;
  int64_t scale_bytes;  // from a pair's scales to the next one's, zero points included
  const FourBitTable* table;
  bool bf16_scales;  // else fp32
  bool zeros;        // 16 - zero point, 32 bytes behind a pair's scales
};

struct LinearKernels {
  // Most x rows in one call of the tile kernels.
  int tile_rows;
  // Most bf16 rows that take the decode kernels, in passes of kMaxDotRows, rather than tiles; at
  // most kFewRows.
  int few_rows;

  // Decode: rows <= kMaxDotRows bf16 rows times one group's pairs (1 or 2), all columns. sums[pair
  // * pair_stride + row * 32 + lane] is overwritten. Null where the CPU has no bf16 dot products:
  // bf16 is then computed in fp32, whose products are as exact.
  void (*dot_bf16)(const uint16_t* const* x, int rows, const PackedBlocks& weights, int pairs,
                   float* sums, int64_t pair_stride);
  void (*dot_fp8)(const uint16_t* const* x, int rows, const PackedBlocks& weights, int pairs,
                  float* sums, int64_t pair_stride);
  void (*dot_four_bit)(const uint16_t* const* x, int rows, const FourBitBlocks& weights, int pairs,
                       float* sums, int64_t pair_stride);

  // Prefill: sums[rows][32] += one block of one pair, times scales[32] (or null). x [rows][128],
  // zero beyond the matrix's columns; ahead + step * ahead_stride is prefetched.
  void (*tile_bf16)(const uint16_t* x, int rows, const std::byte* weights, int64_t step_stride,
                    int steps, const float* scales, float* sums, const std::byte* ahead,
                    int64_t ahead_stride);
  void (*tile_f32)(const float* x, int rows, const std::byte* weights, int64_t step_stride,
                   int steps, const float* scales, float* sums, const std::byte* ahead,
                   int64_t ahead_stride);

  // What expand_*_to_f32 and then tile_f32 do to up to kMaxPackedRows rows, bit for bit, on the
  // weights as they are packed. `rare_steps`: the block's word of PackedBlocks. Null: expand.
  void (*tile_packed_fp8)(const float* x, int rows, const std::byte* weights, int64_t step_stride,
                          int steps, uint64_t rare_steps, const float* scales, float* sums);
  void (*tile_packed_bf16)(const float* x, int rows, const std::byte* weights, int64_t step_stride,
                           int steps, float* sums);

  // Matrix tiles, for any number of rows; where the CPU has them they take the place of the four
  // above for bf16 x with bf16 or FP8 weights, else null. sums[pair * pair_stride + row * 32 +
  // lane] += the first `blocks` blocks of one group's pairs (1 or 2). x [blocks][rows][128], zero
  // beyond the matrix' columns; kMatrixRows - 1 rows after the last one must be readable.
  void (*matrix_bf16)(const uint16_t* x, int rows, const PackedBlocks& weights, int blocks,
                      int pairs, float* sums, int64_t pair_stride);
  void (*matrix_fp8)(const uint16_t* x, int rows, const PackedBlocks& weights, int blocks,
                     int pairs, float* sums, int64_t pair_stride);

  // Dequantizes one block of one pair into the tile kernels' layout, without its scales: bf16
  // [steps][128 bytes], out_stride apart, fp32 [2 * steps][32]. Exact.
  void (*expand_fp8_to_bf16)(const std::byte* weights, int64_t step_stride, int steps,
                             std::byte* out, int64_t out_stride);
  void (*expand_fp8_to_f32)(const std::byte* weights, int64_t step_stride, int steps, float* out);
  void (*expand_bf16_to_f32)(const std::byte* weights, int64_t step_stride, int steps, float* out);
  // The same for four-bit steps; each becomes two steps of bf16 or four columns of fp32. `zeros`:
  // 32 bytes, 16 - zero point of a row, or null.
  void (*expand_four_bit_to_bf16)(const std::byte* weights, int64_t step_stride, int steps,
                                  const FourBitTable& table, const uint8_t* zeros, std::byte* out);
  void (*expand_four_bit_to_f32)(const std::byte* weights, int64_t step_stride, int steps,
                                 const FourBitTable& table, const uint8_t* zeros, float* out);

  // Stores of finished sums; any alignment.
  void (*store_bf16)(const float* sums, int64_t count, uint16_t* out);
  void (*add_scaled)(const float* sums, float scale, int64_t count, float* out);  // out += s * sums
  // out = silu(gate) * up, as fp32 or rounded to bf16.
  void (*swiglu_f32)(const float* gate, const float* up, int64_t count, float* out);
  void (*swiglu_bf16)(const float* gate, const float* up, int64_t count, uint16_t* out);
};

// The function table of a level that this CPU has.
const LinearKernels& linear_kernels(CpuIsa isa);

// Values of codes of this meaning, with or without zero points.
const FourBitTable& four_bit_table(FourBitCode code, bool zeros);

// Kernels of four-bit codes: linear_four_bit*.cc.
void expand_four_bit_to_f32_scalar(const std::byte* weights, int64_t step_stride, int steps,
                                   const FourBitTable& table, const uint8_t* zeros, float* out);
#if defined(__x86_64__)
void expand_four_bit_to_f32_avx2(const std::byte* weights, int64_t step_stride, int steps,
                                 const FourBitTable& table, const uint8_t* zeros, float* out);
void dot_four_bit_avx512(const uint16_t* const* x, int rows, const FourBitBlocks& weights,
                         int pairs, float* sums, int64_t pair_stride);
void expand_four_bit_to_bf16_avx512(const std::byte* weights, int64_t step_stride, int steps,
                                    const FourBitTable& table, const uint8_t* zeros,
                                    std::byte* out);
void expand_four_bit_to_f32_avx512(const std::byte* weights, int64_t step_stride, int steps,
                                   const FourBitTable& table, const uint8_t* zeros, float* out);
#endif

extern const LinearKernels kLinearScalar;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
const LinearKernels& linear_avx512_fma();
const LinearKernels& linear_amx();
#endif

}  // namespace fathom
