// Index keys and queries against the definition in double precision, at every instruction level.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "cache/index_key_row.h"
#include "ops/attention/attention_test_data.h"
#include "ops/indexer/indexer_cpu.h"

namespace fathom {
namespace {

struct Shape {
  int64_t dim, rope;
  bool interleaved, hadamard, yarn;
};

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {128, 64, false, true, false},                                // DeepSeek-V3.2
      {128, 64, false, true, true},  {128, 64, true, true, false},  // GLM-5
      {32, 16, false, true, false},  {8, 4, false, true, false},   {2, 2, true, true, false},
      {64, 64, false, false, false}, {96, 32, false, false, true},  // not a power of two
      {1024, 64, false, true, false}};
  return all;
}

RopeTable table_of(const Shape& shape) {
  YarnParameters yarn;
  yarn.factor = 40;
  yarn.mscale = 0.7;  // a magnitude other than 1
  return make_rope_table(shape.rope, 10000,
                         shape.yarn ? std::optional(yarn) : std::optional<YarnParameters>());
}

// Rotation and Hadamard transform as the page on the model defines them: pairs, then H[i][j] =
// (-1)^popcount(i & j) / sqrt(dim).
std::vector<double> transformed(std::vector<double> x, const Shape& shape, const RopeTable& table,
                                int32_t position) {
  const int64_t half = shape.rope / 2;
  std::vector<float> cos_sin(static_cast<size_t>(shape.rope));
  table.compute(position, cos_sin.data());
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = shape.interleaved ? 2 * i : i;
    const int64_t second = shape.interleaved ? 2 * i + 1 : i + half;
    const double a = x[first], b = x[second];
    x[first] = a * cos_sin[2 * i] - b * cos_sin[2 * i + 1];
    x[second] = b * cos_sin[2 * i] + a * cos_sin[2 * i + 1];
  }
  if (!shape.hadamard) return x;
  std::vector<double> out(x.size(), 0);
  for (uint64_t i = 0; i < x.size(); ++i) {
    for (uint64_t j = 0; j < x.size(); ++j) {
      out[i] += (std::popcount(i & j) % 2 != 0 ? -x[j] : x[j]);
    }
    out[i] /= std::sqrt(static_cast<double>(x.size()));
  }
  return out;
}

std::vector<double> normed(const float* x, int64_t dim, const TestTensor& weight,
                           const TestTensor& bias, double eps) {
  double mean = 0, variance = 0;
  for (int64_t i = 0; i < dim; ++i) mean += x[i] / static_cast<double>(dim);
  for (int64_t i = 0; i < dim; ++i) {
    variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(dim);
  }
  std::vector<double> out(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) {
    out[i] = (x[i] - mean) / std::sqrt(variance + eps) * weight.wide[i] + bias.wide[i];
  }
  return out;
}

double greatest(const std::vector<double>& x) {
  double amax = 0;
  for (const double value : x) amax = std::max(amax, std::abs(value));
  return amax;
}

// Half a step of e4m3 at `value` with this scale, and what fp32 sums are off by.
double e4m3_error(double value, double scale, double amax) {
  return std::max(std::abs(value) * 0x1p-4, scale * 0x1p-10) + amax * 4e-6;
}

class IndexKeys : public testing::TestWithParam<CpuIsa> {};

