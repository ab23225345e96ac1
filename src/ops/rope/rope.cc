#include "ops/rope/rope.h"

#include "ops/rope/check_positions.h"
#include "ops/rope/rope_cpu.h"

namespace fathom {
namespace {

// Whether these values are those of whole heads of the table.
bool is_rotated_by(int64_t rope, const RopeTable& table) {
  return table.dim() == 0 ? rope == 0 : rope % table.dim() == 0;
}

}  // namespace

void split_rope_query(const Stream& stream, ConstTensorView q, std::span<const int32_t> positions,
                      const RopeTable& table, TensorView q_nope, TensorView q_rope) {
  FATHOM_CHECK(q.rank() == 3 && q_nope.rank() == 3 && q_rope.rank() == 3 &&
                   q_nope.size(0) == q.size(0) && q_rope.size(0) == q.size(0) &&
                   q_nope.size(1) == q.size(1) && q_rope.size(1) == q.size(1) &&
                   q_nope.size(2) + q_rope.size(2) == q.size(2) && q_nope.dtype() == q_rope.dtype(),
               "q {}, nope {}, rope {}", q.shape_string(), q_nope.shape_string(),
               q_rope.shape_string());
  FATHOM_CHECK(is_rotated_by(q_rope.size(2), table), "rope {} with a table for {}", q_rope.size(2),
               table.dim());
  check_positions(positions, q.size(0));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::split_rope_query(stream.pool(), q, positions, table, q_nope, q_rope);
  }
}

void norm_rope_cache_write(const Stream& stream, ConstTensorView kv_a,
                           std::span<const int32_t> positions, std::span<const int64_t> slots,
                           ConstTensorView norm_weight, float eps, const RopeTable& table,
                           const LatentPages& pages) {
  const LatentLayout& layout = pages.layout;
  FATHOM_CHECK(kv_a.rank() == 2 && kv_a.size(1) == layout.latent_dim + layout.rope_dim &&
                   is_rotated_by(layout.rope_dim, table),
               "kv_a {}, table {}, cache {} + {}", kv_a.shape_string(), table.dim(),
               layout.latent_dim, layout.rope_dim);
  FATHOM_CHECK(
      norm_weight.empty() || (norm_weight.rank() == 1 && norm_weight.size(0) == layout.latent_dim),
      "weight {}, cache {}", norm_weight.shape_string(), layout.latent_dim);
  check_positions(positions, kv_a.size(0));
  FATHOM_CHECK(slots.size() == positions.size(), "{} slots for {} rows", slots.size(),
               positions.size());
  for (const int64_t slot : slots) {
    FATHOM_CHECK(slot >= 0 && slot < pages.num_pages * kPageSize, "slot {} of {} pages", slot,
                 pages.num_pages);
  }
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::norm_rope_cache_write(stream.pool(), kv_a, positions, slots, norm_weight, eps, table,
                                 pages);
  }
}

}  // namespace fathom
