#include "ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "cache/latent_row.h"

namespace fathom {
namespace {

// Printed from the published model code at 9 digits: theta 10000, factor 40, betas 32 and 1.
const std::vector<float> kV3Frequencies = {1,
                                           0.749894209f,
                                           0.562341325f,
                                           0.421696503f,
                                           0.316227766f,
                                           0.237137371f,
                                           0.177827941f,
                                           0.133352143f,
                                           0.1f,
                                           0.0749894209f,
                                           0.0562341325f,
                                           0.0390069266f,
                                           0.0268793601f,
                                           0.0183781462f,
                                           0.0124479559f,
                                           0.00833450895f,
                                           0.0055f,
                                           0.00356199749f,
                                           0.0022493653f,
                                           0.00137051364f,
                                           7.90569415e-4f,
                                           4.14990398e-4f,
                                           1.77827941e-4f,
                                           3.33380358e-05f,
                                           2.5e-05f,
                                           1.87473552e-05f,
                                           1.40585331e-05f,
                                           1.05424126e-05f,
                                           7.90569415e-06f,
                                           5.92843426e-06f,
                                           4.44569853e-06f,
                                           3.33380358e-06f};

// theta 50000, factor 32, betas 1 and 1: a step between pairs 19 and 20.
const std::vector<float> kKimiFrequencies = {1,
                                             0.713111085f,
                                             0.508527419f,
                                             0.36263654f,
                                             0.258600136f,
                                             0.184410624f,
                                             0.13150526f,
                                             0.0937778586f,
                                             0.0668740305f,
                                             0.0476886124f,
                                             0.0340072782f,
                                             0.024250967f,
                                             0.0172936334f,
                                             0.0123322817f,
                                             0.00879428677f,
                                             0.00627130338f,
                                             0.00447213595f,
                                             0.00318912972f,
                                             0.00227420376f,
                                             0.00162175991f,
                                             3.61404677e-05f,
                                             2.57721682e-05f,
                                             1.83784188e-05f,
                                             1.31058542e-05f,
                                             9.34592988e-06f,
                                             6.6646862e-06f,
                                             4.75266161e-06f,
                                             3.38917567e-06f,
                                             2.41685874e-06f,
                                             1.72348876e-06f,
                                             1.22903894e-06f,
                                             8.76441291e-07f};

void expect_frequencies(const RopeTable& table, const std::vector<float>& expected) {
  ASSERT_EQ(table.inverse_frequencies.size(), expected.size());
  for (size_t k = 0; k < expected.size(); ++k) {
    EXPECT_NEAR(table.inverse_frequencies[k], expected[k], expected[k] * 2.5e-7) << k;
  }
}

TEST(RopeTable, YarnOfThePublishedModels) {
  YarnParameters v3;
  v3.factor = 40;
  v3.mscale_all_dim = 1;
  expect_frequencies(make_rope_table(64, 10000, v3), kV3Frequencies);
  EXPECT_EQ(make_rope_table(64, 10000, v3).magnitude, 1.0f);
  YarnParameters kimi = v3;
  kimi.factor = 32;
  kimi.beta_fast = 1;
  expect_frequencies(make_rope_table(64, 50000, kimi), kKimiFrequencies);
}

TEST(RopeTable, MagnitudeIsTheRatio) {
  YarnParameters yarn;
  yarn.factor = 40;
  yarn.mscale = 1;
  yarn.mscale_all_dim = 0.5;
  const double expected = 1.36888794541 / (1 + 0.05 * std::log(40.0));
  EXPECT_NEAR(make_rope_table(64, 10000, yarn).magnitude, expected, 1e-6);
  yarn.mscale_all_dim = 0;
  EXPECT_NEAR(make_rope_table(64, 10000, yarn).magnitude, 1.36888794541, 1e-6);
}

TEST(RopeTable, WithoutScalingPlainPowers) {
  const RopeTable table = make_rope_table(6, 100, std::nullopt);
  ASSERT_EQ(table.inverse_frequencies.size(), 3u);
  for (int k = 0; k < 3; ++k) {
    EXPECT_NEAR(table.inverse_frequencies[k], std::pow(100.0, -k / 3.0), 1e-7);
  }
}

// Llama 3.1's scaling, computed in double by its definition: head dim 128, theta 500000.
TEST(RopeTable, Llama3ScalesLongWavelengths) {
  const RopeTable table = make_rope_table(128, 500000, std::nullopt, Llama3Parameters{});
  const struct {
    size_t pair;
    double frequency;
  } cases[] = {{0, 1},
               {20, 0.016560440080994446},
               {28, 0.0032114459947525913},
               {29, 0.002166570763503359},
               {32, 0.0005248461609929547},
               {34, 0.00017850781276799638},
               {35, 9.556212353964683e-05},
               {36, 7.78465527393245e-05},
               {63, 3.068925988914511e-07}};
  for (const auto& [pair, frequency] : cases) {
    EXPECT_NEAR(table.inverse_frequencies[pair], frequency, frequency * 3e-6) << pair;
  }
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(3 * random_uniform(seed, 0, i) - 1.2);
  }
  return values;
}

// The pair as a complex number times e^(i * position * frequency), in double from the fp32 angle.
std::complex<double> rotated(const float* pair, int32_t position, const RopeTable& table,
                             int64_t k) {
  const float angle = static_cast<float>(position) * table.inverse_frequencies[k];
  return std::complex<double>(pair[0], pair[1]) *
         std::polar(static_cast<double>(table.magnitude), static_cast<double>(angle));
}

template <typename T>
void expect_split(int64_t rows, int64_t heads, int64_t nope, int64_t rope, const RopeTable& table) {
  ThreadPool pool(3);
  const std::vector<float> q = random_values(rows * heads * (nope + rope), 5);
  std::vector<int32_t> positions;
  for (int64_t row = 0; row < rows; ++row) {
    positions.push_back(static_cast<int32_t>(row * 977 % 131072));  // within and past the table
  }
  std::vector<T> q_nope(static_cast<size_t>(rows * heads * nope + 1));
  std::vector<T> q_rope(static_cast<size_t>(rows * heads * rope + 1));
  std::memset(static_cast<void*>(q_nope.data()), 0xFF, q_nope.size() * sizeof(T));
  std::memset(static_cast<void*>(q_rope.data()), 0xFF, q_rope.size() * sizeof(T));
  split_rope_query(Stream(pool), ConstTensorView(q.data(), {rows, heads, nope + rope}), positions,
                   table, TensorView(q_nope.data(), {rows, heads, nope}),
                   TensorView(q_rope.data(), {rows, heads, rope}));
  EXPECT_TRUE(std::isnan(to_float(q_nope.back())));
  EXPECT_TRUE(std::isnan(to_float(q_rope.back())));
  const double relative = std::is_same_v<T, bf16> ? 0x1p-8 : 0;
  for (int64_t i = 0; i < rows * heads; ++i) {
    const float* in = q.data() + i * (nope + rope);
    for (int64_t j = 0; j < nope; ++j) {
      ASSERT_NEAR(to_float(q_nope[i * nope + j]), in[j], std::abs(in[j]) * relative);
    }
    for (int64_t k = 0; k < rope / 2; ++k) {
      const auto expected = rotated(in + nope + 2 * k, positions[i / heads], table, k);
      ASSERT_NEAR(to_float(q_rope[i * rope + 2 * k]), expected.real(), 3 * relative + 1e-6);
      ASSERT_NEAR(to_float(q_rope[i * rope + 2 * k + 1]), expected.imag(), 3 * relative + 1e-6);
    }
  }
}

TEST(SplitRopeQuery, MatchesComplexRotation) {
  YarnParameters yarn;
  yarn.factor = 40;
  const RopeTable table = make_rope_table(64, 10000, yarn);  // magnitude 1.37
  expect_split<float>(1, 4, 128, 64, table);
  expect_split<bf16>(300, 4, 128, 64, table);
  const RopeTable odd = make_rope_table(16, 10000, std::nullopt);
  expect_split<float>(140, 3, 32, 16, odd);
  expect_split<bf16>(9, 3, 33, 16, odd);
}

// Llama's pairs (i, i + dim / 2), of two heads beside one another.
TEST(SplitRopeQuery, HalvesOfEachHead) {
  constexpr int64_t kRows = 70, kHeads = 3, kDim = 16, kRope = 2 * kDim;
  RopeTable table = make_rope_table(kDim, 10000, std::nullopt);
  table.pairs = RopePairs::kHalves;
  const std::vector<float> q = random_values(kRows * kHeads * kRope, 8);
  std::vector<int32_t> positions;
  for (int64_t row = 0; row < kRows; ++row) positions.push_back(static_cast<int32_t>(row * 131));
  std::vector<float> out(q.size(), 1e30f);
  const TensorView rotated_q(out.data(), {kRows, kHeads, kRope});
  ThreadPool pool(3);
  split_rope_query(Stream(pool), ConstTensorView(q.data(), {kRows, kHeads, kRope}), positions,
                   table, rotated_q.columns(0, 0), rotated_q);
  for (int64_t head = 0; head < kRows * kHeads * 2; ++head) {  // of kDim values
    for (int64_t k = 0; k < kDim / 2; ++k) {
      const auto first = static_cast<size_t>(head * kDim + k), second = first + kDim / 2;
      const float pair[] = {q[first], q[second]};
      const auto expected =
          rotated(pair, positions[static_cast<size_t>(head / (2 * kHeads))], table, k);
      ASSERT_NEAR(out[first], expected.real(), 1e-6);
      ASSERT_NEAR(out[second], expected.imag(), 1e-6);
    }
  }
}

// Without a weight the latent stays as it is; the key is that of two heads.
TEST(NormRopeCacheWriteWithoutNorm, KeepsTheLatent) {
  constexpr int64_t kRows = 5, kLatent = 24, kRope = 16;
  const RopeTable table = make_rope_table(kRope / 2, 10000, std::nullopt);
  const std::vector<float> kv = random_values(kRows * (kLatent + kRope), 9);
  auto cache = LatentCache::allocate({CacheFormat::kF32, kLatent, kRope}, 1, 1);
  ASSERT_TRUE(cache.has_value());
  const LatentPages pages = cache->layer(0);
  const std::vector<int32_t> positions = {0, 7, 100, 4095, 5000};
  const std::vector<int64_t> slots = {0, 1, 2, 3, 4};
  ThreadPool pool(2);
  norm_rope_cache_write(Stream(pool), ConstTensorView(kv.data(), {kRows, kLatent + kRope}),
                        positions, slots, {}, 1e-6f, table, pages);
  std::vector<float> latent(kLatent), key(kRope);
  for (int64_t row = 0; row < kRows; ++row) {
    decode_row(pages.layout, pages.row(0, row), latent.data(), key.data());
    const float* in = kv.data() + row * (kLatent + kRope);
    for (int64_t i = 0; i < kLatent; ++i) ASSERT_EQ(latent[static_cast<size_t>(i)], in[i]);
    for (int64_t k = 0; k < kRope / 2; ++k) {
      const auto expected = rotated(in + kLatent + 2 * k, positions[static_cast<size_t>(row)],
                                    table, k % (kRope / 4));
      ASSERT_NEAR(key[static_cast<size_t>(2 * k)], expected.real(), 1e-6);
      ASSERT_NEAR(key[static_cast<size_t>(2 * k + 1)], expected.imag(), 1e-6);
    }
  }
}

class NormRopeCacheWrite : public testing::TestWithParam<CacheFormat> {};

TEST_P(NormRopeCacheWrite, StoresNormedAndRotatedOnce) {
  for (const auto& [latent, rope] : {std::pair<int64_t, int64_t>{512, 64}, {96, 16}}) {
    const RopeTable table = make_rope_table(rope, 10000, std::nullopt);
    constexpr int64_t kRows = 70;
    const int64_t stride = latent + rope + 5;
    const std::vector<float> kv = random_values(kRows * stride, 6);
    const std::vector<float> weight = random_values(latent, 7);
    const LatentLayout layout{GetParam(), latent, rope};
    auto cache = LatentCache::allocate(layout, 1, 4);
    ASSERT_TRUE(cache.has_value());
    const LatentPages pages = cache->layer(0);
    std::memset(pages.data, 0xA5, static_cast<size_t>(4 * layout.page_bytes()));
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int64_t row = 0; row < kRows; ++row) {
      positions.push_back(static_cast<int32_t>(row * 100));
      slots.push_back(row * 3 % 256);  // scattered, distinct
    }
    ThreadPool pool(3);
    norm_rope_cache_write(
        Stream(pool), ConstTensorView(kv.data(), {kRows, stride}).columns(0, latent + rope),
        positions, slots, ConstTensorView(weight.data(), {latent}), 1e-6f, table, pages);
    std::vector<float> exact(static_cast<size_t>(latent + rope));
    std::vector<float> row_expected(exact.size());
    std::vector<float> row_actual(exact.size());
    std::vector<std::byte> encoded(static_cast<size_t>(layout.row_bytes()));
    for (int64_t row = 0; row < kRows; ++row) {
      const float* in = kv.data() + row * stride;
      double squares = 0;
      for (int64_t i = 0; i < latent; ++i) squares += static_cast<double>(in[i]) * in[i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(latent) + 1e-6);
      for (int64_t i = 0; i < latent; ++i) exact[i] = static_cast<float>(weight[i] * in[i] * scale);
      for (int64_t k = 0; k < rope / 2; ++k) {
        const auto pair = rotated(in + latent + 2 * k, positions[row], table, k);
        exact[latent + 2 * k] = static_cast<float>(pair.real());
        exact[latent + 2 * k + 1] = static_cast<float>(pair.imag());
      }
      encode_row(layout, exact.data(), exact.data() + latent, encoded.data());
      decode_row(layout, encoded.data(), row_expected.data(), row_expected.data() + latent);
      decode_row(layout, pages.row(slots[row] / kPageSize, slots[row] % kPageSize),
                 row_actual.data(), row_actual.data() + latent);
      // At most one step of the format: where the fp32 result rounds the other way.
      const double step = GetParam() == CacheFormat::kF32    ? 1e-6
                          : GetParam() == CacheFormat::kBF16 ? 0x1p-7
                          : GetParam() == CacheFormat::kE5M2 ? 0x1p-2
                                                             : 0x1p-3;
      int64_t different = 0;
      for (size_t i = 0; i < exact.size(); ++i) {
        ASSERT_NEAR(row_actual[i], row_expected[i], std::abs(row_expected[i]) * step + 1e-6);
        different += std::abs(row_actual[i] - row_expected[i]) > 1e-5 * std::abs(row_expected[i]);
      }
      if (GetParam() != CacheFormat::kF32) {
        EXPECT_LE(different, 2);
      }
    }
    EXPECT_EQ(*pages.row(0, 1), std::byte{0xA5});  // a slot that none of these rows has
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, NormRopeCacheWrite,
                         testing::Values(CacheFormat::kF32, CacheFormat::kBF16,
                                         CacheFormat::kFp8Scaled, CacheFormat::kE4M3,
                                         CacheFormat::kE5M2));

}  // namespace
}  // namespace fathom
