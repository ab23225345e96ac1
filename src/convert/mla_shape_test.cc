#include "convert/mla_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom::mla {
namespace {

using testing::HasSubstr;

ModelConfig grouped(int64_t kv_heads, int64_t head_dim) {
  ModelConfig config;
  config.num_heads = 4 * kv_heads;
  config.gqa = {kv_heads, head_dim};
  return config;
}

MlaShape planned(const ModelConfig& config, const MlaRequest& request = {}) {
  const auto shape = plan_mla_shape(config, request);
  EXPECT_TRUE(shape.has_value()) << (shape ? "" : shape.error().message);
  return shape.value_or(MlaShape());
}

TEST(MlaShape, FollowsFromTheModel) {
  const MlaShape qwen = planned(grouped(4, 128));
  EXPECT_EQ(qwen.rope_dim, 64);
  EXPECT_EQ(qwen.collapse(), 2);
  EXPECT_EQ(qwen.fold, 2);
  EXPECT_EQ(qwen.rank, 512);
  EXPECT_EQ(qwen.most_rank(), 2 * 512 - 64);
  EXPECT_FALSE(qwen.is_lossless());
  const MlaShape two = planned(grouped(2, 32));
  EXPECT_EQ(two.rope_dim, 64);
  EXPECT_EQ(two.rope_heads(), 2);
  EXPECT_EQ(two.rank, 64);
  EXPECT_TRUE(two.is_lossless());
  // 64 is neither a part of 80 nor a multiple of it.
  EXPECT_EQ(planned(grouped(8, 80)).rope_dim, 80);
  // Two KV heads of 16 have no 64 values.
  EXPECT_EQ(planned(grouped(2, 16)).rope_dim, 16);
}

TEST(MlaShape, RefusesWhatDoesNotFit) {
  const ModelConfig llama = grouped(8, 64);
  const struct {
    MlaRequest request;
    const char* part;
  } cases[] = {
      {{961, std::nullopt, std::nullopt}, "--rank is 961: from 1 to 960"},
      {{0, std::nullopt, std::nullopt}, "--rank is 0"},
      {{std::nullopt, 48, std::nullopt}, "--rope-dim is 48"},
      {{std::nullopt, 576, std::nullopt}, "up to 512"},
      {{std::nullopt, std::nullopt, 3}, "--freqfold is 3: it divides the 32 frequencies"},
      {{std::nullopt, 32, 1}, "a multiple of 2"},
  };
  for (const auto& [request, part] : cases) {
    const auto shape = plan_mla_shape(llama, request);
    ASSERT_FALSE(shape.has_value()) << part;
    EXPECT_EQ(shape.error().code, Code::kInvalidArgument);
    EXPECT_THAT(shape.error().message, HasSubstr(part));
  }
}

TEST(MlaShape, RefusesModelsThatAreSomethingElse) {
  ModelConfig latent;
  latent.kv_lora_rank = 512;
  EXPECT_THAT(plan_mla_shape(latent, {}).error().message, HasSubstr("kv_lora_rank is 512"));
  ModelConfig quantized = grouped(8, 64);
  quantized.quantization.kind = QuantizationConfig::Kind::kAwq;
  EXPECT_THAT(plan_mla_shape(quantized, {}).error().message, HasSubstr("quantization_config"));
  ModelConfig biased = grouped(8, 64);
  biased.has_o_bias = true;
  EXPECT_THAT(plan_mla_shape(biased, {}).error().message, HasSubstr("a bias on o_proj"));
}

}  // namespace
}  // namespace fathom::mla
