// The vector instructions of this CPU, detected at run time.
//
// FATHOM_CPU_ISA=scalar|avx2|avx512|amx lowers the level (never raises it): for tests and
// comparisons.
#pragma once

#include <string_view>
#include <vector>

// Function attribute: compiles for CpuIsa::kAvx512 (and above), whatever the file is compiled for.
// For simple loops that the compiler vectorises by itself; the functions they call must be inlined.
#if defined(__x86_64__)
#define FATHOM_FOR_AVX512 \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#else
#define FATHOM_FOR_AVX512
#endif

namespace fathom {

enum class CpuIsa {
  kScalar,  // portable C++
  kAvx2,    // AVX2, FMA, F16C
  kAvx512,  // AVX-512 F, BW, DQ, VL, VBMI, VNNI and BF16, GFNI (Zen 4, Sapphire Rapids)
  kAmx,     // kAvx512 and AMX tiles of bf16 (Sapphire Rapids)
};

// The best level of this CPU, lowered by the environment. Read once.
CpuIsa cpu_isa();

std::string_view name_of(CpuIsa isa);

// Whether fp32 FMAs do more multiply-adds of bf16 than vdpbf16ps does: on Intel's CPUs
// (device/cpu/bf16_fma_avx512.h). The bits are the same.
bool prefers_fma_for_bf16();

// The levels up to cpu_isa(), ascending: all of them can run here.
std::vector<CpuIsa> runnable_levels();

}  // namespace fathom
