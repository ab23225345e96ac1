// Attention over the paged latent cache, in both forms of MLA (DeepSeek-V2, 2024, section 2.1).
//
//   absorbed   multi-query attention over the latent rows themselves: key width latent + rope,
//              value = the latent; all heads of a sequence share each row they read
//   mha        multi-head attention over keys and values that the caller expanded from the latent;
//              returns log-sum-exp, so that results over different keys can be combined
//
// Row i of a sequence sees its context and the new tokens up to itself. The cache must already hold
// the new tokens (ops/rope writes them). Softmax and sums are fp32. H is the number of heads.
#pragma once

#include <span>

#include "cache/latent_layout.h"
#include "device/stream.h"
#include "ops/attention/paged_batch.h"
#include "tensor/tensor_view.h"

namespace fathom {

int64_t absorbed_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                           int num_threads, int64_t rope_dim = 64);

// For the sequences listed in `sequences` (indices into the batch): q_latent [rows, H, latent],
// q_rope [rows, H, rope] (bf16 or f32; f32 with an f32 cache means fp32 arithmetic) -> out [rows,
// H, latent] (bf16 or f32). Rows of other sequences are left alone. Batch-invariant: a row's bits
// depend on the keys that it sees only, not on its sequence's other rows, the batch or the number
// of threads.
void absorbed_attention(const Stream& stream, ConstTensorView q_latent, ConstTensorView q_rope,
                        const PagedBatch& batch, std::span<const int32_t> sequences,
                        const LatentPages& pages, float softmax_scale, TensorView out,
                        std::span<std::byte> workspace);

// Copies the cached rows [first, first + count) of a sequence out of its pages: latent [count,
// latent] and k_rope [count, rope], dequantized to the outputs' type (bf16 or f32).
void gather_latent(const Stream& stream, std::span<const int32_t> page_ids,
                   const LatentPages& pages, int64_t first, int64_t count, TensorView latent,
                   TensorView k_rope);

int64_t mha_attention_workspace_bytes(int64_t num_heads, int64_t qk_dim, int64_t v_dim,
                                      int num_threads);

// One sequence, `queries` new rows against `keys` expanded keys:
//   q_nope [queries, H, nope], q_rope [queries, H, rope], kv [keys, H, nope + v] (k_nope then v, as
//   kv_b_proj gives them), k_rope [keys, rope] shared by all heads; types as above
//   -> out [queries, H, v] f32, lse [queries, H] f32 (natural log; -inf where nothing was visible)
// Query i sees keys [0, visible_before + i + 1) clipped to [0, keys): pass visible_before = -1 +
// keys or more for all of them, 0 for a causal block that starts at the same token as the keys.
void mha_attention(const Stream& stream, ConstTensorView q_nope, ConstTensorView q_rope,
                   ConstTensorView kv, ConstTensorView k_rope, int64_t visible_before,
                   float softmax_scale, TensorView out, TensorView lse,
                   std::span<std::byte> workspace);

// Combines a second result over other keys into the first, by log-sum-exp: out, lse <- merge((out,
// lse), (part, part_lse)). [queries, H, v] and [queries, H], f32.
void merge_attention(const Stream& stream, ConstTensorView part, ConstTensorView part_lse,
                     TensorView out, TensorView lse);

}  // namespace fathom
