// Says for which GEMMs the library is faster than Fathom's own kernels, as measured.
#pragma once

#include "ops/linear/many_rows_plan.h"

namespace fathom::cuda {

bool library_pays(const ManyRowsProblem& problem);

// The largest number of rows in the same class as `rows`: the library's algorithm is chosen for it.
int64_t rows_alike(int64_t rows);

}  // namespace fathom::cuda
