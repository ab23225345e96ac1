#include "checkpoint/dummy_weights.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/random.h"

namespace fathom {
namespace {

uint64_t stream_of(std::string_view name, uint64_t seed) {
  uint64_t state = mix64(seed);
  for (const char c : name) state = mix64(state ^ static_cast<unsigned char>(c));
  return state;
}

// Uniform in [center - spread, center + spread), four values for each 64 random bits: 16 bits are
// more than the narrow types hold.
template <typename T, typename Convert>
void fill_uniform(uint64_t stream, float center, float spread, std::span<std::byte> out,
                  const Convert& convert) {
  const size_t count = out.size() / sizeof(T);
  auto* values = reinterpret_cast<T*>(out.data());
  for (size_t i = 0; i < count; i += 4) {
    uint64_t bits = mix64(stream ^ i);
    for (size_t j = i; j < std::min(i + 4, count); ++j, bits >>= 16) {
      const float unit = static_cast<float>(bits & 0xFFFF) * 0x1p-15f - 1.0f;
      values[j] = convert(center + spread * unit);
    }
  }
}

// Eight e4m3 at a time; the two NaN patterns become the largest finite value.
void fill_e4m3(uint64_t stream, std::span<std::byte> out) {
  for (size_t i = 0; i < out.size(); i += 8) {
    uint64_t bits = mix64(stream ^ i);
    for (size_t j = i; j < std::min(i + 8, out.size()); ++j, bits >>= 8) {
      auto byte = static_cast<uint8_t>(bits);
      if ((byte & 0x7F) == 0x7F) --byte;
      out[j] = std::byte{byte};
    }
  }
}

// The root mean square of fill_e4m3's values.
float e4m3_rms() {
  double sum = 0;
  for (int byte = 0; byte < 128; ++byte) {
    const float value = to_float(e4m3{static_cast<uint8_t>(byte == 0x7F ? 0x7E : byte)});
    sum += static_cast<double>(value) * value;
  }
  return static_cast<float>(std::sqrt(sum / 128));
}

}  // namespace

void fill_dummy(std::string_view name, DType dtype, int64_t cols, uint64_t seed,
                std::span<std::byte> out) {
  const uint64_t stream = stream_of(name, seed);
  const bool norm = name.find("norm") != std::string_view::npos;
  const bool bias = name.ends_with("bias");
  const float center = norm ? 1.0f : 0.0f;
  // A uniform distribution of half-width sqrt(3 / cols) has variance 1 / cols.
  const float spread = norm   ? 0.1f
                       : bias ? 0.01f
                              : std::sqrt(3.0f / static_cast<float>(std::max<int64_t>(cols, 1)));
  switch (dtype) {
    case DType::kF32:
      return fill_uniform<float>(stream, center, spread, out, [](float x) { return x; });
    case DType::kBF16:
      return fill_uniform<bf16>(stream, center, spread, out, [](float x) { return to_bf16(x); });
    case DType::kF16:
      return fill_uniform<f16>(stream, center, spread, out, [](float x) { return to_f16(x); });
    case DType::kF8E4M3:
      return fill_e4m3(stream, out);
    default:
      FATHOM_CHECK(false, "a dummy weight of type {}", name_of(dtype));
  }
}

void fill_dummy_scales(std::string_view name, int64_t cols, bool powers_of_two, uint64_t seed,
                       std::span<float> out) {
  static const float kRms = e4m3_rms();
  const uint64_t stream = stream_of(name, seed);
  const float middle = 1.0f / (kRms * std::sqrt(static_cast<float>(cols)));
  fill_uniform<float>(stream, middle, 0.1f * middle, std::as_writable_bytes(out), [&](float x) {
    return powers_of_two ? std::exp2(std::round(std::log2(x))) : x;
  });
}

}  // namespace fathom
