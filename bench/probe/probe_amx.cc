#include <immintrin.h>

#include "bench/probe/probe_kernels.h"
#include "device/cpu/tile_state.h"

namespace fathom {
namespace {

// Four tiles of sums, as many as a kernel keeps beside its operands; the factors are 2^-7 and 2^-8,
// so that the sums stay finite.
int64_t bf16(int64_t count, float* out) {
  alignas(64) uint16_t factors[2][16 * 32];
  for (int i = 0; i < 16 * 32; ++i) {
    factors[0][i] = 0x3C00;
    factors[1][i] = 0x3B80;
  }
  alignas(64) float sums[16 * 16];
  const TileState state;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, factors[0], 64);
  _tile_loadd(5, factors[1], 64);
  for (int64_t i = 0; i < count; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, 64);
  out[0] += sums[0];
  _tile_stored(3, sums, 64);
  out[0] += sums[0];
  return 4 * 2 * 16 * 16 * 32;
}

uint64_t read(const std::byte* data, int64_t bytes) { return kProbeAvx512.read(data, bytes); }
int64_t f32(int64_t count, float* out) { return kProbeAvx512.f32(count, out); }

}  // namespace

extern const ProbeKernels kProbeAmx;
const ProbeKernels kProbeAmx = {read, bf16, f32};

}  // namespace fathom
