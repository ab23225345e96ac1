#include "ops/linear/linear_kernels.h"

namespace fathom {

const LinearKernels& linear_kernels(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAmx) return linear_amx();
  if (isa == CpuIsa::kAvx512) return prefers_fma_for_bf16() ? linear_avx512_fma() : kLinearAvx512;
  if (isa == CpuIsa::kAvx2) return kLinearAvx2;
#endif
  static_cast<void>(isa);
  return kLinearScalar;
}

}  // namespace fathom
