// Absorbed attention over chosen keys of the paged latent cache (DeepSeek Sparse Attention,
// DeepSeek-V3.2-Exp, 2025): attention.h's absorbed form in which every row has a list of positions.
#pragma once

#include <span>

#include "cache/latent_layout.h"
#include "device/stream.h"
#include "ops/attention/paged_batch.h"
#include "ops/attention/sparse_row.h"
#include "tensor/tensor_view.h"

namespace fathom {

int64_t sparse_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                         int num_threads, int64_t rope_dim = 64);

// For rows[i], i < R: q_latent [batch rows, H, latent], q_rope [batch rows, H, rope] (bf16 or f32,
// as absorbed_attention() takes them), keys [R, k] i32 (select_top_keys(): the first count_keys()
// columns are positions, strictly ascending within [batch.first_key, rows[i].length); the rest is
// not read) -> out [batch rows, H, latent] bf16 or f32, and, unless it is an empty view, lse
// [batch rows, H] f32 (natural log of the sum of exponentials, for merge_attention()). Batch rows
// that are not listed are left alone. Only the batch's block_tables, max_pages and first_key are
// read.
//
// Order of arithmetic: that of absorbed_attention() over a sequence of the listed rows alone, so a
// row whose list holds every key that it sees has the bits that absorbed_attention() gives it, in
// every format, at every level. Batch-invariant, likewise.
void sparse_attention(const Stream& stream, ConstTensorView q_latent, ConstTensorView q_rope,
                      const PagedBatch& batch, std::span<const SparseRow> rows,
                      ConstTensorView keys, const LatentPages& pages, float softmax_scale,
                      TensorView out, TensorView lse, std::span<std::byte> workspace);

}  // namespace fathom
