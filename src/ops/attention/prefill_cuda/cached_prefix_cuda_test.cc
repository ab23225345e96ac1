// Gathering cached rows on the GPU, against the CPU's operation.
#include "ops/attention/prefill_cuda/cached_prefix_cuda.h"

#include <gtest/gtest.h>

#include <numeric>

#include "base/math.h"
#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;

struct Range {
  int32_t first, count;
};

// Sequence s of the list is the batch's sequence 2 s.
void gather_and_compare(CacheFormat format, const std::vector<Range>& ranges) {
  constexpr int32_t kMaxPages = 40, kPadding = 5;
  std::mt19937 random(static_cast<uint32_t>(ranges.size()));
  std::vector<int32_t> tables(2 * ranges.size() * kMaxPages);
  std::iota(tables.begin(), tables.end(), 0);
  std::shuffle(tables.begin(), tables.end(), random);
  std::vector<int32_t> sequences, first_keys, key_starts = {0};
  for (const Range& range : ranges) {
    sequences.push_back(2 * static_cast<int32_t>(sequences.size()));
    first_keys.push_back(range.first);
    key_starts.push_back(key_starts.back() + range.count);
  }
  const int64_t keys = key_starts.back() + kPadding, num_pages = std::ssize(tables);
  const LatentLayout layout{.format = format};
  std::vector<std::byte> pages(static_cast<size_t>(num_pages * layout.page_bytes()));
  // A repeated pattern of distinct rows.
  const int64_t row_bytes = layout.row_bytes(), others = 997 * row_bytes;
  for (int64_t at = 0; at < std::ssize(pages); at += row_bytes) {
    if (at >= others) {
      std::copy_n(pages.begin() + (at - others), row_bytes, pages.begin() + at);
    } else {
      const auto values = random_f32(kColumns, 1, random);
      encode_row(layout, values.data(), values.data() + kLatent, pages.data() + at);
    }
  }
  const DeviceArray<std::byte> on_device(pages);
  const DeviceArray<uint16_t> latent(keys * kLatent), k_rope(keys * kRope);
  const DeviceArray<int32_t> its_tables(tables), its_sequences(sequences), its_first(first_keys),
      its_starts(key_starts);
  check(cudaMemset(latent.data(), 0xFF, latent.bytes()), "poison");
  check(cudaMemset(k_rope.data(), 0xFF, k_rope.bytes()), "poison");
  const DeviceArray<uint8_t> values(keys * kLatent);
  const DeviceArray<float> scales(kLatent / kScaleBlock * round_up(keys, 4));
  check(cudaMemset(values.data(), 0xFF, values.bytes()), "poison");
  check(cudaMemset(scales.data(), 0xFF, scales.bytes()), "poison");
  GatherLatentArguments arguments = {.pages = on_device.data(),
                                     .format = format,
                                     .block_tables = its_tables.data(),
                                     .max_pages = kMaxPages,
                                     .sequences = its_sequences.data(),
                                     .first_keys = its_first.data(),
                                     .key_starts = its_starts.data(),
                                     .num_sequences = static_cast<int32_t>(ranges.size()),
                                     .keys = keys,
                                     .latent = latent.data(),
                                     .k_rope = k_rope.data()};
  gather_latent(arguments, nullptr);
  arguments.latent = nullptr;
  arguments.quantized = {.values = values.data(),
                         .values_row_stride = kLatent,
                         .scales = scales.data(),
                         .scales_block_stride = round_up(keys, 4)};
  gather_latent(arguments, nullptr);
  check(cudaDeviceSynchronize(), "synchronize");

  std::vector<uint16_t> expected_latent(static_cast<size_t>(keys * kLatent), 0xFFFF),
      expected_rope(static_cast<size_t>(keys * kRope), 0xFFFF);
  ThreadPool pool(1);
  const LatentPages cache{layout, pages.data(), num_pages};
  for (size_t s = 0; s < ranges.size(); ++s) {
    fathom::gather_latent(Stream(pool), std::span(tables).subspan(2 * s * kMaxPages, kMaxPages),
                          cache, ranges[s].first, ranges[s].count,
                          TensorView(expected_latent.data() + key_starts[s] * kLatent, DType::kBF16,
                                     {ranges[s].count, kLatent}),
                          TensorView(expected_rope.data() + key_starts[s] * kRope, DType::kBF16,
                                     {ranges[s].count, kRope}));
  }
  EXPECT_EQ(latent.to_host(), expected_latent);
  EXPECT_EQ(k_rope.to_host(), expected_rope);

  std::vector<uint8_t> expected_values(static_cast<size_t>(keys * kLatent), 0xFF);
  const auto its_scales = scales.to_host();
  for (int64_t i = 0; i < key_starts.back() * kLatent; i += kScaleBlock) {
    bf16 x[kScaleBlock];
    e4m3 y[kScaleBlock];
    for (int64_t j = 0; j < kScaleBlock; ++j) x[j] = {expected_latent[static_cast<size_t>(i + j)]};
    const int64_t row = i / kLatent, block = i % kLatent / kScaleBlock;
    ASSERT_EQ(its_scales[static_cast<size_t>(block * round_up(keys, 4) + row)],
              quantize_block(x, ScaleForm::kF32, y));
    for (int64_t j = 0; j < kScaleBlock; ++j)
      expected_values[static_cast<size_t>(i + j)] = y[j].bits;
  }
  EXPECT_EQ(values.to_host(), expected_values);
}

class GatherLatent : public testing::TestWithParam<CacheFormat> {};

TEST_P(GatherLatent, RangesOfOneAndOfManySequences) {
  gather_and_compare(GetParam(), {{0, 1}});
  gather_and_compare(GetParam(), {{0, 2560}});
  gather_and_compare(GetParam(), {{63, 66}, {5, 0}, {0, 128}, {100, 1}});
  std::mt19937 random(9);
  std::vector<Range> many(100);
  for (Range& range : many) {
    range = {static_cast<int32_t>(random() % 500), static_cast<int32_t>(random() % 200)};
  }
  gather_and_compare(GetParam(), many);
}

INSTANTIATE_TEST_SUITE_P(Formats, GatherLatent,
                         testing::Values(CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                                         CacheFormat::kE4M3, CacheFormat::kE5M2));

}  // namespace
}  // namespace fathom::cuda
