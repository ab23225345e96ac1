#include "ops/linear/library_plan.h"

#include <algorithm>
#include <bit>

#include "base/math.h"

namespace fathom::cuda {

// With fewer large tiles than SMs, or few more, the library is up to twice as fast, beyond that as
// fast or a little faster (docs/kernels/many_rows.md). Up to 64 rows the GEMM is bandwidth-bound,
// and the library's kernels do not begin before earlier launches have ended.
bool library_pays(const ManyRowsProblem& problem) {
  return problem.batches == 1 && problem.rows > 64;
}

int64_t rows_alike(int64_t rows) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return round_up(rows, std::max<int64_t>(64, power / 16));
}

}  // namespace fathom::cuda
