// Random weights for --load-format dummy: timing without a download. Reproducible: a value depends
// only on the seed, the tensor's name and the position. Magnitudes keep activations near 1, so that
// denormals or infinities do not falsify a timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/random.h"
#include "tensor/dtype.h"
#include "tensor/four_bit.h"

namespace fathom {

// The parameters of a dummy tensor's values. Value i is center + spread * dummy_unit(i) in fp32,
// each operation rounded, then rounded to the tensor's type; in e4m3 it is dummy_e4m3(i), of four
// bits the code is dummy_code(i). So any device can generate them, in any order.
struct DummyValues {
  uint64_t stream = 0;
  float center = 0, spread = 0;

  // The random bits shared by a group of `count` consecutive values.
  constexpr uint64_t bits(int64_t index, int64_t count) const {
    return mix64(stream ^ static_cast<uint64_t>(index & ~(count - 1)));
  }
};
DummyValues dummy_values(std::string_view name, int64_t cols, uint64_t seed);

// Uniform in [-1, 1). Four values share 64 bits; 16 bits each exceed the precision of the narrow
// types.
inline constexpr int64_t kDummyUnits = 4;
constexpr float dummy_unit(uint64_t bits, int64_t index) {
  return static_cast<float>(bits >> 16 * (index % kDummyUnits) & 0xFFFF) * 0x1p-15f - 1.0f;
}

// A random e4m3 value; eight share 64 bits. The two NaN patterns become the largest finite values.
inline constexpr int64_t kDummyBytes = 8;
constexpr uint8_t dummy_e4m3(uint64_t bits, int64_t index) {
  const auto byte = static_cast<uint8_t>(bits >> 8 * (index % kDummyBytes));
  return (byte & 0x7F) == 0x7F ? static_cast<uint8_t>(byte - 1) : byte;
}

// A random four-bit code; sixteen share 64 bits.
inline constexpr int64_t kDummyCodes = 16;
constexpr uint8_t dummy_code(uint64_t bits, int64_t index) {
  return bits >> 4 * (index % kDummyCodes) & 0xF;
}

// Fills `out` with values of type `dtype` (a float type or e4m3) for a tensor whose rows have
// `cols` elements: norms around 1, biases around 0, matrices with variance 1 / cols. e4m3 values
// are random bytes without NaN, which fill_dummy_scales() brings to that variance.
void fill_dummy(std::string_view name, DType dtype, int64_t cols, uint64_t seed,
                std::span<std::byte> out);

// Fills `out` with the scales of a dummy FP8 matrix; powers of two if the format requires it.
void fill_dummy_scales(std::string_view name, int64_t cols, bool powers_of_two, uint64_t seed,
                       std::span<float> out);

// Fills `out` with random four-bit codes, one a byte.
void fill_dummy_codes(std::string_view name, uint64_t seed, std::span<uint8_t> out);

// Fills `out` with scales that bring such codes to a variance of 1 / cols.
void fill_dummy_four_bit_scales(std::string_view name, FourBitCode code, int64_t cols,
                                uint64_t seed, std::span<float> out);

}  // namespace fathom
