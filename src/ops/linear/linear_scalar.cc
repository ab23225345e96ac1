// GEMMs as plain loops: the reference of the packed order, and the fallback without vector units.
// bf16 x is computed in fp32.
#include <cmath>

#include "ops/linear/linear_kernels.h"
#include "tensor/dtype.h"

namespace fathom {
namespace {

void tile_f32(const float* x, int rows, const std::byte* weights, int64_t step_stride, int steps,
              const float* scales, float* sums, const std::byte*, int64_t) {
  for (int r = 0; r < rows; ++r) {
    float block[kPairRows] = {};
    for (int s = 0; s < steps; ++s) {
      const auto* column = reinterpret_cast<const float*>(weights + s * step_stride);
      for (int i = 0; i < kPairRows; ++i) block[i] += x[r * kBlockColumns + s] * column[i];
    }
    for (int i = 0; i < kPairRows; ++i) {
      float& total = sums[r * kPairRows + i];
      total = scales == nullptr ? total + block[i] : std::fma(block[i], scales[i], total);
    }
  }
}

void expand_fp8_to_f32(const std::byte* weights, int64_t step_stride, int steps, float* out) {
  static const auto table = [] {
    struct {
      float of[256];
    } values;
    for (int code = 0; code < 256; ++code) values.of[code] = to_float(e4m3{uint8_t(code)});
    return values;
  }();
  for (int s = 0; s < steps; ++s, weights += step_stride, out += 2 * kPairRows) {
    for (int i = 0; i < kPairRows; ++i) {
      const std::byte* codes = weights + i % 16 / 4 * 16 + i / 16 * 8 + i % 4 * 2;
      out[i] = table.of[static_cast<uint8_t>(codes[0])];
      out[kPairRows + i] = table.of[static_cast<uint8_t>(codes[1])];
    }
  }
}

void expand_bf16_to_f32(const std::byte* weights, int64_t step_stride, int steps, float* out) {
  for (int s = 0; s < steps; ++s, weights += step_stride, out += 2 * kPairRows) {
    const auto* pairs = reinterpret_cast<const bf16*>(weights);
    for (int i = 0; i < kPairRows; ++i) {
      out[i] = to_float(pairs[2 * i]);
      out[kPairRows + i] = to_float(pairs[2 * i + 1]);
    }
  }
}

void store_bf16(const float* sums, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(sums[i]).bits;
}

void add_scaled(const float* sums, float scale, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::fma(sums[i], scale, out[i]);
}

float swiglu(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }

void swiglu_f32(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = swiglu(gate[i], up[i]);
}

void swiglu_bf16(const float* gate, const float* up, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(swiglu(gate[i], up[i])).bits;
}

}  // namespace

const LinearKernels kLinearScalar = {.tile_rows = 4,
                                     .few_rows = 0,
                                     .dot_bf16 = nullptr,
                                     .dot_fp8 = nullptr,
                                     .dot_four_bit = nullptr,
                                     .tile_bf16 = nullptr,
                                     .tile_f32 = tile_f32,
                                     .tile_packed_fp8 = nullptr,
                                     .tile_packed_bf16 = nullptr,
                                     .matrix_bf16 = nullptr,
                                     .matrix_fp8 = nullptr,
                                     .expand_fp8_to_bf16 = nullptr,
                                     .expand_fp8_to_f32 = expand_fp8_to_f32,
                                     .expand_bf16_to_f32 = expand_bf16_to_f32,
                                     .expand_four_bit_to_bf16 = nullptr,
                                     .expand_four_bit_to_f32 = expand_four_bit_to_f32_scalar,
                                     .store_bf16 = store_bf16,
                                     .add_scaled = add_scaled,
                                     .swiglu_f32 = swiglu_f32,
                                     .swiglu_bf16 = swiglu_bf16};

}  // namespace fathom
