#include "cache/index_key_row.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "tensor/dtype.h"
#include "tensor/e4m3_round.h"

namespace fathom {
namespace {

std::vector<float> random_key(int64_t dim, uint64_t seed, double amplitude) {
  std::vector<float> key;
  for (int64_t i = 0; i < dim; ++i) {
    key.push_back(static_cast<float>(amplitude * (2 * random_uniform(seed, 0, i) - 1)));
  }
  return key;
}

TEST(IndexScale, ThePowersOfTwoThatTheReferenceHas) {
  EXPECT_EQ(index_scale(1), 0x1p-8f);
  EXPECT_EQ(index_scale(3.5f), 0x1p-7f);
  EXPECT_EQ(index_scale(448), 1);
  EXPECT_EQ(index_scale(449), 2);
  EXPECT_EQ(index_scale(std::nextafter(448.0f, 449.0f)), 2);
  for (const float small : {0.0f, 1e-30f, 1e-4f}) EXPECT_EQ(index_scale(small), 0x1p-22f);
  EXPECT_TRUE(std::isnan(index_scale(std::nanf(""))));
  EXPECT_TRUE(std::isnan(index_scale(INFINITY)));
  for (float amax = 1e-4f; amax < 1e6f; amax *= 1.0137f) {
    const float scale = index_scale(amax);
    EXPECT_LE(amax / scale, 448 * (1 + 1e-6f)) << amax;
    EXPECT_GT(amax / scale, 224 * (1 - 1e-6f)) << amax;
  }
}

TEST(IndexKeyRow, BytesAreThoseOfTheFormat) {
  EXPECT_EQ((IndexKeyLayout{IndexKeyFormat::kE4M3, 128}.row_bytes()), 132);
  EXPECT_EQ((IndexKeyLayout{IndexKeyFormat::kE4M3, 128}.page_bytes()), 8448);
  EXPECT_EQ((IndexKeyLayout{IndexKeyFormat::kBF16, 128}.row_bytes()), 256);
  EXPECT_EQ((IndexKeyLayout{IndexKeyFormat::kF32, 32}.row_bytes()), 128);
}

// Into memory of any alignment, and no byte beyond the row.
TEST(IndexKeyRow, ComesBackAsCloseAsTheFormatIs) {
  for (const auto format : {IndexKeyFormat::kE4M3, IndexKeyFormat::kBF16, IndexKeyFormat::kF32}) {
    for (const int64_t dim : {128, 32, 6}) {
      for (const double amplitude : {1.0, 300.0, 1e-6, 0.0}) {
        const IndexKeyLayout layout{format, dim};
        const std::vector<float> key = random_key(dim, 7, amplitude);
        std::vector<std::byte> memory(static_cast<size_t>(layout.row_bytes() + 4), std::byte{0xA5});
        std::byte* row = memory.data() + 3;
        encode_index_key(layout, key.data(), row);
        EXPECT_EQ(memory[2], std::byte{0xA5});
        EXPECT_EQ(memory.back(), std::byte{0xA5});
        std::vector<float> back(static_cast<size_t>(dim), std::nanf(""));
        decode_index_key(layout, row, back.data());
        float amax = 0;
        for (const float value : key) amax = std::max(amax, std::abs(value));
        for (int64_t i = 0; i < dim; ++i) {
          const double unit = 0x1p-10 * index_scale(amax);  // half of e4m3's smallest step
          const double error = format == IndexKeyFormat::kE4M3
                                   ? std::max(unit, std::abs(key[i]) * 0x1p-4)
                               : format == IndexKeyFormat::kBF16 ? std::abs(key[i]) * 0x1p-8
                                                                 : 0;
          ASSERT_LE(std::abs(double{key[i]} - double{back[i]}), error)
              << name_of(format) << " dim " << dim << " value " << key[i];
        }
      }
    }
  }
}

TEST(IndexKeyRow, ANanShowsInTheWholeRow) {
  const IndexKeyLayout layout{IndexKeyFormat::kE4M3, 32};
  for (const float damage : {std::nanf(""), -std::nanf(""), INFINITY}) {
    std::vector<float> key = random_key(32, 3, 1);
    key[17] = damage;
    std::vector<std::byte> row(36);
    encode_index_key(layout, key.data(), row.data());
    decode_index_key(layout, row.data(), key.data());
    for (const float value : key) EXPECT_TRUE(std::isnan(value));
  }
}

// The loop's form of to_e4m3(): every float of 16 upper bits with the mantissas around a tie, and
// random ones.
TEST(RoundToE4M3, GivesTheCodesOfTheDefinition) {
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const auto value = std::bit_cast<float>(upper << 16 | lower);
      ASSERT_EQ(round_to_e4m3(value), to_e4m3(value).bits) << value;
    }
  }
  for (uint64_t i = 0; i < 100'000; ++i) {
    const double exponent = 24 * random_uniform(5, 0, i) - 14;
    const auto value = static_cast<float>((2 * random_uniform(5, 1, i) - 1) * std::exp2(exponent));
    ASSERT_EQ(round_to_e4m3(value), to_e4m3(value).bits) << value;
  }
}

}  // namespace
}  // namespace fathom
