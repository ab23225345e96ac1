// GEMV on the GPU against double precision.
#include "ops/linear/one_row_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/linear/one_row_plan.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

// Batches of x and of the result lie `gap` elements apart; the gaps hold NaN.
struct Problem {
  OneRowShape shape;
  int64_t gap = 0;
  bool f32 = false;

  int64_t x_stride() const { return shape.k + gap; }
  int64_t out_stride() const { return shape.n + gap; }
};

struct Inputs {
  std::vector<uint16_t> x, weight;
};

Inputs random_inputs(const Problem& p, uint32_t seed) {
  std::mt19937 random(seed);
  Inputs inputs{random_bf16(p.shape.batches * p.x_stride(), 0.5f, random),
                random_bf16(p.shape.batches * p.shape.n * p.shape.k, 0.5f, random)};
  for (int64_t i = 0; i < std::ssize(inputs.x); ++i) {
    if (i % p.x_stride() >= p.shape.k) inputs.x[static_cast<size_t>(i)] = kNan;
  }
  return inputs;
}

template <typename T>
void launch(const Problem& p, const DeviceArray<uint16_t>& x, const DeviceArray<uint16_t>& weight,
            const DeviceArray<T>& out) {
  linear_one_row({.x = x.data(),
                  .x_row_stride = p.shape.batches * p.x_stride(),
                  .x_batch_stride = p.x_stride(),
                  .weight = weight.data(),
                  .out = out.data(),
                  .out_row_stride = p.shape.batches * p.out_stride(),
                  .out_batch_stride = p.out_stride(),
                  .out_type = p.f32 ? DType::kF32 : DType::kBF16,
                  .rows = 1,
                  .n = static_cast<int32_t>(p.shape.n),
                  .k = static_cast<int32_t>(p.shape.k),
                  .batches = static_cast<int32_t>(p.shape.batches)},
                 nullptr);
}

template <typename T>
std::vector<T> run(const Problem& p, const Inputs& inputs, int launches) {
  const DeviceArray<uint16_t> x(inputs.x), weight(inputs.weight);
  const DeviceArray<T> out(p.shape.batches * p.out_stride());
  std::vector<T> first;
  for (int i = 0; i < launches; ++i) {
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    check(cudaDeviceSynchronize(), "synchronize");
    for (int again = 0; again < 3; ++again) launch(p, x, weight, out);
    check(cudaDeviceSynchronize(), "synchronize");
    const auto result = out.to_host();
    if (i == 0) first = result;
    EXPECT_EQ(std::memcmp(result.data(), first.data(), first.size() * sizeof(T)), 0);
  }
  return first;
}

std::vector<float> results(const Problem& p, const Inputs& inputs, int launches) {
  if (p.f32) return run<float>(p, inputs, launches);
  return widen(run<uint16_t>(p, inputs, launches));
}

// Compares every `step`-th element: all would take the host long.
void compare(const Problem& p, uint32_t seed, int launches = 2) {
  const auto [n, k, batches] = p.shape;
  SCOPED_TRACE(testing::Message() << "[" << batches << ", " << n << ", " << k << "]");
  const Inputs inputs = random_inputs(p, seed);
  const std::vector<float> out = results(p, inputs, launches);
  const int64_t step = batches * n * k / 8'000'000 * 2 + 1;
  double error = 0, norm = 0;
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    const int64_t batch = i / p.out_stride(), column = i % p.out_stride();
    const float value = out[static_cast<size_t>(i)];
    if (column >= n) {
      ASSERT_TRUE(std::isnan(value)) << "written beyond the columns";
      continue;
    }
    ASSERT_TRUE(std::isfinite(value)) << "batch " << batch << ", column " << column;
    if (i % step != 0) continue;
    const uint16_t* x = inputs.x.data() + batch * p.x_stride();
    const uint16_t* w = inputs.weight.data() + (batch * n + column) * k;
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += double{from_bf16(x[j])} * from_bf16(w[j]);
    error += (value - sum) * (value - sum);
    norm += sum * sum;
  }
  // bf16 results round by 2^-8 at most; fp32 sums by a few units in the last place of their terms.
  EXPECT_LE(std::sqrt(error / norm), p.f32 ? 1e-5 : 4e-3);
}

TEST(OneRow, EqualsDoublePrecision) {
  uint32_t seed = 1;
  for (const int64_t n : {8, 72, 200, 1000}) {
    for (const int64_t k : {64, 128, 192, 512, 1024, 1088, 2048, 2112, 4160}) {
      for (const int64_t batches : {1, 3}) {
        compare({.shape = {n, k, batches}, .gap = seed % 3 == 0 ? 8 : 0, .f32 = seed % 2 == 0},
                seed);
        ++seed;
      }
    }
  }
}

TEST(OneRow, EqualsDoublePrecisionOnModelsShapes) {
  constexpr OneRowShape kShapes[] = {{3648, 2048},    {2048, 2048}, {512, 128, 16},  {128, 512, 16},
                                     {512, 128, 128}, {2112, 7168}, {128, 512, 128}, {24576, 1536},
                                     {2048, 10944},   {7168, 16384}};
  uint32_t seed = 1000;
  for (const OneRowShape& shape : kShapes) {
    compare({.shape = shape, .gap = 64, .f32 = seed % 2 == 0}, seed);
    ++seed;
  }
}

// Small shapes for racecheck, which takes a minute.
TEST(OneRow, OfFewColumns) { compare({.shape = {72, 192}}, 5, 1); }

TEST(OneRow, GivesTheSameBitsAgain) { compare({.shape = {3648, 2048}}, 7, 50); }

}  // namespace
}  // namespace fathom::cuda
