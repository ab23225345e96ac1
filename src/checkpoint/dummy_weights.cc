#include "checkpoint/dummy_weights.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/check.h"

namespace fathom {
namespace {

uint64_t stream_of(std::string_view name, uint64_t seed) {
  uint64_t state = mix64(seed);
  for (const char c : name) state = mix64(state ^ static_cast<unsigned char>(c));
  return state;
}

template <typename T, typename Convert>
void fill_values(const DummyValues& values, std::span<std::byte> out, const Convert& convert) {
  auto* const to = reinterpret_cast<T*>(out.data());
  const auto count = static_cast<int64_t>(out.size() / sizeof(T));
  for (int64_t first = 0; first < count; first += kDummyUnits) {
    const uint64_t bits = values.bits(first, kDummyUnits);
    for (int64_t i = first; i < std::min(first + kDummyUnits, count); ++i) {
      to[i] = convert(values.center + values.spread * dummy_unit(bits, i));
    }
  }
}

void fill_e4m3(const DummyValues& values, std::span<std::byte> out) {
  const int64_t count = std::ssize(out);
  for (int64_t first = 0; first < count; first += kDummyBytes) {
    const uint64_t bits = values.bits(first, kDummyBytes);
    for (int64_t i = first; i < std::min(first + kDummyBytes, count); ++i) {
      out[static_cast<size_t>(i)] = std::byte{dummy_e4m3(bits, i)};
    }
  }
}

// The root mean square of dummy_e4m3()'s values.
float e4m3_rms() {
  double sum = 0;
  for (int byte = 0; byte < 128; ++byte) {
    const float value = to_float(e4m3{static_cast<uint8_t>(byte == 0x7F ? 0x7E : byte)});
    sum += static_cast<double>(value) * value;
  }
  return static_cast<float>(std::sqrt(sum / 128));
}

}  // namespace

DummyValues dummy_values(std::string_view name, int64_t cols, uint64_t seed) {
  const bool norm = name.find("norm") != std::string_view::npos;
  const bool bias = name.ends_with("bias");
  // A uniform distribution of half-width sqrt(3 / cols) has variance 1 / cols.
  const float spread = norm   ? 0.1f
                       : bias ? 0.01f
                              : std::sqrt(3.0f / static_cast<float>(std::max<int64_t>(cols, 1)));
  return {stream_of(name, seed), norm ? 1.0f : 0.0f, spread};
}

void fill_dummy(std::string_view name, DType dtype, int64_t cols, uint64_t seed,
                std::span<std::byte> out) {
  const DummyValues values = dummy_values(name, cols, seed);
  switch (dtype) {
    case DType::kF32:
      return fill_values<float>(values, out, [](float x) { return x; });
    case DType::kBF16:
      return fill_values<bf16>(values, out, [](float x) { return to_bf16(x); });
    case DType::kF16:
      return fill_values<f16>(values, out, [](float x) { return to_f16(x); });
    case DType::kF8E4M3:
      return fill_e4m3(values, out);
    default:
      FATHOM_CHECK(false, "a dummy weight of type {}", name_of(dtype));
  }
}

void fill_dummy_scales(std::string_view name, int64_t cols, bool powers_of_two, uint64_t seed,
                       std::span<float> out) {
  static const float kRms = e4m3_rms();
  const float middle = 1.0f / (kRms * std::sqrt(static_cast<float>(cols)));
  const DummyValues values = {stream_of(name, seed), middle, 0.1f * middle};
  fill_values<float>(values, std::as_writable_bytes(out), [&](float x) {
    return powers_of_two ? std::exp2(std::round(std::log2(x))) : x;
  });
}

void fill_dummy_codes(std::string_view name, uint64_t seed, std::span<uint8_t> out) {
  const DummyValues values = {stream_of(name, seed), 0, 0};
  const int64_t count = std::ssize(out);
  for (int64_t first = 0; first < count; first += kDummyCodes) {
    const uint64_t bits = values.bits(first, kDummyCodes);
    for (int64_t i = first; i < std::min(first + kDummyCodes, count); ++i) {
      out[static_cast<size_t>(i)] = dummy_code(bits, i);
    }
  }
}

void fill_dummy_four_bit_scales(std::string_view name, FourBitCode code, int64_t cols,
                                uint64_t seed, std::span<float> out) {
  float sum = 0;
  for (int i = 0; i < kFourBitCodes; ++i) {
    const float value = four_bit_value(code, i, kSymmetricZero);
    sum += value * value;
  }
  const float rms = std::sqrt(sum / kFourBitCodes);
  const float middle = 1.0f / (rms * std::sqrt(static_cast<float>(cols)));
  const DummyValues values = {stream_of(std::string(name) + "_scale", seed), middle, 0.1f * middle};
  fill_values<float>(values, std::as_writable_bytes(out), [](float x) { return x; });
}

}  // namespace fathom
