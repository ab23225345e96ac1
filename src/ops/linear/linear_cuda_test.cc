// Batch-invariant GEMMs on the GPU, and those that the library takes.
#include "ops/linear/linear_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph.h"
#include "device/cuda/random_data.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/library_plan.h"

namespace fathom::cuda {
namespace {

struct Problem {
  int32_t n, k, batches = 1;
  DType out_type = DType::kBF16;

  int64_t out_row_bytes() const { return int64_t{n} * batches * (out_type == DType::kF32 ? 4 : 2); }
};

// Multiplies the first `rows` rows alone.
std::vector<uint8_t> multiply(const Problem& p, const DeviceArray<uint16_t>& x,
                              const DeviceArray<uint16_t>& weight, int32_t rows) {
  const DeviceArray<uint8_t> out(rows * p.out_row_bytes());
  check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
  linear({.x = x.data(),
          .x_row_stride = int64_t{p.k} * p.batches,
          .x_batch_stride = p.k,
          .weight = weight.data(),
          .out = out.data(),
          .out_row_stride = int64_t{p.n} * p.batches,
          .out_batch_stride = p.n,
          .out_type = p.out_type,
          .rows = rows,
          .n = p.n,
          .k = p.k,
          .batches = p.batches,
          .batch_invariant = true},
         nullptr);
  check(cudaDeviceSynchronize(), "synchronize");
  return out.to_host();
}

TEST(BatchInvariantLinear, RowsHaveTheSameBitsInAnyNumber) {
  constexpr int32_t kMostRows = 1500;
  std::mt19937 random(11);
  for (const Problem& p : {Problem{3648, 2048},
                           {2048, 2048},
                           {512, 128, 16},
                           {128, 512, 16},
                           {200, 1088},
                           {8192, 2048, 1, DType::kF32},
                           {2112, 7168},
                           {1024, 16384}}) {
    SCOPED_TRACE(testing::Message() << "[" << p.batches << ", " << p.n << ", " << p.k << "]");
    const DeviceArray<uint16_t> x(random_bf16(int64_t{kMostRows} * p.k * p.batches, 0.5f, random));
    const DeviceArray<uint16_t> weight(random_bf16(int64_t{p.batches} * p.n * p.k, 0.5f, random));
    const auto expected = multiply(p, x, weight, kMostRows);
    for (const int32_t rows : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 192, 200, 513}) {
      const auto actual = multiply(p, x, weight, rows);
      EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size()), 0) << rows << " rows";
    }
  }
}

constexpr uint16_t kNan = 0x7FC0;

class LibraryLinear : public testing::Test {
 protected:
  void SetUp() override {
    library_ = CublasLt::load(workspace_.data());
    if (library_ == nullptr) GTEST_SKIP() << "libcublasLt.so.13 is not installed";
  }

  DeviceArray<uint8_t> workspace_{CublasLt::kWorkspaceBytes};
  std::unique_ptr<CublasLt> library_;
};

struct GappedProblem : Problem {
  int32_t gap = 0;  // after each row of x, which holds NaN, and of out
};

TEST_F(LibraryLinear, IsTheProductInDoublePrecision) {
  std::mt19937 random(23);
  for (const GappedProblem& p : {GappedProblem{{3648, 2048}},
                                 {{2048, 2048}, 64},
                                 {{4096, 512}, 8},
                                 {{512, 128, 16}, 0},
                                 {{128, 512, 16, DType::kF32}, 16},
                                 {{200, 1088}, 24},
                                 {{8192, 2048, 1, DType::kF32}, 0},
                                 {{2112, 7168, 1, DType::kF32}, 8}}) {
    const int64_t x_stride = int64_t{p.k} * p.batches + p.gap,
                  out_stride = int64_t{p.n} * p.batches + p.gap;
    const auto weight_host = random_bf16(int64_t{p.batches} * p.n * p.k, 0.5f, random);
    const DeviceArray<uint16_t> weight(weight_host);
    for (const int32_t rows : {65, 100, 128, 333, 512, 1024}) {
      SCOPED_TRACE(testing::Message()
                   << rows << " x [" << p.batches << ", " << p.n << ", " << p.k << "]");
      std::vector<uint16_t> x_host(static_cast<size_t>(rows * x_stride), kNan);
      for (int32_t row = 0; row < rows; ++row) {
        const auto values = random_bf16(int64_t{p.k} * p.batches, 0.5f, random);
        std::memcpy(x_host.data() + row * x_stride, values.data(), values.size() * 2);
      }
      const DeviceArray<uint16_t> x(x_host);
      const DeviceArray<uint8_t> out(rows * out_stride * size_of(p.out_type));
      const auto multiply_once = [&] {
        check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
        EXPECT_TRUE(library_->multiply({.x = x.data(),
                                        .x_row_stride = x_stride,
                                        .x_batch_stride = p.k,
                                        .weight = weight.data(),
                                        .out = out.data(),
                                        .out_row_stride = out_stride,
                                        .out_batch_stride = p.n,
                                        .out_type = p.out_type,
                                        .rows = rows,
                                        .n = p.n,
                                        .k = p.k,
                                        .batches = p.batches},
                                       nullptr));
        check(cudaDeviceSynchronize(), "synchronize");
        return out.to_host();
      };
      const auto bytes = multiply_once();
      for (int repeat = 0; repeat < 5; ++repeat) ASSERT_EQ(multiply_once(), bytes);
      const auto element = [&](int64_t i) {
        if (p.out_type == DType::kBF16) {
          uint16_t bits;
          std::memcpy(&bits, bytes.data() + i * 2, 2);
          return from_bf16(bits);
        }
        float value;
        std::memcpy(&value, bytes.data() + i * 4, 4);
        return value;
      };
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t i = 0; i < p.gap; ++i) {
          ASSERT_TRUE(std::isnan(element(row * out_stride + out_stride - p.gap + i)));
        }
        for (int sample = 0; sample < 10; ++sample) {
          const auto column = static_cast<int32_t>(random() % static_cast<uint32_t>(p.n));
          const auto batch = static_cast<int32_t>(random() % static_cast<uint32_t>(p.batches));
          double sum = 0;
          for (int32_t i = 0; i < p.k; ++i) {
            sum +=
                double{from_bf16(x_host[static_cast<size_t>(row * x_stride + batch * p.k + i)])} *
                from_bf16(
                    weight_host[static_cast<size_t>((int64_t{batch} * p.n + column) * p.k + i)]);
          }
          const double tolerance =
              (p.out_type == DType::kBF16 ? 4e-3 : 2e-5) * std::abs(sum) + 2e-5 * std::sqrt(p.k);
          ASSERT_NEAR(element(row * out_stride + int64_t{batch} * p.n + column), sum, tolerance)
              << "row " << row << ", column " << column << " of batch " << batch;
        }
      }
    }
  }
}

