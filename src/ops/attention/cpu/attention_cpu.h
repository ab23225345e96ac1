// The CPU forms of attention. `isa` selects the vector code, at most cpu_isa(): the public
// operations pass cpu_isa(), tests pass every level.
#pragma once

#include <span>

#include "device/cpu/isa.h"
#include "device/cpu/thread_pool.h"
#include "ops/attention/attention.h"
#include "ops/attention/cpu/attention_kernels.h"
#include "ops/attention/sparse_attention.h"

namespace fathom::cpu {

// The kernels of a level. bf16_inputs: all operands are bf16 anyway, so that bf16 multiplies lose
// nothing.
const AttentionKernels& attention_kernels(CpuIsa isa, bool bf16_inputs);

// A cache row in the kernels' element type: latent, then rope.
void decode_key(const AttentionKernels& kernels, const LatentLayout& layout, const std::byte* row,
                std::byte* out);

int64_t absorbed_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                           int num_threads, int64_t rope_dim);

void absorbed_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_latent,
                        ConstTensorView q_rope, const PagedBatch& batch,
                        std::span<const int32_t> sequences, const LatentPages& pages,
                        float softmax_scale, TensorView out, std::span<std::byte> workspace);

int64_t sparse_attention_workspace_bytes(int64_t rows, int64_t num_heads, int64_t latent_dim,
                                         int num_threads, int64_t rope_dim);

void sparse_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_latent,
                      ConstTensorView q_rope, const PagedBatch& batch,
                      std::span<const SparseRow> rows, ConstTensorView keys,
                      const LatentPages& pages, float softmax_scale, TensorView out, TensorView lse,
                      std::span<std::byte> workspace);

void gather_latent(ThreadPool& pool, CpuIsa isa, std::span<const int32_t> page_ids,
                   const LatentPages& pages, int64_t first, int64_t count, TensorView latent,
                   TensorView k_rope);

int64_t mha_attention_workspace_bytes(int64_t num_heads, int64_t qk_dim, int64_t v_dim,
                                      int num_threads);

void mha_attention(ThreadPool& pool, CpuIsa isa, ConstTensorView q_nope, ConstTensorView q_rope,
                   ConstTensorView kv, ConstTensorView k_rope, int64_t visible_before,
                   float softmax_scale, TensorView out, TensorView lse,
                   std::span<std::byte> workspace);

void merge_attention(ThreadPool& pool, ConstTensorView part, ConstTensorView part_lse,
                     TensorView out, TensorView lse);

}  // namespace fathom::cpu
