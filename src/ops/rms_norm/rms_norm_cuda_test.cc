// The norms on the GPU against the CPU's; the residual to the bit.
#include <gtest/gtest.h>

#include <cmath>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/rms_norm/rms_norm.h"

namespace fathom::cuda {
namespace {

constexpr float kEps = 1e-6f;
constexpr uint16_t kPoison = 0xFFFF;

std::vector<float> on_cpu(std::vector<float>& x, const std::vector<float>& weight, int64_t rows) {
  ThreadPool pool(0);
  const int64_t n = std::ssize(weight);
  std::vector<float> out(x.size());
  fathom::rms_norm(Stream(pool), TensorView(x.data(), {rows, n}),
                   ConstTensorView(weight.data(), {n}), kEps, TensorView(out.data(), {rows, n}));
  return out;
}

// Sums in another order differ in the last bits of fp32; after rounding that is at most the other
// of two neighbouring bf16 numbers.
void expect_rounded(const std::vector<uint16_t>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(from_bf16(actual[i]) - expected[i]), std::abs(expected[i]) * 0.00392f)
        << "element " << i;
  }
}

void poison(const DeviceArray<uint16_t>& out) {
  check(cudaMemset(out.data(), 0xFF, out.bytes()), "poisoning");
}

struct AddCase {
  int64_t rows, n;
  int delta;  // 0: none, 1: bf16, 2: f32
};

void compare_add(const AddCase& shape) {
  std::mt19937 random(static_cast<uint32_t>(shape.rows * 31 + shape.n + shape.delta));
  const int64_t size = shape.rows * shape.n, stride = shape.n + 8;
  const auto weight = random_f32(shape.n, 1, random);
  const auto residual = random_f32(size, 3, random);
  const auto narrow = random_bf16(shape.rows * stride, 2, random);
  const auto wide = shape.delta == 2 ? random_f32(shape.rows * stride, 2, random) : widen(narrow);
  std::vector<float> sum = residual;
  for (int64_t row = 0; shape.delta != 0 && row < shape.rows; ++row) {
    for (int64_t i = 0; i < shape.n; ++i) sum[row * shape.n + i] += wide[row * stride + i];
  }
  const auto expected = on_cpu(sum, weight, shape.rows);

  const DeviceArray<float> device_weight(weight), device_wide(wide);
  const DeviceArray<uint16_t> device_narrow(narrow), out(size);
  DeviceArray<float> device_residual(size);
  AddRmsNormArguments arguments;
  arguments.residual = device_residual.data();
  if (shape.delta == 1) arguments.delta = device_narrow.data();
  if (shape.delta == 2) arguments.delta = device_wide.data();
  arguments.delta_type = shape.delta == 2 ? DType::kF32 : DType::kBF16;
  arguments.delta_stride = stride;
  arguments.weight = device_weight.data();
  arguments.eps = kEps;
  arguments.out = out.data();
  arguments.rows = shape.rows;
  arguments.n = shape.n;
  std::vector<uint16_t> first;
  for (int launch = 0; launch < 3; ++launch) {
    device_residual.copy_from(residual);
    poison(out);
    add_rms_norm(arguments, nullptr);
    check(cudaDeviceSynchronize(), "add_rms_norm");
    const auto values = out.to_host();
    if (launch == 0) first = values;
    ASSERT_EQ(values, first);
    ASSERT_EQ(device_residual.to_host(), sum);
  }
  expect_rounded(first, expected);
}

TEST(AddRmsNorm, EqualsTheCpu) {
  for (const int64_t n : {8, 256, 264, 2048, 5120, 7168, 8192, 8200, 16384}) {
    for (const int64_t rows : {1, 2, 7, 300}) {
      for (const int delta : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << n << ", delta " << delta);
        compare_add({rows, n, delta});
      }
    }
  }
}

