// The portable loops, compiled with AVX2 and FMA.
#include "ops/indexer/index_kernels_portable.h"

namespace fathom::cpu {

const IndexKernels kAvx2Index = kPortable;

}  // namespace fathom::cpu
