#include "cli/bench.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cli/model_work.h"

namespace fathom {
namespace {

TEST(Percentile, InterpolatesAsNumpyDoes) {
  const std::vector<double> values = {4, 1, 3, 2};
  EXPECT_EQ(percentile(values, 0), 1);
  EXPECT_EQ(percentile(values, 100), 4);
  EXPECT_DOUBLE_EQ(percentile(values, 50), 2.5);
  EXPECT_DOUBLE_EQ(percentile(values, 99), 3.97);
  EXPECT_EQ(percentile({7}, 99), 7);
  EXPECT_EQ(mean({1, 2, 6}), 3);
}

TEST(RandomPrompt, HasNoZerosAndRepeatsOnlyWithItsSeed) {
  const auto prompt = random_prompt(5, 1000, 1, 2);
  EXPECT_EQ(*std::min_element(prompt.begin(), prompt.end()), 1);
  EXPECT_EQ(*std::max_element(prompt.begin(), prompt.end()), 4);
  EXPECT_EQ(prompt, random_prompt(5, 1000, 1, 2));
  EXPECT_NE(prompt, random_prompt(5, 1000, 2, 2));
  EXPECT_NE(prompt, random_prompt(5, 1000, 1, 3));
}

TEST(ModelWork, OfTheBundledModel) {
  const auto model = find_bundled("models/fathom-tiny");
  ASSERT_TRUE(model.has_value());
  const auto checkpoint = Checkpoint::open(*model);
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  const ModelConfig& config = checkpoint->config();

  // From config.json: hidden 256, 4 heads of 192 and 128, q_lora 128, latent 512 + 64; one dense
  // layer of 768 and seven of 16 experts of 128 with 4 + 1 active; vocabulary 8,192.
  const double attention = 256 * 128 + 128 * 4 * 192 + 256 * 576 + 512 * 4 * 256 + 4 * 128 * 256;
  const double dense = 3 * 256 * 768, moe = 3 * 256 * 128 * 5 + 256 * 16;
  const double token = 8 * attention + dense + 7 * moe, head = 8192.0 * 256;
  EXPECT_DOUBLE_EQ(prefill_flops(config, 1), 2 * (token + head + 8 * 4 * 320));
  EXPECT_DOUBLE_EQ(prefill_flops(config, 512),
                   2 * (512 * token + head + 512.0 * 513 / 2 * 8 * 4 * 320));

  // The weights that one token uses: FP8 except head, norms and gate; scales are negligible.
  const double one = decode_step_bytes(*checkpoint, LoadOptions(), CacheFormat::kBF16, 1, 0);
  const double expected = 8 * attention + dense + 7 * 3 * 256 * 128 * 5 + head * 2;
  EXPECT_NEAR(one, expected, 0.02 * expected);
  // Many sequences use all experts, and each reads its own cache.
  const double many = decode_step_bytes(*checkpoint, LoadOptions(), CacheFormat::kBF16, 1000, 0);
  EXPECT_NEAR(many - one, 7.0 * 3 * 256 * 128 * 12, 0.12 * (many - one));
  EXPECT_DOUBLE_EQ(decode_step_bytes(*checkpoint, LoadOptions(), CacheFormat::kBF16, 2, 100) -
                       decode_step_bytes(*checkpoint, LoadOptions(), CacheFormat::kBF16, 2, 0),
                   2 * 100 * 8 * 1152);
}

// Four bits: scales are a ninth of the bytes, and of the experts only those selected are read.
TEST(ModelWork, OfFourBits) {
  const auto checkpoint = Checkpoint::open_dummy(FATHOM_SOURCE_DIR "/bench/models/v2-lite-int4");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  // 27 layers of 16 heads, hidden 2,048; 26 with 6 + 2 experts of 1,408, one dense of 10,944.
  const double attention = 2048 * (16 * 192 + 576) + 512 * 16 * 256 + 16 * 128 * 2048;
  const double linear = 27 * attention + 3.0 * 2048 * (26 * 8 * 1408 + 10944);
  const double head = 102400.0 * 2048, gates = 26.0 * 64 * 2048;
  const double expected = linear * 4.5 / 8 + (head + gates) * 2;
  EXPECT_NEAR(decode_step_bytes(*checkpoint, LoadOptions(), CacheFormat::kBF16, 1, 0), expected,
              0.01 * expected);
}

}  // namespace
}  // namespace fathom
