#include "device/cuda/random_data.h"

#include <bit>

namespace fathom::cuda {
namespace {

// The sum of four bytes: cheap, and close enough to normal.
float about_normal(float deviation, std::mt19937& random) {
  const uint32_t bits = static_cast<uint32_t>(random());
  const auto sum =
      static_cast<float>((bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24)) /
      255.0f;
  return (sum - 2.0f) * 1.7f * deviation;
}

}  // namespace

uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

std::vector<float> widen(const std::vector<uint16_t>& values) {
  std::vector<float> wide(values.size());
  for (size_t i = 0; i < values.size(); ++i) wide[i] = from_bf16(values[i]);
  return wide;
}

std::vector<uint16_t> random_bf16(int64_t count, float deviation, std::mt19937& random) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = bf16_bits(about_normal(deviation, random));
  return values;
}

std::vector<float> random_f32(int64_t count, float deviation, std::mt19937& random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = about_normal(deviation, random);
  return values;
}

}  // namespace fathom::cuda
