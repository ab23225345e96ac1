#include <algorithm>

#include "ops/draft_head/draft_head_kernels.h"

namespace fathom {

void panel_sums_scalar(const uint8_t* x, int rows, const int8_t* panel, int64_t steps,
                       int32_t* sums) {
  std::fill_n(sums, rows * kPanelRows, 0);
  for (int64_t s = 0; s < steps; ++s, panel += kPanelRows * kStepColumns) {
    for (int r = 0; r < rows; ++r) {
      const uint8_t* const four = x + (r * steps + s) * kStepColumns;
      for (int i = 0; i < kPanelRows; ++i) {
        const int8_t* const weights = panel + i * kStepColumns;
        int32_t sum = 0;
        for (int c = 0; c < kStepColumns; ++c) sum += four[c] * weights[c];
        sums[r * kPanelRows + i] += sum;
      }
    }
  }
}

}  // namespace fathom