TEST_P(IndexKeys, MatchDoublePrecision) {
  for (const Shape& shape : shapes()) {
    for (const auto format : {IndexKeyFormat::kE4M3, IndexKeyFormat::kBF16, IndexKeyFormat::kF32}) {
      SCOPED_TRACE(testing::Message() << name_of(format) << " dim " << shape.dim << " rope "
                                      << shape.rope << (shape.interleaved ? " pairs" : " halves"));
      const RopeTable table = table_of(shape);
      const IndexRotation rotation{&table, shape.interleaved, shape.hadamard};
      const std::vector<int32_t> positions = {0, 1, 77, 4095, 4096, 100'000};
      const std::vector<int64_t> slots = {70, 3, 64, 191, 0, 128};
      const auto rows = static_cast<int64_t>(positions.size());
      const TestTensor k(rows * (shape.dim + 3), DType::kF32, 1, 4);  // strided rows
      const TestTensor weight(shape.dim, DType::kF32, 2, 2), bias(shape.dim, DType::kF32, 3, 1);
      const IndexKeyLayout layout{format, shape.dim};
      const int64_t stride = layout.page_bytes() + 40;
      std::vector<std::byte> memory(static_cast<size_t>(3 * stride), std::byte{0xFF});
      const IndexKeyPages pages{layout, memory.data() + 20, 3, stride};
      ThreadPool pool(2);
      cpu::write_index_keys(
          pool, GetParam(), k.view({rows, shape.dim + 3}).columns(0, shape.dim), positions, slots,
          {weight.view({shape.dim}), bias.view({shape.dim}), 1e-6f}, rotation, pages);
      for (int64_t row = 0; row < rows; ++row) {
        const std::vector<double> expected = transformed(
            normed(k.wide.data() + row * (shape.dim + 3), shape.dim, weight, bias, 1e-6), shape,
            table, positions[row]);
        std::vector<float> actual(static_cast<size_t>(shape.dim));
        decode_index_key(layout, pages.row(slots[row] / 64, slots[row] % 64), actual.data());
        const double amax = greatest(expected);
        const double scale = index_scale(static_cast<float>(amax));
        for (int64_t i = 0; i < shape.dim; ++i) {
          const double error =
              format == IndexKeyFormat::kE4M3   ? e4m3_error(expected[i], scale, amax)
              : format == IndexKeyFormat::kBF16 ? std::abs(expected[i]) * 0x1p-8 + amax * 4e-6
                                                : amax * 4e-6;
          ASSERT_NEAR(actual[i], expected[i], error) << "row " << row << " element " << i;
        }
      }
      // Nothing else was written: neither other slots nor what stands between the pages.
      for (int64_t i = 0; i < std::ssize(memory); ++i) {
        const int64_t at = i % stride - 20;
        const int64_t slot = at / layout.row_bytes();
        const bool written = at >= 0 && at < layout.page_bytes() &&
                             std::ranges::count(slots, i / stride * 64 + slot) > 0;
        ASSERT_TRUE(written || memory[i] == std::byte{0xFF}) << "byte " << i;
      }
    }
  }
}

TEST_P(IndexKeys, QueriesMatchDoublePrecision) {
  for (const Shape& shape : shapes()) {
    for (const auto dtype : {DType::kF8E4M3, DType::kBF16, DType::kF32}) {
      constexpr int64_t kRows = 3, kHeads = 5;
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " dim " << shape.dim);
      const RopeTable table = table_of(shape);
      const IndexRotation rotation{&table, shape.interleaved, shape.hadamard};
      const std::vector<int32_t> positions = {5, 0, 5000};
      TestTensor q(kRows * kHeads * shape.dim, DType::kF32, 4, 3);
      std::fill_n(q.wide.begin() + kHeads * shape.dim, shape.dim, 0.0f);  // a head of zeros
      const TestTensor head_weights(kRows * kHeads, DType::kF32, 5, 2);
      std::vector<std::byte> values(
          static_cast<size_t>(kRows * kHeads * shape.dim * size_of(dtype) + 1), std::byte{0xFF});
      std::vector<float> weights(kRows * kHeads + 1, std::nanf(""));
      ThreadPool pool(3);
      cpu::make_index_queries(pool, GetParam(), q.view({kRows, kHeads, shape.dim}),
                              head_weights.view({kRows, kHeads}), positions, rotation,
                              TensorView(values.data(), dtype, {kRows, kHeads, shape.dim}),
                              TensorView(weights.data(), {kRows, kHeads}));
      EXPECT_EQ(values.back(), std::byte{0xFF});
      EXPECT_TRUE(std::isnan(weights.back()));
      for (int64_t head = 0; head < kRows * kHeads; ++head) {
        const float* in = q.wide.data() + head * shape.dim;
        const std::vector<double> expected =
            transformed({in, in + shape.dim}, shape, table, positions[head / kHeads]);
        const double amax = greatest(expected);
        const double scale = dtype == DType::kF8E4M3 ? index_scale(static_cast<float>(amax)) : 1;
        ASSERT_NEAR(weights[head], head_weights.wide[head] / std::sqrt(kHeads * shape.dim) * scale,
                    std::abs(weights[head]) * 1e-6);
        for (int64_t i = 0; i < shape.dim; ++i) {
          const int64_t at = head * shape.dim + i;
          const double actual =
              dtype == DType::kF8E4M3
                  ? to_float(reinterpret_cast<const e4m3*>(values.data())[at]) * scale
              : dtype == DType::kBF16 ? to_float(reinterpret_cast<const bf16*>(values.data())[at])
                                      : reinterpret_cast<const float*>(values.data())[at];
          const double error = dtype == DType::kF8E4M3 ? e4m3_error(expected[i], scale, amax)
                               : dtype == DType::kBF16
                                   ? std::abs(expected[i]) * 0x1p-8 + amax * 4e-6
                                   : amax * 4e-6;
          ASSERT_NEAR(actual, expected[i], error) << "head " << head << " element " << i;
        }
      }
    }
  }
}

