#include "cache/latent_row.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"

namespace fathom {
namespace {

std::vector<float> random_values(int64_t count, uint64_t seed, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = scale * static_cast<float>(2 * random_uniform(seed, 0, i) - 1);
  }
  return values;
}

TEST(LatentLayout, RowBytesOfThePublishedShape) {
  LatentLayout layout;
  EXPECT_EQ(layout.row_bytes(), 1152);
  layout.format = CacheFormat::kFp8Scaled;
  EXPECT_EQ(layout.row_bytes(), 656);
  layout.format = CacheFormat::kE5M2;
  EXPECT_EQ(layout.row_bytes(), 576);
  layout.format = CacheFormat::kF32;
  EXPECT_EQ(layout.page_bytes(), 64 * 2304);
  layout = {CacheFormat::kFp8Scaled, 200, 16};  // a ragged second block still has its scale
  EXPECT_EQ(layout.row_bytes(), 200 + 8 + 32);
}

TEST(LatentLayout, NamesRoundTrip) {
  for (const auto format : {CacheFormat::kF32, CacheFormat::kBF16, CacheFormat::kFp8Scaled,
                            CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    ASSERT_TRUE(parse_cache_format(name_of(format)).has_value());
    EXPECT_EQ(*parse_cache_format(name_of(format)), format);
  }
  EXPECT_FALSE(parse_cache_format("auto").has_value());
  EXPECT_NE(parse_cache_format("int8").error().message.find("int8"), std::string::npos);
}

TEST(LatentCache, LayersAreDisjointAndImpossibleSizesAreRefused) {
  const auto cache = LatentCache::allocate({CacheFormat::kBF16, 32, 8}, 3, 5);
  ASSERT_TRUE(cache.has_value());
  EXPECT_EQ(cache->layer(1).data - cache->layer(0).data, 64 * 80);
  EXPECT_EQ(cache->layer(1).row(1, 0) - cache->layer(1).row(0, 0), 3 * 64 * 80);
  EXPECT_EQ(cache->page(1), cache->layer(0).row(1, 0));
  EXPECT_EQ(cache->layer(2).row(4, 63) - cache->layer(0).data, (3 * 5 * 64 - 1) * 80);
  EXPECT_FALSE(LatentCache::allocate({}, 61, int64_t{1} << 60).has_value());
  EXPECT_FALSE(LatentCache::allocate({}, 61, 0).has_value());
}

// A page is one piece: latents of all layers, index keys of all layers, state.
TEST(LatentCache, PagesHaveIndexKeysBehindTheirLatents) {
  const auto plain = LatentCache::allocate({CacheFormat::kBF16, 32, 8}, 3, 5, 100);
  ASSERT_TRUE(plain.has_value());
  EXPECT_FALSE(plain->index_key_layout());
  const IndexKeyLayout keys{IndexKeyFormat::kE4M3, 128};
  EXPECT_EQ(keys.row_bytes(), 132);
  const auto cache = LatentCache::allocate({CacheFormat::kBF16, 32, 8}, 3, 5, 100, keys);
  ASSERT_TRUE(cache.has_value());
  const int64_t latent = int64_t{64} * 80, index = int64_t{64} * 132;
  EXPECT_EQ(cache->page_bytes(), plain->page_bytes() + 3 * index);
  EXPECT_EQ(cache->page(1) - cache->page(0), 3 * (latent + index) + 100);
  EXPECT_EQ(cache->layer(2).row(1, 0) - cache->page(1), 2 * latent);
  EXPECT_EQ(cache->index_keys(0).row(1, 0) - cache->page(1), 3 * latent);
  EXPECT_EQ(cache->index_keys(2).row(4, 63) - cache->page(4),
            3 * latent + 2 * index + int64_t{63} * 132);
  EXPECT_EQ(cache->index_keys(2).num_pages, 5);
  EXPECT_EQ(cache->state(4), cache->index_keys(2).row(4, 63) + 132);
}

// Layers that share another one's choice have none.
TEST(LatentCache, SomeLayersHaveIndexKeys) {
  const IndexKeyLayout keys{IndexKeyFormat::kE4M3, 128};
  const auto cache =
      LatentCache::allocate({CacheFormat::kBF16, 32, 8}, 3, 5, 100, keys, {true, false, true});
  ASSERT_TRUE(cache.has_value());
  const int64_t latent = int64_t{64} * 80, index = int64_t{64} * 132;
  EXPECT_EQ(cache->page_bytes(), 3 * latent + 2 * index + 100);
  EXPECT_TRUE(cache->has_index_keys(0));
  EXPECT_FALSE(cache->has_index_keys(1));
  EXPECT_EQ(cache->index_keys(2).row(1, 0) - cache->page(1), 3 * latent + index);
  EXPECT_EQ(cache->state(4), cache->index_keys(2).row(4, 63) + 132);
}

// The rounding error of each format: half a unit in the last place, relative, and its smallest
// step, absolute.
struct FormatCase {
  CacheFormat format;
  double relative;
  double absolute;
};

class LatentRow : public testing::TestWithParam<FormatCase> {};

TEST_P(LatentRow, RoundTripStaysWithinTheFormat) {
  for (const auto& [latent_dim, rope_dim] :
       {std::pair<int64_t, int64_t>{512, 64}, {96, 16}, {200, 6}, {129, 2}}) {
    const LatentLayout layout{GetParam().format, latent_dim, rope_dim};
    std::vector<float> latent = random_values(latent_dim, 1, 3);
    const std::vector<float> rope = random_values(rope_dim, 2, 2);
    latent[3] = 0;
    // Poison: a byte after the row must survive, every byte of the row must be written.
    std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes()) + 1, std::byte{0xA5});
    encode_row(layout, latent.data(), rope.data(), row.data());
    EXPECT_EQ(row.back(), std::byte{0xA5});
    std::vector<float> latent_back(latent.size() + 1, 1e30f);
    std::vector<float> rope_back(rope.size() + 1, 1e30f);
    decode_row(layout, row.data(), latent_back.data(), rope_back.data());
    EXPECT_EQ(latent_back.back(), 1e30f);
    EXPECT_EQ(rope_back.back(), 1e30f);
    const bool scaled = layout.format == CacheFormat::kFp8Scaled;
    const double absolute = GetParam().absolute * (scaled ? 3.0 / 448 : 1);
    for (size_t i = 0; i < latent.size(); ++i) {
      ASSERT_NEAR(latent_back[i], latent[i], std::abs(latent[i]) * GetParam().relative + absolute);
    }
    const double rope_relative = scaled ? 0x1p-8 : GetParam().relative;
    for (size_t i = 0; i < rope.size(); ++i) {
      ASSERT_NEAR(rope_back[i], rope[i], std::abs(rope[i]) * rope_relative + GetParam().absolute);
    }
    // Decoded values are stored exactly the second time.
    std::vector<std::byte> again(row.size(), std::byte{0xA5});
    encode_row(layout, latent_back.data(), rope_back.data(), again.data());
    if (!scaled) {
      EXPECT_EQ(row, again);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, LatentRow,
                         testing::Values(FormatCase{CacheFormat::kF32, 0, 0},
                                         FormatCase{CacheFormat::kBF16, 0x1p-8, 0},
                                         FormatCase{CacheFormat::kFp8Scaled, 0x1p-4, 0x1p-10},
                                         FormatCase{CacheFormat::kE4M3, 0x1p-4, 0x1p-10},
                                         FormatCase{CacheFormat::kE5M2, 0x1p-3, 0x1p-17}));

TEST(LatentRow, ScaleIsTheBlocksLargestOver448) {
  const LatentLayout layout{CacheFormat::kFp8Scaled, 256, 2};
  std::vector<float> latent(256, 0.0f);
  latent[5] = -7;
  const float rope[2] = {1.5f, -2};
  std::vector<std::byte> row(static_cast<size_t>(layout.row_bytes()));
  encode_row(layout, latent.data(), rope, row.data());
  float scales[2];
  std::memcpy(scales, row.data() + 256, sizeof scales);
  EXPECT_EQ(scales[0], 7.0f / 448);
  EXPECT_EQ(scales[1], 1e-4f / 448);   // a zero block: the floor prevents a division by zero
  EXPECT_EQ(row[5], std::byte{0xFE});  // -448
  EXPECT_EQ(row[200], std::byte{0});
  std::vector<float> back(256);
  float rope_back[2];
  decode_row(layout, row.data(), back.data(), rope_back);
  EXPECT_EQ(back[5], -7);
  EXPECT_EQ(rope_back[0], 1.5f);
  EXPECT_EQ(rope_back[1], -2);
}

}  // namespace
}  // namespace fathom
