// The probe's loops, one set a CPU level; compiled like the operations' vector files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom {

struct ProbeKernels {
  // Reads bytes (a multiple of 1024) from an address aligned to 64; the result depends on them.
  uint64_t (*read)(const std::byte* data, int64_t bytes);
  // `count` rounds of independent multiply-adds; returns the operations of one round.
  int64_t (*bf16)(int64_t count, float* out);
  int64_t (*f32)(int64_t count, float* out);
};

extern const ProbeKernels kProbePortable;
#if defined(__x86_64__)
extern const ProbeKernels kProbeAvx2;
extern const ProbeKernels kProbeAvx512;
extern const ProbeKernels kProbeAmx;  // reads and fp32 as AVX-512
#endif

}  // namespace fathom
