// Which products a library is faster at than this program's own kernels, as measured.
#pragma once

#include "ops/linear/many_rows_plan.h"

namespace fathom::cuda {

bool library_pays(const ManyRowsProblem& problem);

// The largest number of rows that the library treats as it does `rows`: what it does is chosen for
// that one.
int64_t rows_alike(int64_t rows);

}  // namespace fathom::cuda