TEST(AddRmsNorm, RowsByIndexLeaveTheResidual) {
  std::mt19937 random(3);
  constexpr int64_t kRows = 50, kN = 2048;
  const auto weight = random_f32(kN, 1, random);
  auto residual = random_f32(kRows * kN, 3, random);
  const auto delta = random_bf16(kRows * kN, 2, random);
  const std::vector<int32_t> ids = {49, 0, 7, -1, 7, 12};
  std::vector<float> sum;
  for (const int32_t id : ids) {
    const int64_t row = id < 0 ? 0 : id;
    for (int64_t i = 0; i < kN; ++i) {
      sum.push_back(residual[row * kN + i] + from_bf16(delta[row * kN + i]));
    }
  }
  auto expected = on_cpu(sum, weight, std::ssize(ids));
  // A row that nobody asks for may hold anything.
  for (int64_t i = 0; i < kN; ++i) residual[30 * kN + i] = std::nanf("");

  const DeviceArray<float> device_weight(weight), device_residual(residual);
  const DeviceArray<float> gathered(std::ssize(sum));
  const DeviceArray<uint16_t> device_delta(delta), out(std::ssize(ids) * kN);
  const DeviceArray<int32_t> device_ids(ids);
  poison(out);
  check(cudaMemset(gathered.data(), 0xFF, gathered.bytes()), "poisoning");
  add_rms_norm({.residual = device_residual.data(),
                .delta = device_delta.data(),
                .delta_stride = kN,
                .row_ids = device_ids.data(),
                .gathered = gathered.data(),
                .weight = device_weight.data(),
                .eps = kEps,
                .out = out.data(),
                .rows = std::ssize(ids),
                .n = kN},
               nullptr);
  check(cudaDeviceSynchronize(), "add_rms_norm");
  const auto sums = gathered.to_host();
  for (int64_t i = 0; i < std::ssize(sum); ++i) {
    if (i / kN == 3) {
      ASSERT_TRUE(std::isnan(sums[i]));
    } else {
      ASSERT_EQ(sums[i], sum[i]) << i;
    }
  }
  auto actual = out.to_host();
  for (int64_t i = 0; i < kN; ++i) {
    ASSERT_EQ(actual[3 * kN + i], kPoison);
    actual[3 * kN + i] = 0;
    expected[3 * kN + i] = 0;
  }
  expect_rounded(actual, expected);
  const auto after = device_residual.to_host();
  for (size_t i = 0; i < after.size(); ++i) {
    ASSERT_TRUE(after[i] == residual[i] || std::isnan(residual[i]));
  }
}

TEST(RmsNorm, OfColumnsOfWiderRowsAndInPlace) {
  for (const int64_t n : {128, 512, 1536}) {
    std::mt19937 random(static_cast<uint32_t>(n));
    constexpr int64_t kRows = 33;
    const int64_t stride = n + 576;
    const auto weight = random_f32(n, 1, random);
    const auto x = random_bf16(kRows * stride, 2, random);
    std::vector<float> dense;
    for (int64_t i = 0; i < kRows * n; ++i) {
      dense.push_back(from_bf16(x[i / n * stride + i % n]));
    }
    const auto expected = on_cpu(dense, weight, kRows);
    const DeviceArray<float> device_weight(weight);
    const DeviceArray<uint16_t> device_x(x), out(kRows * n);
    RmsNormArguments arguments = {.x = device_x.data(),
                                  .x_stride = stride,
                                  .weight = device_weight.data(),
                                  .eps = kEps,
                                  .out = out.data(),
                                  .out_stride = n,
                                  .rows = kRows,
                                  .n = n};
    poison(out);
    rms_norm(arguments, nullptr);
    arguments.out = device_x.data();
    arguments.out_stride = stride;
    rms_norm(arguments, nullptr);
    check(cudaDeviceSynchronize(), "rms_norm");
    const auto values = out.to_host(), in_place = device_x.to_host();
    expect_rounded(values, expected);
    for (int64_t i = 0; i < kRows * stride; ++i) {
      const int64_t row = i / stride, column = i % stride;
      ASSERT_EQ(in_place[i], column < n ? values[row * n + column] : x[i]);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
