// Compiled with -mavx2 -mfma: the compiler vectorises the portable loops.
#include "ops/attention/cpu/attention_portable.h"

namespace fathom::cpu {

const AttentionKernels kAvx2Attention = kPortable;

}  // namespace fathom::cpu
