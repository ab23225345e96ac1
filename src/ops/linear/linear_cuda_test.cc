// Products on the GPU whose rows have the same bits in any number of rows.
#include "ops/linear/linear_cuda.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"

namespace fathom::cuda {
namespace {

struct Problem {
  int32_t n, k, batches = 1;
  DType out_type = DType::kBF16;

  int64_t out_row_bytes() const { return int64_t{n} * batches * (out_type == DType::kF32 ? 4 : 2); }
};

// The first `rows` of them alone.
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

}  // namespace
}  // namespace fathom::cuda
