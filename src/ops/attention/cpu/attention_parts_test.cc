// Operations around attention: combining results of splits and reading the cache back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cache/latent_row.h"
#include "ops/attention/attention_test_data.h"
#include "ops/attention/cpu/attention_cpu.h"

namespace fathom {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

TEST(MergeAttention, PartsGiveTheWhole) {
  constexpr int64_t kQueries = 40, kKeys = 300, kHeads = 3, kNope = 32, kRope = 16, kV = 24;
  constexpr int64_t kFirst = 130;
  const TestTensor q_nope(kQueries * kHeads * kNope, DType::kF32, 1, 2);
  const TestTensor q_rope(kQueries * kHeads * kRope, DType::kF32, 2, 2);
  const TestTensor kv(kKeys * kHeads * (kNope + kV), DType::kF32, 3, 2);
  const TestTensor k_rope(kKeys * kRope, DType::kF32, 4, 2);
  ThreadPool pool(2);
  const Stream stream(pool);
  std::vector<std::byte> workspace(mha_attention_workspace_bytes(kHeads, kNope + kRope, kV, 2));
  const auto attend = [&](int64_t first, int64_t count, int64_t visible_before) {
    std::pair<std::vector<float>, std::vector<float>> result(
        std::vector<float>(kQueries * kHeads * kV), std::vector<float>(kQueries * kHeads));
    mha_attention(stream, q_nope.view({kQueries, kHeads, kNope}),
                  q_rope.view({kQueries, kHeads, kRope}),
                  kv.view({kKeys, kHeads, kNope + kV}).rows(first, count),
                  k_rope.view({kKeys, kRope}).rows(first, count), visible_before, 0.15f,
                  TensorView(result.first.data(), {kQueries, kHeads, kV}),
                  TensorView(result.second.data(), {kQueries, kHeads}), workspace);
    return result;
  };
  const auto whole = attend(0, kKeys, kKeys - kQueries);
  auto merged = attend(0, kFirst, kFirst);
  const auto rest = attend(kFirst, kKeys - kFirst, kKeys - kQueries - kFirst);
  merge_attention(stream, ConstTensorView(rest.first.data(), {kQueries, kHeads, kV}),
                  ConstTensorView(rest.second.data(), {kQueries, kHeads}),
                  TensorView(merged.first.data(), {kQueries, kHeads, kV}),
                  TensorView(merged.second.data(), {kQueries, kHeads}));
  for (size_t i = 0; i < whole.first.size(); ++i) {
    ASSERT_NEAR(merged.first[i], whole.first[i], 2e-6);
  }
  for (size_t i = 0; i < whole.second.size(); ++i) {
    ASSERT_NEAR(merged.second[i], whole.second[i], 4e-6);
  }
}

TEST(MergeAttention, NothingVisibleOnEitherOrBothSides) {
  ThreadPool pool(1);
  // Rows: both, the first only, the second only, neither.
  const std::vector<float> lse_before = {0, 1, kLowest, kLowest};
  const std::vector<float> part_lse = {std::log(3.0f), kLowest, 2, kLowest};
  std::vector<float> out = {1, 1, 5, 5, std::nanf(""), std::nanf(""), 0, 0};
  const std::vector<float> part = {2, 6, std::nanf(""), std::nanf(""), 7, 7, 0, 0};
  std::vector<float> lse = lse_before;
  merge_attention(Stream(pool), ConstTensorView(part.data(), {4, 1, 2}),
                  ConstTensorView(part_lse.data(), {4, 1}), TensorView(out.data(), {4, 1, 2}),
                  TensorView(lse.data(), {4, 1}));
  EXPECT_NEAR(out[0], 1.75, 1e-6);
  EXPECT_NEAR(out[1], 4.75, 1e-6);
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-6);
  EXPECT_EQ(out[2], 5);
  EXPECT_EQ(lse[1], 1);
  EXPECT_EQ(out[5], 7);
  EXPECT_EQ(lse[2], 2);
  EXPECT_EQ(out[6], 0);
  EXPECT_EQ(lse[3], kLowest);
}

TEST(GatherLatent, EveryFormatAndType) {
  for (const auto format : {CacheFormat::kF32, CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                            CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    constexpr int64_t kLatent = 200, kRope = 6, kTokens = 300;
    const auto cache = LatentCache::allocate({format, kLatent, kRope}, 1, 8);
    ASSERT_TRUE(cache.has_value());
    const LatentPages pages = cache->layer(0);
    const std::vector<int32_t> page_ids = {3, 0, 7, 2, 5};
    for (int64_t token = 0; token < kTokens; ++token) {
      const TestTensor row(kLatent + kRope, DType::kF32, 50 + token, 2);
      encode_row(pages.layout, row.wide.data(), row.wide.data() + kLatent,
                 pages.row(page_ids[token / 64], token % 64));
    }
    ThreadPool pool(3);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 300}, {63, 2}, {100, 200}}) {
      std::vector<float> latent(count * kLatent + 1, 1e30f), rope(count * kRope + 1, 1e30f);
      std::vector<bf16> latent16(count * kLatent), rope16(count * kRope);
      gather_latent(Stream(pool), page_ids, pages, first, count,
                    TensorView(latent.data(), {count, kLatent}),
                    TensorView(rope.data(), {count, kRope}));
      gather_latent(Stream(pool), page_ids, pages, first, count,
                    TensorView(latent16.data(), {count, kLatent}),
                    TensorView(rope16.data(), {count, kRope}));
      EXPECT_EQ(latent.back(), 1e30f);
      EXPECT_EQ(rope.back(), 1e30f);
      std::vector<float> expected(kLatent + kRope);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = first + i;
        decode_row(pages.layout, pages.row(page_ids[token / 64], token % 64), expected.data(),
                   expected.data() + kLatent);
        for (int64_t d = 0; d < kLatent; ++d) {
          ASSERT_EQ(latent[i * kLatent + d], expected[d]);
          ASSERT_EQ(latent16[i * kLatent + d].bits, to_bf16(expected[d]).bits);
        }
        for (int64_t d = 0; d < kRope; ++d) {
          ASSERT_EQ(rope[i * kRope + d], expected[kLatent + d]);
          ASSERT_EQ(rope16[i * kRope + d].bits, to_bf16(expected[kLatent + d]).bits);
        }
      }
    }
  }
}

