#include "ops/indexer/index_keys.h"

#include <bit>

#include "ops/indexer/indexer_cpu.h"
#include "ops/rope/check_positions.h"

namespace fathom {
namespace {

void check_rotation(const IndexRotation& rotation, int64_t dim) {
  FATHOM_CHECK(rotation.table != nullptr && rotation.table->dim() <= dim && dim % 2 == 0,
               "an index dimension of {} with {} rotated", dim,
               rotation.table == nullptr ? 0 : rotation.table->dim());
  FATHOM_CHECK(!rotation.hadamard || std::has_single_bit(static_cast<uint64_t>(dim)),
               "a Hadamard transform of {} values", dim);
}

}  // namespace

void write_index_keys(const Stream& stream, ConstTensorView k, std::span<const int32_t> positions,
                      std::span<const int64_t> slots, const IndexNorm& norm,
                      const IndexRotation& rotation, const IndexKeyPages& pages) {
  const int64_t dim = pages.layout.dim;
  FATHOM_CHECK(k.rank() == 2 && k.size(1) == dim && k.dtype() == DType::kF32 &&
                   norm.weight.rank() == 1 && norm.weight.size(0) == dim &&
                   norm.weight.dtype() == DType::kF32 && norm.bias.rank() == 1 &&
                   norm.bias.size(0) == dim && norm.bias.dtype() == DType::kF32,
               "k {} of {}, weight {}, bias {}, cache {}", k.shape_string(), name_of(k.dtype()),
               norm.weight.shape_string(), norm.bias.shape_string(), dim);
  check_rotation(rotation, dim);
  check_positions(positions, k.size(0));
  FATHOM_CHECK(slots.size() == positions.size(), "{} slots for {} rows", slots.size(),
               positions.size());
  for (const int64_t slot : slots) {
    FATHOM_CHECK(slot >= 0 && slot < pages.num_pages * kPageSize, "slot {} of {} pages", slot,
                 pages.num_pages);
  }
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::write_index_keys(stream.pool(), cpu_isa(), k, positions, slots, norm, rotation, pages);
  }
}

void make_index_queries(const Stream& stream, ConstTensorView q, ConstTensorView head_weights,
                        std::span<const int32_t> positions, const IndexRotation& rotation,
                        TensorView values, TensorView weights) {
  FATHOM_CHECK(q.rank() == 3 && q.dtype() == DType::kF32 && values.rank() == 3 &&
                   values.size(0) == q.size(0) && values.size(1) == q.size(1) &&
                   values.size(2) == q.size(2) &&
                   (values.dtype() == DType::kF8E4M3 || values.dtype() == DType::kBF16 ||
                    values.dtype() == DType::kF32),
               "q {} of {}, values {} of {}", q.shape_string(), name_of(q.dtype()),
               values.shape_string(), name_of(values.dtype()));
  FATHOM_CHECK(head_weights.rank() == 2 && head_weights.dtype() == DType::kF32 &&
                   weights.rank() == 2 && weights.dtype() == DType::kF32 &&
                   head_weights.size(0) == q.size(0) && head_weights.size(1) == q.size(1) &&
                   weights.size(0) == q.size(0) && weights.size(1) == q.size(1),
               "q {}, head weights {}, weights {}", q.shape_string(), head_weights.shape_string(),
               weights.shape_string());
  check_rotation(rotation, q.size(2));
  check_positions(positions, q.size(0));
  switch (stream.device()) {
    case DeviceKind::kCpu:
      cpu::make_index_queries(stream.pool(), cpu_isa(), q, head_weights, positions, rotation,
                              values, weights);
  }
}

}  // namespace fathom
