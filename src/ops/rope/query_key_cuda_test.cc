// query_key on the GPU against split_rope_query and norm_rope_cache_write on the CPU.
#include "ops/rope/query_key_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache/latent_layout.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/rope/rope.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope, kNope = 128;
constexpr int64_t kHead = kNope + kRope, kMaxPositions = 6000;
constexpr float kEps = 1e-6f;

// The CPU rounds the same fp32 values; multiply-adds may be fused or not.
void expect_close(uint16_t actual, float expected, float scale) {
  ASSERT_LE(std::abs(from_bf16(actual) - expected), std::abs(expected) * 0.00392f + scale * 1e-6f);
}

struct Case {
  int64_t rows, heads;
  bool fused;      // kv_a in the columns after q's
  bool with_rope;  // q_rope is written too
  bool with_yarn;
};

void compare(const Case& shape) {
  std::mt19937 random(static_cast<uint32_t>(shape.rows * 100 + shape.heads));
  const RopeTable table = make_rope_table(
      kRope, 10000,
      shape.with_yarn ? std::optional<YarnParameters>({.factor = 40, .mscale = 0.707})
                      : std::nullopt);
  const int64_t q_columns = shape.heads * kHead;
  const int64_t q_stride = shape.fused ? q_columns + kColumns : q_columns;
  const int64_t kv_stride = shape.fused ? q_stride : kColumns + 1536;
  const auto q = random_bf16(shape.rows * q_stride, 2, random);
  const auto separate = random_bf16(shape.rows * kv_stride, 2, random);
  const auto weight = random_f32(kLatent, 1, random);
  const int64_t num_pages = shape.rows / 40 + 2;
  std::vector<int64_t> slots(static_cast<size_t>(num_pages * kPageSize));
  std::iota(slots.begin(), slots.end(), 0);
  std::ranges::shuffle(slots, random);
  slots.resize(static_cast<size_t>(shape.rows));
  std::vector<int32_t> positions;
  for (int64_t row = 0; row < shape.rows; ++row) {
    positions.push_back(static_cast<int32_t>(random() % kMaxPositions));
  }
  // Padding: slot -1 and an arbitrary position.
  std::vector<int64_t> padded_slots = slots;
  std::vector<int32_t> padded_positions = positions;
  for (int64_t row = 3; row < shape.rows; row += 7) {
    padded_slots[row] = -1;
    padded_positions[row] = -123456789;
  }

  const auto kv_at = [&](int64_t row, int64_t column) {
    return shape.fused ? q[row * q_stride + q_columns + column]
                       : separate[row * kv_stride + column];
  };
  std::vector<float> q_wide, kv_wide;
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t i = 0; i < q_columns; ++i) q_wide.push_back(from_bf16(q[row * q_stride + i]));
    for (int64_t i = 0; i < kColumns; ++i) kv_wide.push_back(from_bf16(kv_at(row, i)));
  }
  ThreadPool pool(0);
  const Stream stream(pool);
  std::vector<float> nope(static_cast<size_t>(shape.rows * shape.heads * kNope)),
      rope(static_cast<size_t>(shape.rows * shape.heads * kRope)),
      pages(static_cast<size_t>(num_pages * kPageSize * kColumns));
  split_rope_query(stream, ConstTensorView(q_wide.data(), {shape.rows, shape.heads, kHead}),
                   positions, table, TensorView(nope.data(), {shape.rows, shape.heads, kNope}),
                   TensorView(rope.data(), {shape.rows, shape.heads, kRope}));
  norm_rope_cache_write(
      stream, ConstTensorView(kv_wide.data(), {shape.rows, kColumns}), positions, slots,
      ConstTensorView(weight.data(), {kLatent}), kEps, table,
      {{.format = CacheFormat::kF32}, reinterpret_cast<std::byte*>(pages.data()), num_pages});

  const DeviceArray<uint16_t> device_kv(separate), device_rope(shape.rows * shape.heads * kRope),
      device_pages(num_pages * kPageSize * kColumns);
  DeviceArray<uint16_t> device_q(q);
  const DeviceArray<float> device_weight(weight), cos_sin(tabulate(table, kMaxPositions));
  const DeviceArray<int32_t> device_positions(padded_positions);
  const DeviceArray<int64_t> device_slots(padded_slots);
  std::vector<uint16_t> after_q, after_rope, after_pages;
  for (int launch = 0; launch < 3; ++launch) {
    device_q.copy_from(q);
    check(cudaMemset(device_rope.data(), 0xFF, device_rope.bytes()), "poisoning");
    check(cudaMemset(device_pages.data(), 0xFF, device_pages.bytes()), "poisoning");
    query_key({.q = device_q.data(),
               .q_stride = q_stride,
               .q_rope = shape.with_rope ? device_rope.data() : nullptr,
               .kv_a = shape.fused ? device_q.data() + q_columns : device_kv.data(),
               .kv_a_stride = kv_stride,
               .norm_weight = device_weight.data(),
               .eps = kEps,
               .cos_sin = cos_sin.data(),
               .positions = device_positions.data(),
               .slots = device_slots.data(),
               .pages = device_pages.data(),
               .rows = shape.rows,
               .heads = static_cast<int32_t>(shape.heads),
               .nope = kNope},
              nullptr);
    check(cudaDeviceSynchronize(), "query_key");
    if (launch == 0) {
      after_q = device_q.to_host();
      after_rope = device_rope.to_host();
      after_pages = device_pages.to_host();
    }
    ASSERT_EQ(device_q.to_host(), after_q);
    ASSERT_EQ(device_rope.to_host(), after_rope);
    ASSERT_EQ(device_pages.to_host(), after_pages);
  }

  std::vector<char> written(static_cast<size_t>(num_pages * kPageSize));
  for (int64_t row = 0; row < shape.rows; ++row) {
    const bool padding = padded_slots[row] < 0;
    for (int64_t head = 0; head < shape.heads; ++head) {
      for (int64_t i = 0; i < kHead; ++i) {
        const int64_t at = row * q_stride + head * kHead + i;
        if (i < kNope || padding) {
          ASSERT_EQ(after_q[at], q[at]);
          continue;
        }
        const int64_t dense = (row * shape.heads + head) * kRope + i - kNope;
        expect_close(after_q[at], rope[dense], 4);
        if (shape.with_rope) {
          ASSERT_EQ(after_rope[dense], after_q[at]);
        }
      }
    }
    if (padding) continue;
    written[slots[row]] = 1;
    for (int64_t i = 0; i < kColumns; ++i) {
      expect_close(after_pages[slots[row] * kColumns + i], pages[slots[row] * kColumns + i], 4);
    }
  }
  for (int64_t slot = 0; slot < std::ssize(written); ++slot) {
    for (int64_t i = 0; !written[slot] && i < kColumns; ++i) {
      ASSERT_EQ(after_pages[slot * kColumns + i], 0xFFFF);
    }
  }
}

