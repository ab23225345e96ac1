#include "cache/index_key_row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cache/index_key_quantize.h"
#include "tensor/dtype.h"

namespace fathom {
namespace {

constexpr float kIndexE4M3Max = 448;
constexpr float kIndexAmaxFloor = 1e-4f;

}  // namespace

float index_scale(float amax) {
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  const auto bits = std::bit_cast<uint32_t>(std::max(amax, kIndexAmaxFloor) / kIndexE4M3Max);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  return std::bit_cast<float>(exponent << 23);
}

void encode_index_key(const IndexKeyLayout& layout, const float* key, std::byte* row) {
  const auto size = static_cast<size_t>(layout.dim);
  switch (layout.format) {
    case IndexKeyFormat::kF32:
      std::memcpy(row, key, size * sizeof(float));
      return;
    case IndexKeyFormat::kBF16:
      for (size_t i = 0; i < size; ++i) {
        const bf16 value = to_bf16(key[i]);
        std::memcpy(row + i * sizeof value, &value, sizeof value);
      }
      return;
    case IndexKeyFormat::kE4M3:
      break;
  }
  const float scale = quantize_index_row(key, layout.dim, reinterpret_cast<uint8_t*>(row));
  std::memcpy(row + size, &scale, sizeof scale);
}

void decode_index_key(const IndexKeyLayout& layout, const std::byte* row, float* key) {
  const auto size = static_cast<size_t>(layout.dim);
  switch (layout.format) {
    case IndexKeyFormat::kF32:
      std::memcpy(key, row, size * sizeof(float));
      return;
    case IndexKeyFormat::kBF16:
      for (size_t i = 0; i < size; ++i) {
        bf16 value;
        std::memcpy(&value, row + i * sizeof value, sizeof value);
        key[i] = to_float(value);
      }
      return;
    case IndexKeyFormat::kE4M3:
      break;
  }
  float scale = 0;
  std::memcpy(&scale, row + size, sizeof scale);
  for (size_t i = 0; i < size; ++i) {
    key[i] = to_float(e4m3{std::to_integer<uint8_t>(row[i])}) * scale;
  }
}

}  // namespace fathom
