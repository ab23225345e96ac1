// Skinny GEMM on the GPU against double precision.
#include "ops/linear/few_rows_cuda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {
namespace {

constexpr uint16_t kNan = 0x7FC0;

// Rows and heads are strided as inside a wider tensor; the gaps hold NaN.
struct Problem {
  FewRowsShape shape;
  int64_t gap = 0;  // elements
  bool f32 = false;

  // [rows, batches, k + gap] and [rows, batches, n + gap]
  int64_t x_batch_stride() const { return shape.k + gap; }
  int64_t x_row_stride() const { return shape.batches * x_batch_stride(); }
  int64_t out_batch_stride() const { return shape.n + gap; }
  int64_t out_row_stride() const { return shape.batches * out_batch_stride(); }
};

struct Inputs {
  std::vector<uint16_t> x, weight;
};

Inputs random_inputs(const Problem& p, std::mt19937& random) {
  Inputs inputs{random_bf16(p.shape.rows * p.x_row_stride(), 0.5f, random),
                random_bf16(p.shape.batches * p.shape.n * p.shape.k, 0.5f, random)};
  for (int64_t i = 0; i < std::ssize(inputs.x); ++i) {
    if (i % p.x_batch_stride() >= p.shape.k) inputs.x[static_cast<size_t>(i)] = kNan;
  }
  return inputs;
}

// Compares every `step`-th element of the result: all would take the host minutes.
void expect_equal(const Problem& p, const Inputs& inputs, const std::vector<float>& out, int step) {
  const int64_t rows = p.shape.rows, n = p.shape.n, k = p.shape.k, batches = p.shape.batches;
  double error = 0, norm = 0, worst = 0;
  for (int64_t i = 0; i < rows * batches * n; i += step) {
    const int64_t row = i / (batches * n), batch = i / n % batches, column = i % n;
    const uint16_t* x = inputs.x.data() + row * p.x_row_stride() + batch * p.x_batch_stride();
    const uint16_t* w = inputs.weight.data() + (batch * n + column) * k;
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += double{from_bf16(x[j])} * from_bf16(w[j]);
    const double difference =
        out[static_cast<size_t>(row * p.out_row_stride() + batch * p.out_batch_stride() + column)] -
        sum;
    ASSERT_TRUE(std::isfinite(difference)) << "row " << row << ", column " << column;
    error += difference * difference;
    norm += sum * sum;
    worst = std::max(worst, std::abs(difference));
  }
  // bf16 results round by 2^-8 at most; fp32 sums by a few units in the last place of their terms.
  EXPECT_LE(std::sqrt(error / norm), p.f32 ? 1e-5 : 4e-3);
  EXPECT_LE(worst, (p.f32 ? 1e-4 : 3e-2) * std::sqrt(static_cast<double>(k)));
}

template <typename T>
std::vector<T> launch(const Problem& p, const FewRowsPlan& plan, const DeviceArray<uint16_t>& x,
                      const DeviceArray<uint16_t>& weight) {
  const DeviceArray<T> out(p.shape.rows * p.out_row_stride());
  check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
  linear_few_rows(plan,
                  {.x = x.data(),
                   .x_row_stride = p.x_row_stride(),
                   .x_batch_stride = p.x_batch_stride(),
                   .weight = weight.data(),
                   .out = out.data(),
                   .out_row_stride = p.out_row_stride(),
                   .out_batch_stride = p.out_batch_stride(),
                   .out_type = p.f32 ? DType::kF32 : DType::kBF16,
                   .rows = static_cast<int32_t>(p.shape.rows),
                   .n = static_cast<int32_t>(p.shape.n),
                   .k = static_cast<int32_t>(p.shape.k),
                   .batches = static_cast<int32_t>(p.shape.batches)},
                  nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  return out.to_host();
}

bool is_poison(float value) { return std::isnan(value); }

template <typename T>
std::vector<float> to_floats(const std::vector<T>& values) {
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    return widen(values);
  }
}

template <typename T>
void compare(const Problem& p, const FewRowsPlan& plan, const Inputs& inputs, int step) {
  const DeviceArray<uint16_t> x(inputs.x), weight(inputs.weight);
  const auto first = launch<T>(p, plan, x, weight);
  const auto again = launch<T>(p, plan, x, weight);
  EXPECT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(T)), 0);
  const auto out = to_floats(first);
  expect_equal(p, inputs, out, step);
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    if (i % p.out_batch_stride() >= p.shape.n) {
      ASSERT_TRUE(is_poison(out[static_cast<size_t>(i)])) << "written beyond the columns";
    }
  }
}

