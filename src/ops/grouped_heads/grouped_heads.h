// Grouped-query attention (Ainslie et al. 2023) over a latent cache: a cache row is the values of
// all KV heads, then their rotated keys, and a query head sees the part of one KV head. These
// operations take the place of W_UK, W_UV and kv_b_proj, which would be matrices of ones and zeros.
//
// H query heads, G KV heads of d values each. Tensors are bf16 or f32, all of a call alike; leading
// dimensions may be strided.
#pragma once

#include "device/stream.h"
#include "tensor/tensor_view.h"

namespace fathom {

// The query heads of a rank: its head h is the model's first_head + h and sees KV head
// (first_head + h) / queries_per_kv.
struct GroupedHeads {
  int64_t first_head = 0;
  int64_t queries_per_kv = 1;

  int64_t kv_head(int64_t head) const { return (first_head + head) / queries_per_kv; }
};

// q [rows, H, d] -> wide [rows, H, G * d]: each head's values at its KV head's place, zeros at the
// others', so that one product with the keys of all KV heads is the product with its own.
void spread_queries(const Stream& stream, const GroupedHeads& heads, ConstTensorView q,
                    TensorView wide);

// wide [rows, H, G * d] -> out [rows, H, d]: each head's own part of the sum over the values of all
// KV heads.
void select_values(const Stream& stream, const GroupedHeads& heads, ConstTensorView wide,
                   TensorView out);

// values and keys_rotated [keys, G * d] -> kv [keys, H, 2 * d]: the key, then the value of each
// query head's KV head.
void expand_grouped(const Stream& stream, const GroupedHeads& heads, ConstTensorView values,
                    ConstTensorView keys_rotated, TensorView kv);

}  // namespace fathom
