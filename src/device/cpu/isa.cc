#include "device/cpu/isa.h"

#include <algorithm>
#include <cstdlib>

namespace fathom {
namespace {

CpuIsa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512bf16");
  return avx512 ? CpuIsa::kAvx512 : avx2 ? CpuIsa::kAvx2 : CpuIsa::kScalar;
#else
  return CpuIsa::kScalar;
#endif
}

CpuIsa detect_lowered() {
  const CpuIsa best = detect();
  const char* wanted = std::getenv("FATHOM_CPU_ISA");
  if (wanted == nullptr) return best;
  for (const CpuIsa isa : {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (wanted == name_of(isa)) return std::min(isa, best);
  }
  return best;
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = detect_lowered();
  return isa;
}

std::string_view name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kScalar:
      return "scalar";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "?";
}

}  // namespace fathom
