#include "device/cpu/isa.h"

#include <algorithm>
#include <cstdlib>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fathom {
namespace {

constexpr CpuIsa kLevels[] = {CpuIsa::kScalar, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAmx};

// Linux (5.16 and later) enables the tiles' 8 KiB of register state only for processes that request
// it; the permission holds for all threads of the process.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h
  constexpr long kTileData = 18;               // the state's number in XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuIsa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("gfni");
  const bool amx = avx512 && __builtin_cpu_supports("amx-tile") &&
                   __builtin_cpu_supports("amx-bf16") && may_use_tiles();
  return amx ? CpuIsa::kAmx : avx512 ? CpuIsa::kAvx512 : avx2 ? CpuIsa::kAvx2 : CpuIsa::kScalar;
#else
  return CpuIsa::kScalar;
#endif
}

CpuIsa detect_lowered() {
  const CpuIsa best = detect();
  const char* wanted = std::getenv("FATHOM_CPU_ISA");
  if (wanted == nullptr) return best;
  for (const CpuIsa isa : kLevels) {
    if (wanted == name_of(isa)) return std::min(isa, best);
  }
  return best;
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = detect_lowered();
  return isa;
}

bool prefers_fma_for_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") > 0;
#else
  return false;
#endif
}

std::string_view name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kScalar:
      return "scalar";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAmx:
      return "amx";
  }
  return "?";
}

std::vector<CpuIsa> runnable_levels() {
  std::vector<CpuIsa> levels(std::begin(kLevels), std::end(kLevels));
  std::erase_if(levels, [](CpuIsa isa) { return isa > cpu_isa(); });
  return levels;
}

}  // namespace fathom