void compare(const Problem& p, const FewRowsPlan& plan, uint32_t seed, int step = 1) {
  SCOPED_TRACE(testing::Message() << p.shape.rows << " rows, [" << p.shape.batches << ", "
                                  << p.shape.n << ", " << p.shape.k << "], " << plan.warpgroups
                                  << " warpgroups, " << plan.splits << " splits, " << plan.clusters
                                  << " clusters");
  std::mt19937 random(seed);
  const Inputs inputs = random_inputs(p, random);
  if (p.f32) {
    compare<float>(p, plan, inputs, step);
  } else {
    compare<uint16_t>(p, plan, inputs, step);
  }
}

class FewRows : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(FewRows, EveryPlanEqualsDoublePrecision) {
  const auto [warpgroups, splits] = GetParam();
  uint32_t seed = 1;
  for (const int64_t rows : {1, 8, 9, 31, 64}) {
    int columns = 8;
    while (columns < rows) columns *= 2;
    for (const FewRowsShape& shape :
         {FewRowsShape{rows, 8, 1024}, FewRowsShape{rows, 200, 1088},
          FewRowsShape{rows, 1000, 2048}, FewRowsShape{rows, 72, 1024, 3}}) {
      for (const int clusters : {1, 3, 9}) {
        if (clusters > shape.n / 8) continue;
        const bool f32 = seed % 4 > 1;
        compare({.shape = shape, .gap = seed % 3 == 0 ? 8 : 0, .f32 = f32},
                {.columns = columns,
                 .warpgroups = warpgroups,
                 .splits = splits,
                 .clusters = clusters,
                 .wide_ring = seed % 5 == 0},
                seed, static_cast<int>(rows * shape.batches * shape.n / 4000 + 1));
        ++seed;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, FewRows,
                         testing::Combine(testing::Values(1, 2), testing::Values(1, 2, 4, 8)));

TEST(FewRowsOfModels, EqualDoublePrecision) {
  const FewRowsShape shapes[] = {{1, 3648, 2048},   {1, 2048, 2048},   {1, 2048, 10944},
                                 {1, 512, 128, 16}, {1, 128, 512, 16}, {1, 512, 128, 128},
                                 {1, 2112, 7168},   {1, 21888, 2048},  {1, 24576, 1536},
                                 {1, 256, 256},     {1, 576, 256},     {1, 8192, 256}};
  uint32_t seed = 1000;
  for (FewRowsShape shape : shapes) {
    for (const int64_t rows : {1, 20, 64}) {
      shape.rows = rows;
      compare({.shape = shape, .gap = 64, .f32 = seed % 2 == 0},
              plan_few_rows(shape, ClusterCounts()), seed,
              static_cast<int>(rows * shape.batches * shape.n / 2000 + 1) | 1);
      ++seed;
    }
  }
}

// Fifty overlapping launches: none may see what another left in shared memory or barriers.
TEST(FewRowsAgain, GivesTheSameBits) {
  std::mt19937 random(7);
  const Problem p = {.shape = {33, 3648, 2048}};
  const Inputs inputs = random_inputs(p, random);
  const DeviceArray<uint16_t> x(inputs.x), weight(inputs.weight);
  const FewRowsPlan plan = plan_few_rows(p.shape, ClusterCounts());
  const auto first = launch<uint16_t>(p, plan, x, weight);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(launch<uint16_t>(p, plan, x, weight), first);
}

TEST(FewRowsPadding, ChangesNoOtherRow) {
  std::mt19937 random(8);
  const Problem p = {.shape = {24, 520, 2048}};
  Inputs inputs = random_inputs(p, random);
  const DeviceArray<uint16_t> weight(inputs.weight);
  const FewRowsPlan plan = plan_few_rows(p.shape, ClusterCounts());
  const auto before = launch<uint16_t>(p, plan, DeviceArray<uint16_t>(inputs.x), weight);
  for (int64_t i = 5 * 2048; i < 6 * 2048; ++i) inputs.x[static_cast<size_t>(i)] = kNan;
  const auto after = launch<uint16_t>(p, plan, DeviceArray<uint16_t>(inputs.x), weight);
  for (size_t i = 0; i < before.size(); ++i) {
    if (i / 520 == 5) continue;
    ASSERT_EQ(before[i], after[i]) << i;
  }
}

}  // namespace
}  // namespace fathom::cuda
