#include "ops/linear/one_row_plan.h"

#include <algorithm>

#include "base/math.h"

namespace fathom::cuda {
namespace {

// Bytes of a unit of short rows: small enough that a small matrix has a unit for every warp.
constexpr int64_t kUnitBytes = 2048;
// Bytes in flight per CTA: three times what the memory rate requires, and small enough for another
// launch's CTA on the SM.
constexpr int64_t kRingBytes = 96 * 1024;

// The next launch's weights fill the gap at this one's end if they are issued late. Where the
// matrix exceeds so many rings, one launch's ring keeps too few bytes in flight.
constexpr int64_t kMostRings = 8;

}  // namespace

int OneRowPlan::shared_bytes(const OneRowShape& shape) const {
  return warps * slots * (slot_bytes + 8) + batches_a_block * static_cast<int>(shape.k) * 2;
}

bool one_row_pays(const OneRowShape& shape, int multiprocessors) {
  return shape.k >= OneRowPlan::kPieceColumns ||
         shape.n * shape.k * shape.batches * 2 <= multiprocessors * kRingBytes;
}

OneRowPlan plan_one_row(const OneRowShape& shape, int multiprocessors) {
  OneRowPlan plan;
  const int64_t row_bytes = shape.k * 2;
  while (plan.unit_rows < 8 && 2 * plan.unit_rows * row_bytes <= kUnitBytes) plan.unit_rows *= 2;
  plan.pieces = static_cast<int>(ceil_div(shape.k, OneRowPlan::kPieceColumns));
  plan.slot_bytes = static_cast<int>(plan.unit_rows *
                                     std::min<int64_t>(row_bytes, OneRowPlan::kPieceColumns * 2));
  const int64_t units_a_batch = shape.n / plan.unit_rows, units = units_a_batch * shape.batches;
  plan.blocks = static_cast<int>(std::min<int64_t>(multiprocessors, units));
  const int64_t most = ceil_div(units, plan.blocks);  // units of a CTA, at most
  // The number of warps that share them most evenly.
  plan.warps = static_cast<int>(ceil_div(most, ceil_div(most, OneRowPlan::kMaxWarps)));
  plan.slots = static_cast<int>(std::clamp<int64_t>(kRingBytes / (plan.warps * plan.slot_bytes), 1,
                                                    ceil_div(most, plan.warps) * plan.pieces));
  const int64_t asked = ceil_div(most, plan.warps) * plan.pieces;  // pieces of a warp
  plan.next_begins_late = asked > plan.slots && asked <= kMostRings * plan.slots;
  plan.batches_a_block =
      static_cast<int>(std::min(shape.batches, (most + units_a_batch - 2) / units_a_batch + 1));
  return plan;
}

}  // namespace fathom::cuda
