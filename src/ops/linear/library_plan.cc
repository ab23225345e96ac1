#include "ops/linear/library_plan.h"

#include <algorithm>
#include <bit>

#include "base/math.h"

namespace fathom::cuda {

// Where there are fewer large tiles than multiprocessors, or few more, it is up to twice as fast,
// and beyond that as fast or a little faster (docs/kernels/many_rows.md). Up to 64 rows reading the
// weights is all there is to it, and its kernels do not begin before those before them have ended.
bool library_pays(const ManyRowsProblem& problem) {
  return problem.batches == 1 && problem.rows > 64;
}

int64_t rows_alike(int64_t rows) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return round_up(rows, std::max<int64_t>(64, power / 16));
}

}  // namespace fathom::cuda
