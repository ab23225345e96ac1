// Random bf16 values for GPU tests and benchmarks.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace fathom::cuda {

// Bits of the bf16 number nearest to `value`, and back.
uint16_t bf16_bits(float value);
float from_bf16(uint16_t bits);
std::vector<float> widen(const std::vector<uint16_t>& values);

// About normal with this deviation.
std::vector<uint16_t> random_bf16(int64_t count, float deviation, std::mt19937& random);
std::vector<float> random_f32(int64_t count, float deviation, std::mt19937& random);

}  // namespace fathom::cuda
