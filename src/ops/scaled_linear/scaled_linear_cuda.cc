#include "ops/scaled_linear/scaled_linear_cuda.h"

#include "base/check.h"
#include "ops/scaled_linear/scaled_few_rows_cuda.h"
#include "ops/scaled_linear/scaled_many_rows_cuda.h"

namespace fathom::cuda {

void scaled_linear(const ScaledLinearArguments& a, GpuStream stream) {
  FATHOM_CHECK(a.n % 8 == 0 && a.k % 128 == 0 && a.n > 0 && a.k > 0, "a matrix of [{}, {}]", a.n,
               a.k);
  FATHOM_CHECK(a.x_row_stride % 16 == 0 && a.x_scales_stride % 4 == 0 && a.out_row_stride % 8 == 0,
               "strides {} of x, {} of its scales, {} of out are no multiples of 16, 4, 8",
               a.x_row_stride, a.x_scales_stride, a.out_row_stride);
  FATHOM_CHECK(a.out_type == DType::kBF16 || a.out_type == DType::kF32, "out is {}",
               name_of(a.out_type));
  if (a.rows <= kFewScaledRows) {
    scaled_linear_few_rows(a, stream);
  } else {
    scaled_linear_many_rows(a, stream);
  }
}

}  // namespace fathom::cuda
