// Tables of four-bit codes, and their dequantization as plain loops.
#include "ops/linear/linear_kernels.h"
#include "tensor/dtype.h"
#include "tensor/four_bit.h"

namespace fathom {
namespace {

FourBitTable make_table(FourBitCode code, bool zeros) {
  FourBitTable table;
  for (int i = 0; i < 2 * kFourBitCodes; ++i) {
    const float value = zeros ? static_cast<float>(i - kFourBitCodes)
                              : four_bit_value(code, i % kFourBitCodes, kSymmetricZero);
    table.bf16[i] = to_bf16(value).bits;
    if (i < kFourBitCodes) table.f32[i] = value;
  }
  return table;
}

}  // namespace

const FourBitTable& four_bit_table(FourBitCode code, bool zeros) {
  static const FourBitTable symmetric = make_table(FourBitCode::kInteger, false);
  static const FourBitTable shifted = make_table(FourBitCode::kInteger, true);
  static const FourBitTable e2m1 = make_table(FourBitCode::kE2m1, false);
  if (code == FourBitCode::kE2m1) return e2m1;
  return zeros ? shifted : symmetric;
}

void expand_four_bit_to_f32_scalar(const std::byte* weights, int64_t step_stride, int steps,
                                   const FourBitTable& table, const uint8_t* zeros, float* out) {
  for (int s = 0; s < steps; ++s, weights += step_stride, out += 4 * kPairRows) {
    for (int i = 0; i < kPairRows; ++i) {
      const float shift = zeros == nullptr ? 0.0f : static_cast<float>(zeros[i]);
      const std::byte* codes = weights + i % 16 * 4 + i / 16;
      for (int c = 0; c < 4; ++c) {
        const auto byte = static_cast<uint8_t>(codes[c % 2 * 2]);
        out[c * kPairRows + i] = table.f32[c < 2 ? byte & 0xF : byte >> 4] + shift;
      }
    }
  }
}

}  // namespace fathom
