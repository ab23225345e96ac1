#include "ops/indexer/index_kernels_portable.h"

namespace fathom::cpu {

const IndexKernels kScalarIndex = kPortable;

}  // namespace fathom::cpu
