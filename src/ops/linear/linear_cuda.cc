#include "ops/linear/linear_cuda.h"

#include "base/check.h"
#include "device/cuda/launch.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/library_plan.h"
#include "ops/linear/many_rows_cuda.h"
#include "ops/linear/one_row_cuda.h"
#include "ops/linear/one_row_plan.h"

namespace fathom::cuda {

void linear(const LinearArguments& a, GpuStream stream) {
  FATHOM_CHECK(a.n % 8 == 0 && a.k % 64 == 0 && a.n > 0 && a.k > 0, "a matrix of [{}, {}]", a.n,
               a.k);
  FATHOM_CHECK(a.x_row_stride % 8 == 0 && a.x_batch_stride % 8 == 0 && a.out_row_stride % 8 == 0 &&
                   a.out_batch_stride % 8 == 0,
               "strides {}, {} of x and {}, {} of out are no multiples of 8", a.x_row_stride,
               a.x_batch_stride, a.out_row_stride, a.out_batch_stride);
  FATHOM_CHECK(a.out_type == DType::kBF16 || a.out_type == DType::kF32, "out is {}",
               name_of(a.out_type));
  if (a.rows == 0 || a.batches == 0) return;
  if (a.library != nullptr && !a.batch_invariant &&
      library_pays({.rows = a.rows, .n = a.n, .k = a.k, .batches = a.batches}) &&
      a.library->multiply(a, stream)) {
    return;
  }
  if (a.rows == 1 && !a.batch_invariant &&
      one_row_pays({.n = a.n, .k = a.k, .batches = a.batches},
                   stream.device().num_multiprocessors())) {
    linear_one_row(a, stream);
  } else if (a.rows <= kFewRows) {
    linear_few_rows(a, stream);
  } else {
    linear_many_rows(a, stream);
  }
}

}  // namespace fathom::cuda