TEST_P(IndexKeys, ADamagedHeadShowsInItsWeightAndCodes) {
  constexpr int64_t kHeads = 3, kDim = 32;
  const RopeTable table = make_rope_table(16, 10000, {});
  TestTensor q(kHeads * kDim, DType::kF32, 4, 3);
  q.wide[kDim + 20] = std::nanf("");
  const TestTensor head_weights(kHeads, DType::kF32, 5, 2);
  std::vector<e4m3> values(kHeads * kDim);
  std::vector<float> weights(kHeads);
  const std::vector<int32_t> positions = {5};
  ThreadPool pool(1);
  cpu::make_index_queries(pool, GetParam(), q.view({1, kHeads, kDim}),
                          head_weights.view({1, kHeads}), positions, {&table},
                          TensorView(values.data(), {1, kHeads, kDim}),
                          TensorView(weights.data(), {1, kHeads}));
  for (int64_t head = 0; head < kHeads; ++head) {
    EXPECT_EQ(std::isnan(weights[head]), head == 1);
    for (int64_t i = 0; i < kDim; ++i) {
      EXPECT_EQ(std::isnan(to_float(values[head * kDim + i])), head == 1);
    }
  }
}

// On both sides the transform changes no product; on one side it would.
TEST_P(IndexKeys, HadamardOnBothSidesLeavesTheProducts) {
  constexpr int64_t kDim = 128;
  const RopeTable table = make_rope_table(64, 10000, {});
  const TestTensor k(kDim, DType::kF32, 1, 1), q(kDim, DType::kF32, 2, 1);
  const TestTensor weight(kDim, DType::kF32, 3, 1), bias(kDim, DType::kF32, 4, 1);
  const float head_weight = 1;
  float dots[2] = {};
  for (const bool hadamard : {false, true}) {
    const IndexRotation rotation{&table, false, hadamard};
    std::vector<float> key(kDim * 64), query(kDim);
    float scaled = 0;
    const std::vector<int32_t> positions = {9};
    const std::vector<int64_t> slots = {0};
    ThreadPool pool(1);
    const IndexKeyLayout layout{IndexKeyFormat::kF32, kDim};
    cpu::write_index_keys(
        pool, GetParam(), k.view({1, kDim}), positions, slots,
        {weight.view({kDim}), bias.view({kDim}), 1e-6f}, rotation,
        {layout, reinterpret_cast<std::byte*>(key.data()), 1, layout.page_bytes()});
    cpu::make_index_queries(pool, GetParam(), q.view({1, 1, kDim}),
                            ConstTensorView(&head_weight, {1, 1}), positions, rotation,
                            TensorView(query.data(), {1, 1, kDim}), TensorView(&scaled, {1, 1}));
    for (int64_t i = 0; i < kDim; ++i) dots[hadamard ? 1 : 0] += key[i] * query[i];
  }
  EXPECT_NEAR(dots[0], dots[1], 1e-5);
  EXPECT_GT(std::abs(dots[0]), 1e-2);
}

TEST_P(IndexKeys, RowsAndThreadsChangeNoBit) {
  constexpr int64_t kRows = 300, kDim = 128, kHeads = 2;
  const RopeTable table = make_rope_table(64, 10000, {});
  const IndexRotation rotation{&table, false, true};
  const TestTensor q(kRows * kHeads * kDim, DType::kF32, 1, 1);
  const TestTensor head_weights(kRows * kHeads, DType::kF32, 2, 1);
  std::vector<int32_t> positions(kRows);
  for (int32_t i = 0; i < kRows; ++i) positions[i] = i * 20;  // beyond the tabulated ones, too
  const auto run = [&](int threads, int64_t first, int64_t count) {
    ThreadPool pool(threads);
    std::vector<uint8_t> values(static_cast<size_t>(count * kHeads * kDim));
    std::vector<float> weights(static_cast<size_t>(count * kHeads));
    cpu::make_index_queries(pool, GetParam(), q.view({kRows, kHeads, kDim}).rows(first, count),
                            head_weights.view({kRows, kHeads}).rows(first, count),
                            std::span(positions).subspan(first, count), rotation,
                            TensorView(values.data(), DType::kF8E4M3, {count, kHeads, kDim}),
                            TensorView(weights.data(), {count, kHeads}));
    return std::pair(values, weights);
  };
  const auto whole = run(3, 0, kRows);
  for (const int64_t row : {0, 1, 150, 299}) {
    const auto alone = run(1, row, 1);
    EXPECT_TRUE(std::ranges::equal(
        alone.first, std::span(whole.first).subspan(row * kHeads * kDim, kHeads * kDim)));
    EXPECT_TRUE(
        std::ranges::equal(alone.second, std::span(whole.second).subspan(row * kHeads, kHeads)));
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, IndexKeys, testing::ValuesIn(runnable_levels()),
                         [](const auto& level) { return std::string(name_of(level.param)); });

}  // namespace
}  // namespace fathom
