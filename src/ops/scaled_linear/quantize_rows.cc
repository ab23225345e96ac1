#include "ops/scaled_linear/quantize_rows.h"

#include <algorithm>
#include <cmath>

namespace fathom {

float quantize_block(std::span<const bf16> x, ScaleForm form, std::span<e4m3> values) {
  float magnitude = kLeastMagnitude;
  for (const bf16 value : x) magnitude = std::max(magnitude, std::abs(to_float(value)));
  float scale = magnitude / kLargestE4M3, inverse = kLargestE4M3 / magnitude;
  if (form == ScaleForm::kPowerOfTwo) {
    scale = next_power_of_two(scale);
    inverse = 1 / scale;
  }
  for (size_t i = 0; i < x.size(); ++i) values[i] = to_e4m3(to_float(x[i]) * inverse);
  return scale;
}

void quantize_block(std::span<const bf16> x, float scale, std::span<e4m3> values) {
  const float inverse = 1 / scale;
  for (size_t i = 0; i < x.size(); ++i) values[i] = to_e4m3(to_float(x[i]) * inverse);
}

}  // namespace fathom
