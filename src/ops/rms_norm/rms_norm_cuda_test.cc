// The norms on the GPU against the CPU's; the residual must be bitwise identical.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "base/math.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/rms_norm/add_rms_norm_cuda.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/scaled_linear/quantize_rows.h"

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

// Sums in another order differ in the last bits of fp32; after rounding the result is at most the
// neighbouring bf16 number.
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
  // A row that is not selected may hold anything.
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

// ---- results in e4m3

// Rows of e4m3 with poisoned gaps between rows and after a block's scales.
struct Quantized {
  Quantized(int64_t num_rows, int64_t width, ScaleForm form)
      : rows(num_rows),
        n(width),
        values(rows * (n + 16)),
        scales(n / kScaleBlock * round_up(rows + 1, 4)),
        to{.values = values.data(),
           .values_row_stride = n + 16,
           .scales = scales.data(),
           .scales_block_stride = round_up(rows + 1, 4),
           .form = form} {
    check(cudaMemset(values.data(), 0xFF, values.bytes()), "poisoning");
    check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poisoning");
  }

  // Expects rows of `out` as quantize_block() gives them, and unchanged gaps. Checks the rows that
  // `written` lists; all if it is empty.
  void expect(const std::vector<uint16_t>& out, const std::vector<int32_t>& written = {}) const {
    const int64_t row_stride = to.values_row_stride, block_stride = to.scales_block_stride;
    std::vector<uint8_t> expected(static_cast<size_t>(values.size()), 0xFF);
    std::vector<uint32_t> expected_scales(static_cast<size_t>(scales.size()), ~0u);
    for (int64_t row = 0; row < rows; ++row) {
      if (!written.empty() && written[row] < 0) continue;
      for (int64_t block = 0; block < n / kScaleBlock; ++block) {
        bf16 x[kScaleBlock];
        e4m3 y[kScaleBlock];
        for (int64_t i = 0; i < kScaleBlock; ++i) {
          x[i] = {.bits = out[row * n + block * kScaleBlock + i]};
        }
        float scale = to.fixed_scale;
        if (scale == 0) {
          scale = quantize_block(x, to.form, y);
        } else {
          quantize_block(x, scale, y);
        }
        expected_scales[block * block_stride + row] = std::bit_cast<uint32_t>(scale);
        for (int64_t i = 0; i < kScaleBlock; ++i) {
          expected[row * row_stride + block * kScaleBlock + i] = y[i].bits;
        }
      }
    }
    ASSERT_EQ(values.to_host(), expected);
    const auto actual_scales = scales.to_host();
    for (size_t i = 0; i < actual_scales.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(actual_scales[i]), expected_scales[i]) << "scale " << i;
    }
  }

  int64_t rows, n;
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
  QuantizedRows to;
};

TEST(AddRmsNorm, InE4m3TooIsTheQuantizedResult) {
  for (const int64_t n : {128, 256, 1536, 2048, 5120, 7168, 16384}) {
    for (const int64_t rows : {1, 3, 70}) {
      for (const ScaleForm form : {ScaleForm::kF32, ScaleForm::kPowerOfTwo}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << n);
        std::mt19937 random(static_cast<uint32_t>(rows * 31 + n));
        const DeviceArray<float> weight(random_f32(n, 1, random));
        const auto values = random_f32(rows * n, 3, random);
        const DeviceArray<float> residual(values), again(values);
        const DeviceArray<uint16_t> delta(random_bf16(rows * n, 2, random)), out(rows * n);
        const Quantized both(rows, n, form), alone(rows, n, form);
        AddRmsNormArguments arguments = {.residual = residual.data(),
                                         .delta = delta.data(),
                                         .delta_stride = n,
                                         .weight = weight.data(),
                                         .eps = kEps,
                                         .out = out.data(),
                                         .quantized = both.to,
                                         .rows = rows,
                                         .n = n};
        poison(out);
        add_rms_norm(arguments, nullptr);
        arguments.residual = again.data();
        arguments.out = nullptr;
        arguments.quantized = alone.to;
        add_rms_norm(arguments, nullptr);
        check(cudaDeviceSynchronize(), "add_rms_norm");
        both.expect(out.to_host());
        alone.expect(out.to_host());
        ASSERT_EQ(residual.to_host(), again.to_host());
      }
    }
  }
}

TEST(AddRmsNorm, InE4m3RowsByIndexWithOneScale) {
  constexpr int64_t kRows = 9, kN = 2048;
  std::mt19937 random(5);
  const std::vector<int32_t> ids = {8, -1, 0, 3};
  const DeviceArray<float> weight(random_f32(kN, 1, random)), gathered(std::ssize(ids) * kN);
  const DeviceArray<float> residual(random_f32(kRows * kN, 3, random));
  const DeviceArray<uint16_t> delta(random_bf16(kRows * kN, 2, random)), out(std::ssize(ids) * kN);
  const DeviceArray<int32_t> device_ids(ids);
  Quantized quantized(std::ssize(ids), kN, ScaleForm::kF32);
  quantized.to.fixed_scale = 0.01f;
  poison(out);  // a row without an index is not written
  add_rms_norm({.residual = residual.data(),
                .delta = delta.data(),
                .delta_stride = kN,
                .row_ids = device_ids.data(),
                .gathered = gathered.data(),
                .weight = weight.data(),
                .eps = kEps,
                .out = out.data(),
                .quantized = quantized.to,
                .rows = std::ssize(ids),
                .n = kN},
               nullptr);
  check(cudaDeviceSynchronize(), "add_rms_norm");
  quantized.expect(out.to_host(), ids);
}

TEST(RmsNorm, InE4m3OfColumnsOfWiderRows) {
  for (const int64_t n : {128, 512, 1536}) {
    for (const int64_t rows : {1, 33}) {
      std::mt19937 random(static_cast<uint32_t>(n));
      const DeviceArray<float> weight(random_f32(n, 1, random));
      const DeviceArray<uint16_t> x(random_bf16(rows * (n + 576), 2, random)), out(rows * n);
      const Quantized quantized(rows, n, ScaleForm::kF32);
      RmsNormArguments arguments = {.x = x.data(),
                                    .x_stride = n + 576,
                                    .weight = weight.data(),
                                    .eps = kEps,
                                    .out = out.data(),
                                    .out_stride = n,
                                    .rows = rows,
                                    .n = n};
      rms_norm(arguments, nullptr);
      arguments.out = nullptr;
      arguments.quantized = quantized.to;
      rms_norm(arguments, nullptr);
      check(cudaDeviceSynchronize(), "rms_norm");
      quantized.expect(out.to_host());
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
