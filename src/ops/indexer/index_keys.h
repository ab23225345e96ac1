// The two sides of DeepSeek-V3.2's indexer ("lightning indexer", DeepSeek-V3.2-Exp, 2025): a key a
// token, normed, and a query a token and index head; both rotated in their FIRST `rope` dimensions,
// Hadamard-rotated, and quantised alike. All arithmetic is fp32 until a value is stored.
//
//   key     LayerNorm (mean subtracted, weight and bias) -> rotation -> Hadamard -> cache row
//   query                                                   rotation -> Hadamard -> e4m3, bf16, f32
//
// Rows are independent of one another: a row's bits depend on nothing but its input.
#pragma once

#include <span>

#include "cache/index_key_layout.h"
#include "device/stream.h"
#include "ops/rope/rope.h"
#include "tensor/tensor_view.h"

namespace fathom {

// How both sides are rotated; the two must agree, or scores mean nothing.
struct IndexRotation {
  // The main attention's table (frequencies and magnitude); table->dim() <= the index dimension is
  // the width of the rotated part.
  const RopeTable* table = nullptr;
  // Which values are a pair: (i, i + rope/2) in DeepSeek-V3.2, adjacent ones in GLM-5
  // (indexer_rope_interleave).
  bool interleaved = false;
  // The Walsh-Hadamard transform in natural order, times dim^-1/2. It is orthogonal, so scores are
  // those without it but for rounding; it spreads outliers before e4m3. Needs a power of two.
  bool hadamard = true;
};

struct IndexNorm {
  ConstTensorView weight;  // [dim] f32
  ConstTensorView bias;    // [dim] f32
  float eps = 1e-6f;
};

// k [rows, dim] f32 (wk's output; rows may be strided), positions [rows] -> the row of
// pages.row(page, slot) with slots[row] = page * kPageSize + slot, as norm_rope_cache_write() has
// it. dim is the pages' layout.dim; an even number, and a power of two with the Hadamard transform.
void write_index_keys(const Stream& stream, ConstTensorView k, std::span<const int32_t> positions,
                      std::span<const int64_t> slots, const IndexNorm& norm,
                      const IndexRotation& rotation, const IndexKeyPages& pages);

// q [rows, H, dim] f32 (wq_b's output; rows may be strided), head_weights [rows, H] f32
// (weights_proj's output), positions [rows]
//   -> values [rows, H, dim], e4m3, bf16 or f32: the type that goes with the keys' format
//      weights [rows, H] f32 = head_weights * (H^-1/2 * dim^-1/2) * scale, where scale is the
//      head's e4m3 scale (index_scale(), one a head and row), and 1 for bf16 and f32
// A NaN in a head of e4m3 makes its weight and all its codes NaN.
void make_index_queries(const Stream& stream, ConstTensorView q, ConstTensorView head_weights,
                        std::span<const int32_t> positions, const IndexRotation& rotation,
                        TensorView values, TensorView weights);

}  // namespace fathom