TEST_F(LibraryLinear, TakesAnyNumberOfRowsByTheAlgorithmOfMore) {
  constexpr int32_t kMost = 1100;
  std::mt19937 random(31);
  for (const auto& [n, k] : {std::pair{3648, 2048}, {256, 7168}}) {
    const DeviceArray<uint16_t> x(random_bf16(int64_t{kMost} * k, 0.5f, random)),
        weight(random_bf16(int64_t{n} * k, 0.5f, random));
    const DeviceArray<float> out(int64_t{kMost + 1} * n);
    const auto rows_of_product = [&](int32_t rows, CublasLt* library) {
      check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
      linear({.x = x.data(),
              .x_row_stride = k,
              .weight = weight.data(),
              .out = out.data(),
              .out_row_stride = n,
              .out_type = DType::kF32,
              .rows = rows,
              .n = n,
              .k = k,
              .library = library},
             nullptr);
      std::vector<float> values(static_cast<size_t>(rows + 1) * static_cast<size_t>(n));
      check(cudaMemcpy(values.data(), out.data(), values.size() * sizeof(float),
                       cudaMemcpyDeviceToHost),
            "copying from the device");
      return values;
    };
    const auto expected = rows_of_product(kMost, nullptr);
    for (int32_t rows = 65; rows <= kMost; rows += rows < 200 ? 1 : 7) {
      const auto actual = rows_of_product(rows, library_.get());
      const auto end = static_cast<size_t>(rows) * static_cast<size_t>(n);
      float worst = 0;
      for (size_t i = 0; i < end; ++i) {
        const float difference = std::abs(actual[i] - expected[i]);
        worst = difference <= worst ? worst : difference;  // NaN is worse
      }
      ASSERT_LT(worst, 5e-3f) << rows << " x [" << n << ", " << k << "]";
      ASSERT_TRUE(std::all_of(actual.begin() + static_cast<std::ptrdiff_t>(end), actual.end(),
                              [](float value) { return std::isnan(value); }));
    }
  }
}

// The GEMMs before and after change x: a launch that began too early would show.
TEST_F(LibraryLinear, KeepsItsPlaceAmongLaunchesThatBeginEarly) {
  constexpr int32_t kSize = 2048, kLinks = 12;
  std::mt19937 random(29);
  const DeviceArray<uint16_t> weight(random_bf16(int64_t{kSize} * kSize, 0.022f, random));
  for (const int32_t rows : {72, 256, 512}) {
    ASSERT_TRUE(library_pays({.rows = rows, .n = kSize, .k = kSize}));
    const auto x = random_bf16(int64_t{rows} * kSize, 1, random);
    const DeviceArray<uint16_t> even(x), odd(x);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    // Each launch reads what the one before wrote and overwrites what that one read: few rows, then
    // many.
    const auto link = [&](int index) {
      const bool by_library = index % 3 == 1;
      linear({.x = index % 2 == 0 ? even.data() : odd.data(),
              .x_row_stride = kSize,
              .weight = weight.data(),
              .out = index % 2 == 0 ? odd.data() : even.data(),
              .out_row_stride = kSize,
              .rows = index % 3 == 2 ? 64 : rows,
              .n = kSize,
              .k = kSize,
              .library = by_library ? library_.get() : nullptr},
             stream);
    };
    for (int index = 0; index < kLinks; ++index) {
      link(index);
      check(cudaStreamSynchronize(stream), "synchronize");
    }
    const auto expected_even = even.to_host(), expected_odd = odd.to_host();
    const Graph graph(stream, [&] {
      for (int index = 0; index < kLinks; ++index) link(index);
    });
    for (int replay = 0; replay < 100; ++replay) {
      check(cudaMemcpyAsync(even.data(), x.data(), even.bytes(), cudaMemcpyHostToDevice, stream),
            "copying to the device");
      check(cudaMemcpyAsync(odd.data(), x.data(), odd.bytes(), cudaMemcpyHostToDevice, stream),
            "copying to the device");
      graph.launch(stream);
      check(cudaStreamSynchronize(stream), "running a graph");
      ASSERT_EQ(even.to_host(), expected_even) << rows << " rows, replay " << replay;
      ASSERT_EQ(odd.to_host(), expected_odd) << rows << " rows, replay " << replay;
    }
    cudaStreamDestroy(stream);
  }
}

}  // namespace
}  // namespace fathom::cuda