TEST(QueryKey, EqualsTheCpu) {
  for (const int64_t heads : {1, 4, 16, 22, 128}) {
    for (const int64_t rows : {1, 2, 5, 64, 301}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << heads << " heads");
      compare({rows, heads, true, true, true});
      compare({rows, heads, false, false, false});
    }
  }
}

// Integers that sum exactly in any order, and a position without rotation: both sides round the
// same fp32 values, so the bytes are equal.
TEST(QueryKey, WritesTheCpusBytes) {
  constexpr int64_t kRows = 150, kHeads = 2, kNumPages = 4, kStride = kHeads * kHead;
  std::mt19937 random(11);
  const RopeTable table = make_rope_table(kRope, 10000, std::nullopt);
  std::vector<float> kv_a(static_cast<size_t>(kRows * kColumns));
  std::vector<uint16_t> narrow;
  for (int64_t i = 0; i < std::ssize(kv_a); ++i) {
    const bool is_zero_row = i / kColumns == 5;
    kv_a[i] = is_zero_row ? 0 : static_cast<float>(static_cast<int>(random() % 65) - 32);
    narrow.push_back(bf16_bits(kv_a[i]));
  }
  auto weight = random_f32(kLatent, 1, random);
  weight[3] = 400;  // beyond e4m3's range after the norm
  std::vector<int64_t> slots(kNumPages * kPageSize);
  std::iota(slots.begin(), slots.end(), 0);
  std::ranges::shuffle(slots, random);
  slots.resize(kRows);
  const std::vector<int32_t> positions(kRows, 0);
  ThreadPool pool(0);
  const DeviceArray<uint16_t> device_kv(narrow), device_q(random_bf16(kRows * kStride, 1, random));
  const DeviceArray<float> device_weight(weight), cos_sin(tabulate(table, 16));
  const DeviceArray<int32_t> device_positions(positions);
  const DeviceArray<int64_t> device_slots(slots);
  for (const CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    const LatentLayout layout{.format = format};
    std::vector<std::byte> expected(static_cast<size_t>(kNumPages * layout.page_bytes()),
                                    std::byte{0xFF});
    const DeviceArray<std::byte> pages(expected);
    norm_rope_cache_write(Stream(pool), ConstTensorView(kv_a.data(), {kRows, kColumns}), positions,
                          slots, ConstTensorView(weight.data(), {kLatent}), kEps, table,
                          {layout, expected.data(), kNumPages});
    query_key({.q = device_q.data(),
               .q_stride = kStride,
               .kv_a = device_kv.data(),
               .kv_a_stride = kColumns,
               .norm_weight = device_weight.data(),
               .eps = kEps,
               .cos_sin = cos_sin.data(),
               .positions = device_positions.data(),
               .slots = device_slots.data(),
               .pages = pages.data(),
               .format = format,
               .rows = kRows,
               .heads = kHeads,
               .nope = kNope},
              nullptr);
    check(cudaDeviceSynchronize(), "query_key");
    const auto actual = pages.to_host();
    int64_t others = 0;
    for (size_t i = 0; i < expected.size(); ++i) others += actual[i] != expected[i];
    EXPECT_EQ(others, 0) << name_of(format);
  }
}

}  // namespace
}  // namespace fathom::cuda
