// write_index_keys and make_index_queries on the GPU against the CPU's portable code, bit for bit:
// both round each operation by itself, in the same order.
#include "ops/indexer/index_keys_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/indexer/indexer_cpu.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kDim = kIndexDim, kRope = kIndexRope, kMaxPositions = 6000;
constexpr float kEps = 1e-6f;

RopeTable table_of(bool with_yarn) {
  return make_rope_table(
      kRope, 10000,
      with_yarn ? std::optional<YarnParameters>({.factor = 40, .mscale = 0.707}) : std::nullopt);
}

std::vector<int32_t> random_positions(int64_t rows, std::mt19937& random) {
  std::vector<int32_t> positions;
  for (int64_t row = 0; row < rows; ++row) {
    positions.push_back(static_cast<int32_t>(random() % kMaxPositions));
  }
  return positions;
}

// As a NaN's sign is nobody's business.
bool same_code(uint8_t a, uint8_t b) {
  return a == b || ((a & 0x7F) == 0x7F && (b & 0x7F) == 0x7F);
}
bool same_float(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

struct Pages {
  int64_t count, stride;
  std::vector<std::byte> bytes;
};

// `count` rows in random slots of pages that are `stride` bytes apart.
std::vector<int64_t> random_slots(int64_t rows, int64_t pages, std::mt19937& random) {
  std::vector<int64_t> slots(static_cast<size_t>(pages * kPageSize));
  std::iota(slots.begin(), slots.end(), 0);
  std::ranges::shuffle(slots, random);
  slots.resize(static_cast<size_t>(rows));
  return slots;
}

void compare_keys(int64_t rows, bool interleaved, bool with_yarn, uint32_t seed) {
  std::mt19937 random(seed);
  const RopeTable table = table_of(with_yarn);
  const int64_t stride = kDim + 576, num_pages = rows / 40 + 2;
  auto k = random_bf16(rows * stride, 2, random);
  if (rows > 4) {
    std::fill_n(k.begin() + 2 * stride, kDim, bf16_bits(1.5f));  // variance 0
    k[3 * stride + 17] = bf16_bits(std::numeric_limits<float>::quiet_NaN());
    k[4 * stride + 5] = bf16_bits(1e30f);  // an outlier
  }
  const auto weight = random_f32(kDim, 1, random), bias = random_f32(kDim, 1, random);
  const auto positions = random_positions(rows, random);
  const auto slots = random_slots(rows, num_pages, random);
  std::vector<int64_t> padded = slots;
  for (int64_t row = 6; row < rows; row += 7) padded[row] = -1;

  std::vector<float> wide(static_cast<size_t>(rows * kDim));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < kDim; ++i) wide[row * kDim + i] = from_bf16(k[row * stride + i]);
  }
  const IndexKeyLayout layout;
  std::vector<std::byte> expected(static_cast<size_t>(num_pages * layout.page_bytes()));
  const IndexKeyPages cpu_pages{layout, expected.data(), num_pages, layout.page_bytes()};
  ThreadPool pool(0);
  cpu::write_index_keys(
      pool, CpuIsa::kScalar, ConstTensorView(wide.data(), {rows, kDim}), positions, slots,
      {ConstTensorView(weight.data(), {kDim}), ConstTensorView(bias.data(), {kDim}), kEps},
      {&table, interleaved, true}, cpu_pages);

  const int64_t page_stride = kIndexPageBytes + 4096;  // other things lie between
  const DeviceArray<uint16_t> device_k(k);
  const DeviceArray<float> device_weight(weight), device_bias(bias),
      cos_sin(tabulate(table, kMaxPositions));
  const DeviceArray<int32_t> device_positions(positions);
  const DeviceArray<int64_t> device_slots(padded);
  const DeviceArray<std::byte> pages(num_pages * page_stride);
  check(cudaMemset(pages.data(), 0xEE, pages.bytes()), "poisoning");
  write_index_keys({.k = device_k.data(),
                    .k_stride = stride,
                    .norm_weight = device_weight.data(),
                    .norm_bias = device_bias.data(),
                    .eps = kEps,
                    .cos_sin = cos_sin.data(),
                    .interleaved = interleaved,
                    .positions = device_positions.data(),
                    .slots = device_slots.data(),
                    .pages = {pages.data(), page_stride},
                    .rows = rows},
                   nullptr);
  check(cudaDeviceSynchronize(), "write_index_keys");
  const auto actual = pages.to_host();
  std::vector<char> written(actual.size());
  for (int64_t row = 0; row < rows; ++row) {
    if (padded[row] < 0) continue;
    const int64_t page = slots[row] / kPageSize, slot = slots[row] % kPageSize;
    const std::byte* const from = cpu_pages.row(page, slot);
    const int64_t values = page * page_stride + slot * kDim;
    const int64_t scale = page * page_stride + kIndexValueBytes + slot * 4;
    for (int64_t i = 0; i < kDim; ++i) {
      ASSERT_TRUE(
          same_code(static_cast<uint8_t>(actual[values + i]), static_cast<uint8_t>(from[i])))
          << "row " << row << ", value " << i << ": " << static_cast<int>(actual[values + i])
          << ", the CPU's " << static_cast<int>(from[i]);
      written[values + i] = 1;
    }
    float ours, theirs;
    std::memcpy(&ours, actual.data() + scale, 4);
    std::memcpy(&theirs, from + kDim, 4);
    ASSERT_TRUE(same_float(ours, theirs)) << "row " << row << ": " << ours << ", " << theirs;
    std::fill_n(written.begin() + scale, 4, char{1});
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(written[i] != 0 || actual[i] == std::byte{0xEE}) << "byte " << i;
  }
}

