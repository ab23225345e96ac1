// The CPU forms of the rope operations.
#pragma once

#include "device/cpu/thread_pool.h"
#include "ops/rope/rope.h"

namespace fathom::cpu {

// cos and sin of one position, [dim / 2, 2]: the table's, or computed into `scratch`.
const float* cos_sin_of(const RopeTable& table, int32_t position, std::vector<float>& scratch);

void split_rope_query(ThreadPool& pool, ConstTensorView q, std::span<const int32_t> positions,
                      const RopeTable& table, TensorView q_nope, TensorView q_rope);

void norm_rope_cache_write(ThreadPool& pool, ConstTensorView kv_a,
                           std::span<const int32_t> positions, std::span<const int64_t> slots,
                           ConstTensorView norm_weight, float eps, const RopeTable& table,
                           const LatentPages& pages);

}  // namespace fathom::cpu
