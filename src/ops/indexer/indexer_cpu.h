// The CPU forms of the indexer's operations. `isa` selects the vector code, at most cpu_isa(): the
// public operations pass cpu_isa(), tests pass every level.
#pragma once

#include "device/cpu/isa.h"
#include "device/cpu/thread_pool.h"
#include "ops/indexer/index_keys.h"
#include "ops/indexer/index_scores.h"
#include "ops/indexer/top_keys.h"

namespace fathom::cpu {

void write_index_keys(ThreadPool& pool, CpuIsa isa, ConstTensorView k,
                      std::span<const int32_t> positions, std::span<const int64_t> slots,
                      const IndexNorm& norm, const IndexRotation& rotation,
                      const IndexKeyPages& pages);

void make_index_queries(ThreadPool& pool, CpuIsa isa, ConstTensorView q,
                        ConstTensorView head_weights, std::span<const int32_t> positions,
                        const IndexRotation& rotation, TensorView values, TensorView weights);

int64_t index_scores_workspace_bytes(int64_t rows, int64_t num_heads, int64_t dim, int num_threads);

void index_scores(ThreadPool& pool, CpuIsa isa, ConstTensorView values, ConstTensorView weights,
                  const PagedBatch& batch, std::span<const SparseRow> rows,
                  const IndexKeyPages& pages, TensorView scores, std::span<std::byte> workspace);

int64_t top_keys_workspace_bytes(int64_t max_length, int num_threads);

void select_top_keys(ThreadPool& pool, CpuIsa isa, ConstTensorView scores,
                     std::span<const SparseRow> rows, int32_t first_key, TensorView keys,
                     std::span<std::byte> workspace);

}  // namespace fathom::cpu
