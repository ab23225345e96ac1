#include "ops/attention/attention_portable.h"

namespace fathom::cpu {

const AttentionKernels kScalarAttention = kPortable;

}  // namespace fathom::cpu