#if defined(__x86_64__)
// Whichever of the two this CPU prefers: the other one is right, too. The smallest values make
// every product subnormal, which is zero in both.
TEST(AttentionKernels, FmasHaveTheBitsOfDotProducts) {
  if (cpu_isa() < CpuIsa::kAvx512) GTEST_SKIP() << "no AVX-512";
  constexpr int64_t kRows = 24, kDims = 104, kValues = 72, kKeys = cpu::kTileKeys;
  const cpu::AttentionKernels& dots = cpu::kAvx512Bf16Attention;
  const cpu::AttentionKernels& fmas = cpu::kAvx512Bf16FmaAttention;
  for (const double size : {1.0, 0x1p-40, 0x1p-70, 0x1p-130}) {
    const TestTensor q(kRows * kDims, DType::kBF16, 1, size);
    const TestTensor p(kRows * kKeys, DType::kBF16, 2, size);
    const TestTensor keys(2 * kKeys * kDims, DType::kBF16, 3, std::max(size, 0x1p-70));
    std::vector<const void*> pointers;
    for (int64_t key = 0; key < 2 * kKeys; ++key) {  // those behind a tile are prefetched
      pointers.push_back(keys.narrow.data() + key * kDims);
    }
    std::vector<std::byte> packed_keys(static_cast<size_t>(dots.packed_keys_bytes(kDims)));
    std::vector<std::byte> packed_values(static_cast<size_t>(dots.packed_values_bytes(kValues)));
    dots.pack_keys(keys.narrow.data(), kDims, true, kKeys, 0, kDims, packed_keys.data());
    dots.pack_values(keys.narrow.data(), kDims, true, kKeys, kValues, packed_values.data());
    constexpr int64_t kStride = 128;  // of padded values
    const std::vector<float> rescale(kRows, 0.5f);
    // Scores and values of the first `rows` rows, in both forms.
    const auto run = [&](const cpu::AttentionKernels& kernels, int64_t rows) {
      std::vector<float> out(static_cast<size_t>(2 * kRows * (kKeys + kStride)), 0.25f);
      float* const scores = out.data();
      float* const values = scores + 2 * kRows * kKeys;
      kernels.direct_scores(q.narrow.data(), kDims, rows, pointers.data(), kKeys, kDims, scores);
      kernels.packed_scores(q.narrow.data(), kDims, rows, packed_keys.data(), kDims,
                            scores + kRows * kKeys);
      kernels.direct_values(p.narrow.data(), rows, pointers.data(), kKeys, kValues, rescale.data(),
                            values, kStride);
      kernels.packed_values(p.narrow.data(), rows, packed_values.data(), kKeys, kValues,
                            rescale.data(), values + kRows * kStride, kStride);
      return out;
    };
    for (const int64_t rows : {1, 2, 3, 4, 5, 8, 24}) {
      const std::vector<float> expected = run(dots, rows), actual = run(fmas, rows);
      EXPECT_EQ(std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)), 0)
          << rows << " rows, values of " << size;
    }
  }
}
#endif

// Every code of both FP8 types, with a usual scale and with one that could overflow a shortcut.
TEST(DecodeFp8, EveryCodeAtEveryLevel) {
  std::vector<uint8_t> codes(256 + 7);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (const CpuIsa isa : runnable_levels()) {
    for (const bool bf16_inputs : {false, true}) {
      const cpu::AttentionKernels& kernels = cpu::attention_kernels(isa, bf16_inputs);
      for (const bool is_e5m2 : {false, true}) {
        for (const float scale : {1.0f, 0.0123f, 1000.0f}) {
          std::vector<float> wide(codes.size());
          std::vector<bf16> narrow(codes.size());
          void* out = kernels.bf16_elements ? static_cast<void*>(narrow.data()) : wide.data();
          kernels.decode_fp8(codes.data(), is_e5m2, static_cast<int64_t>(codes.size()), scale, out);
          for (size_t i = 0; i < codes.size(); ++i) {
            const float code = is_e5m2 ? to_float(e5m2{codes[i]}) : to_float(e4m3{codes[i]});
            const float actual = kernels.bf16_elements ? to_float(narrow[i]) : wide[i];
            float expected = code * scale;
            if (kernels.bf16_elements) expected = to_float(to_bf16(expected));
            if (std::isnan(expected)) {
              ASSERT_TRUE(std::isnan(actual)) << "code " << i;
            } else {
              ASSERT_EQ(actual, expected) << "code " << i << " times " << scale;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fathom