TEST(IndexKeysCuda, WritesTheCpusBytes) {
  uint32_t seed = 1;
  for (const int64_t rows : {1, 2, 7, 64, 301, 2000}) {
    for (const bool interleaved : {false, true}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, interleaved " << interleaved);
      compare_keys(rows, interleaved, rows % 2 == 0, seed++);
    }
  }
}

void compare_queries(int64_t rows, int64_t heads, bool interleaved, int32_t dense_keys,
                     uint32_t seed) {
  std::mt19937 random(seed);
  const RopeTable table = table_of(true);
  auto q = random_bf16(rows * heads * kDim, 2, random);
  q[heads * kDim / 2] = bf16_bits(std::numeric_limits<float>::quiet_NaN());
  const auto head_weights = random_f32(rows * heads, 1, random);
  const auto positions = random_positions(rows, random);
  const auto wide = widen(q);
  std::vector<uint8_t> values(static_cast<size_t>(rows * heads * kDim));
  std::vector<float> weights(static_cast<size_t>(rows * heads));
  ThreadPool pool(0);
  cpu::make_index_queries(pool, CpuIsa::kScalar, ConstTensorView(wide.data(), {rows, heads, kDim}),
                          ConstTensorView(head_weights.data(), {rows, heads}), positions,
                          {&table, interleaved, true},
                          TensorView(values.data(), DType::kF8E4M3, {rows, heads, kDim}),
                          TensorView(weights.data(), {rows, heads}));

  const DeviceArray<uint16_t> device_q(q);
  const DeviceArray<float> device_head_weights(head_weights),
      cos_sin(tabulate(table, kMaxPositions));
  const DeviceArray<int32_t> device_positions(positions);
  const DeviceArray<uint8_t> device_values(rows * heads * kDim);
  const DeviceArray<float> device_weights(rows * heads);
  check(cudaMemset(device_values.data(), 0xEE, device_values.bytes()), "poisoning");
  check(cudaMemset(device_weights.data(), 0xFF, device_weights.bytes()), "poisoning");
  make_index_queries({.q = device_q.data(),
                      .head_weights = device_head_weights.data(),
                      .cos_sin = cos_sin.data(),
                      .interleaved = interleaved,
                      .positions = device_positions.data(),
                      .values = device_values.data(),
                      .weights = device_weights.data(),
                      .rows = rows,
                      .heads = static_cast<int32_t>(heads),
                      .dense_keys = dense_keys},
                     nullptr);
  check(cudaDeviceSynchronize(), "make_index_queries");
  const auto actual = device_values.to_host();
  const auto actual_weights = device_weights.to_host();
  for (int64_t row = 0; row < rows; ++row) {
    const bool is_dense = positions[row] < dense_keys;
    for (int64_t i = row * heads * kDim; i < (row + 1) * heads * kDim; ++i) {
      ASSERT_TRUE(is_dense ? actual[i] == 0xEE : same_code(actual[i], values[i]))
          << "row " << row << ", value " << i % (heads * kDim) << ": " << int{actual[i]} << ", "
          << int{values[i]};
    }
    for (int64_t h = row * heads; h < (row + 1) * heads; ++h) {
      ASSERT_TRUE(is_dense ? std::isnan(actual_weights[h])
                           : same_float(actual_weights[h], weights[h]))
          << "row " << row << ": " << actual_weights[h] << ", " << weights[h];
    }
  }
}

TEST(IndexKeysCuda, MakesTheCpusQueries) {
  uint32_t seed = 1;
  for (const int64_t heads : {16, 32, 64}) {
    for (const int64_t rows : {1, 3, 100}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << heads << " heads");
      compare_queries(rows, heads, false, 0, seed++);
      compare_queries(rows, heads, true, 3000, seed++);
    }
  }
}

}  // namespace
}  // namespace fathom::cuda
