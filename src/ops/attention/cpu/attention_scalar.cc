#include "ops/attention/cpu/attention_portable.h"

namespace fathom::cpu {

const AttentionKernels kScalarAttention = kPortable;

}  // namespace fathom::cpu
