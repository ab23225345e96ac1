#include "ops/linear/linear_kernels.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/linear/linear_test_data.h"

namespace fathom {
namespace {

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// All 256 codes, in the packed order of one pair's steps: 2 columns of 32 rows a step.
TEST(LinearKernels, ExpandsEveryE4m3CodeExactly) {
  const Buffer buffer = *Buffer::allocate(4 * 64, "test");
  std::vector<uint8_t> order(256);
  for (int i = 0; i < 256; ++i) {
    const int column = i / 32, row = i % 32;
    const int at = column / 2 * 64 + row % 16 / 4 * 16 + row / 16 * 8 + row % 4 * 2 + column % 2;
    buffer.data()[at] = static_cast<std::byte>(i);
  }
  for (const CpuIsa isa : runnable_levels()) {
    const LinearKernels& kernels = linear_kernels(isa);
    float wide[256];
    kernels.expand_fp8_to_f32(buffer.data(), 64, 4, wide);
    for (int i = 0; i < 256; ++i) {
      EXPECT_TRUE(same(wide[i], to_float(e4m3{static_cast<uint8_t>(i)}))) << name_of(isa) << i;
    }
    if (kernels.expand_fp8_to_bf16 == nullptr) continue;
    bf16 pairs[256];
    kernels.expand_fp8_to_bf16(buffer.data(), 64, 4, reinterpret_cast<std::byte*>(pairs), 128);
    for (int i = 0; i < 256; ++i) {
      const int column = i / 32, row = i % 32;
      EXPECT_TRUE(same(to_float(pairs[column / 2 * 64 + row * 2 + column % 2]),
                       to_float(e4m3{static_cast<uint8_t>(i)})))
          << name_of(isa) << i;
    }
  }
}

TEST(LinearKernels, StoresBf16AsToBf16Does) {
  std::vector<float> values;
  for (uint64_t i = 0; i < 4000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random_bits(1, 2, i))));
  }
  for (const float special : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f, 3.4e38f}) {
    values.push_back(special);
  }
  for (const CpuIsa isa : runnable_levels()) {
    for (const int64_t count :
         {int64_t{1}, int64_t{9}, int64_t{31}, static_cast<int64_t>(values.size())}) {
      std::vector<uint16_t> out(values.size() + 1, 0xABCD);
      linear_kernels(isa).store_bf16(values.data(), count, out.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        EXPECT_EQ(out[at], to_bf16(values[at]).bits) << name_of(isa) << " " << values[at];
      }
      EXPECT_EQ(out[static_cast<size_t>(count)], 0xABCD);
    }
  }
}

TEST(LinearKernels, AddScaledAndSwiglu) {
  std::vector<float> gate, up;
  for (int64_t i = 0; i < 1003; ++i) {
    gate.push_back(testing::random_value(3, 1, i) * (i % 5 == 0 ? 120.0f : 8.0f));
    up.push_back(testing::random_value(3, 2, i));
  }
  gate[3] = 0;
  gate[4] = 200;
  gate[5] = -200;
  gate[6] = NAN;
  for (const CpuIsa isa : runnable_levels()) {
    for (const int64_t count : {1, 15, 32, 1003}) {
      std::vector<float> sum = up, out(1004, -7.0f);
      std::vector<uint16_t> rounded(1004, 0xABCD);
      linear_kernels(isa).add_scaled(gate.data(), 0.3f, count, sum.data());
      linear_kernels(isa).swiglu_f32(gate.data(), up.data(), count, out.data());
      linear_kernels(isa).swiglu_bf16(gate.data(), up.data(), count, rounded.data());
      for (int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<size_t>(i);
        EXPECT_TRUE(same(sum[at], std::fma(gate[at], 0.3f, up[at]))) << name_of(isa);
        const double g = gate[at];
        const double expected = g / (1 + std::exp(-g)) * up[at];
        if (std::isnan(g)) {
          EXPECT_TRUE(std::isnan(out[at]));
        } else {
          EXPECT_NEAR(out[at], expected, 4e-7 * std::abs(expected) + 1e-36) << name_of(isa) << g;
        }
        EXPECT_EQ(rounded[at], to_bf16(out[at]).bits);
      }
      EXPECT_EQ(out[static_cast<size_t>(count)], -7.0f);
      EXPECT_EQ(rounded[static_cast<size_t>(count)], 0xABCD);
    }
  }
}

}  // namespace
}  // namespace fathom
