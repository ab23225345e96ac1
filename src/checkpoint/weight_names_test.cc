#include "checkpoint/weight_names.h"

#include <gtest/gtest.h>

#include "checkpoint/inventory.h"
#include "checkpoint/test_files.h"

namespace fathom {
namespace {

// A dummy checkpoint with this published config.json.
Checkpoint published(const std::string& name) {
  const TestFolder folder;
  folder.write("config.json",
               file_text(std::string(FATHOM_SOURCE_DIR) + "/tests/data/configs/" + name + ".json"));
  auto checkpoint = Checkpoint::open_dummy(folder.path());
  if (!checkpoint) ADD_FAILURE() << checkpoint.error().message;
  return *std::move(checkpoint);
}

struct Figures {
  const char* name;
  int64_t tensors;
  int64_t parameters;   // without MTP
  double active;        // billions
  int64_t latent_bf16;  // bytes per token, all layers
  std::optional<int64_t> bytes;
};

// Known figures of published checkpoints, computed elsewhere from their configurations; V3's tensor
// count and bytes are from its index.
constexpr Figures kFigures[] = {
    {"deepseek_v2_lite", 5291, 15'706'484'224, 2.66, 31'104, 31'412'968'448},
    {"deepseek_v2", 29102, 235'741'434'880, 21.38, 69'120, 471'482'869'760},
    {"deepseek_v3", 91991, 671'026'419'200, 37.55, 70'272, 688'574'839'360},
    {"kimi_k2", 139583, 1'026'408'232'448, 32.86, 70'272, std::nullopt},
};

TEST(WeightNames, CountsOfThePublishedModels) {
  for (const Figures& known : kFigures) {
    const Checkpoint checkpoint = published(known.name);
    const Inventory inventory = take_inventory(checkpoint);
    const ModelConfig& config = checkpoint.config();
    EXPECT_EQ(inventory.total().tensors, known.tensors) << known.name;
    EXPECT_EQ(inventory.total().parameters - inventory.of(WeightGroup::kMtp).parameters,
              known.parameters)
        << known.name;
    EXPECT_NEAR(static_cast<double>(inventory.active_parameters(config)) / 1e9, known.active, 0.005)
        << known.name;
    EXPECT_EQ(config.latent_dim() * 2 * config.num_layers, known.latent_bf16) << known.name;
    if (known.bytes) {
      EXPECT_EQ(inventory.total().bytes, *known.bytes) << known.name;
    }
    EXPECT_EQ(inventory.unused.tensors, 0) << known.name;
  }
}

TEST(WeightNames, ShapesOfV3) {
  const Checkpoint v3 = published("deepseek_v3");
  const auto shape = [&](const char* name) {
    const TensorEntry* entry = v3.find(name);
    return entry == nullptr ? std::vector<int64_t>{-1} : entry->shape;
  };
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shape("model.layers.60.self_attn.q_b_proj.weight"), (Shape{24576, 1536}));
  EXPECT_EQ(shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight"), (Shape{576, 7168}));
  EXPECT_EQ(shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"), (Shape{5, 56}));
  EXPECT_EQ(shape("model.layers.2.mlp.down_proj.weight_scale_inv"), (Shape{56, 144}));
  EXPECT_EQ(shape("model.layers.3.mlp.experts.255.down_proj.weight"), (Shape{7168, 2048}));
  EXPECT_EQ(shape("model.layers.61.eh_proj.weight"), (Shape{7168, 14336}));
  EXPECT_EQ(shape("model.layers.61.mlp.gate.e_score_correction_bias"), (Shape{256}));
  EXPECT_EQ(v3.find("model.layers.3.mlp.gate.e_score_correction_bias")->dtype, DType::kF32);
  EXPECT_EQ(v3.find("model.layers.61.eh_proj.weight")->dtype, DType::kBF16);
  EXPECT_EQ(v3.find("model.layers.3.mlp.gate.weight")->dtype, DType::kBF16);
  EXPECT_EQ(v3.find("model.layers.0.self_attn.o_proj.weight")->dtype, DType::kF8E4M3);
  EXPECT_EQ(v3.find("model.layers.0.mlp.gate.weight"), nullptr);
  EXPECT_EQ(v3.find("model.layers.62.enorm.weight"), nullptr);
}

TEST(WeightNames, IndexerOfV32) {
  const Checkpoint v32 = published("deepseek_v3_2");
  const auto shape = [&](const std::string& name) {
    const TensorEntry* entry = v32.find("model.layers." + name);
    return entry == nullptr ? std::vector<int64_t>{-1} : entry->shape;
  };
  using Shape = std::vector<int64_t>;
  for (const std::string layer : {"0", "60", "61"}) {  // dense, MoE, MTP
    const std::string prefix = layer + ".self_attn.indexer.";
    EXPECT_EQ(shape(prefix + "wq_b.weight"), (Shape{8192, 1536}));
    EXPECT_EQ(shape(prefix + "wq_b.weight_scale_inv"), (Shape{64, 12}));
    EXPECT_EQ(shape(prefix + "wk.weight"), (Shape{128, 7168}));
    EXPECT_EQ(shape(prefix + "wk.weight_scale_inv"), (Shape{1, 56}));
    EXPECT_EQ(shape(prefix + "k_norm.weight"), (Shape{128}));
    EXPECT_EQ(shape(prefix + "k_norm.bias"), (Shape{128}));
    EXPECT_EQ(shape(prefix + "weights_proj.weight"), (Shape{64, 7168}));
    EXPECT_EQ(shape(prefix + "weights_proj.weight_scale_inv"), (Shape{-1}));
  }
  const auto dtype = [&](const char* name) {
    return v32.find(fmt::format("model.layers.0.self_attn.indexer.{}", name))->dtype;
  };
  EXPECT_EQ(dtype("wq_b.weight"), DType::kF8E4M3);
  EXPECT_EQ(dtype("wk.weight"), DType::kF8E4M3);
  EXPECT_EQ(dtype("k_norm.bias"), DType::kF32);
  EXPECT_EQ(dtype("weights_proj.weight"), DType::kBF16);
  const WeightNames names(v32.config());
  EXPECT_EQ(names.classify("model.layers.3.self_attn.indexer.wk.weight"), WeightGroup::kAttention);
  EXPECT_EQ(names.classify("model.layers.61.self_attn.indexer.k_norm.bias"), WeightGroup::kMtp);
  EXPECT_FALSE(names.classify("model.layers.3.self_attn.indexer.wq_a.weight"));
  EXPECT_FALSE(WeightNames(published("deepseek_v3").config())
                   .classify("model.layers.3.self_attn.indexer.wk.weight"));
  EXPECT_EQ(take_inventory(v32).unused.tensors, 0);
}

// GLM-5.2: 21 of 78 layers have an indexer, and the MTP layer.
TEST(WeightNames, SharedIndexers) {
  const Checkpoint glm = published("glm_5_2");
  int64_t indexers = 0;
  for (const auto& [name, entry] : glm.tensors()) {
    indexers += name.ends_with("indexer.wq_b.weight") ? 1 : 0;
  }
  EXPECT_EQ(indexers, 22);
  const WeightNames names(glm.config());
  EXPECT_TRUE(names.classify("model.layers.6.self_attn.indexer.wk.weight"));
  EXPECT_FALSE(names.classify("model.layers.7.self_attn.indexer.wk.weight"));
  EXPECT_EQ(names.classify("model.layers.78.self_attn.indexer.wk.weight"), WeightGroup::kMtp);
}

TEST(WeightNames, TiedEmbeddings) {
  const Checkpoint youtu = published("youtu_llm_2b");
  EXPECT_EQ(youtu.find("lm_head.weight"), nullptr);
  EXPECT_FALSE(WeightNames(youtu.config()).classify("lm_head.weight"));
  EXPECT_EQ(take_inventory(youtu).of(WeightGroup::kHead).bytes, 0);
  // In memory the head is a second copy of the embedding.
  const Inventory loaded = take_loaded_inventory(youtu, LoadOptions());
  EXPECT_EQ(loaded.of(WeightGroup::kHead).bytes, loaded.of(WeightGroup::kEmbedding).bytes);
  EXPECT_EQ(loaded.of(WeightGroup::kEmbedding).bytes, int64_t{128256} * 2048 * 2);
}

TEST(WeightNames, PrefixesAndPictures) {
  EXPECT_EQ(without_prefix("language_model.model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(without_prefix("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(without_prefix("model.language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(without_prefix("model.norm.weight"), "model.norm.weight");
  EXPECT_TRUE(is_ignored_tensor("vision_tower.encoder.blocks.0.wqkv.weight"));
  EXPECT_TRUE(is_ignored_tensor("model.vision_tower.encoder.blocks.0.wqkv.weight"));
  EXPECT_TRUE(is_ignored_tensor("mm_projector.proj.0.weight"));
  EXPECT_FALSE(is_ignored_tensor("model.layers.0.vision_tower.weight"));
}

TEST(WeightNames, Classify) {
  const Checkpoint v3 = published("deepseek_v3");
  const WeightNames names(v3.config());
  // for_each() and classify() agree.
  for (const auto& [name, entry] : v3.tensors()) ASSERT_TRUE(names.classify(name)) << name;
  EXPECT_EQ(names.classify("model.layers.61.mlp.experts.3.up_proj.weight"), WeightGroup::kMtp);
  EXPECT_EQ(names.classify("model.layers.5.mlp.experts.3.up_proj.weight"), WeightGroup::kExperts);
  EXPECT_EQ(names.classify("model.layers.5.mlp.experts.3.up_proj.input_scale"),
            WeightGroup::kScales);
  for (const char* unknown :
       {"", "model.layers.", "model.layers.5", "model.layers.5.", "model.layers.-1.enorm.weight",
        "model.layers.05.input_layernorm.weight", "model.layers.99.input_layernorm.weight",
        "model.layers.99999999999999999999.input_layernorm.weight", "model.layers.5.enorm.weight",
        "model.layers.0.mlp.gate.weight", "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.mlp.experts.256.up_proj.weight",
        "model.layers.3.mlp.experts.up_proj.weight", "model.layers.3.self_attn.q_proj.weight",
        "model.norm.weight_scale_inv.weight_scale", ".weight_scale", "lm_head.bias"}) {
    EXPECT_FALSE(names.classify(unknown)) << unknown;
  }
  for (const char* linear :
       {"model.layers.61.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.5.self_attn.kv_b_proj.weight", "model.layers.61.self_attn.o_proj.weight"}) {
    EXPECT_TRUE(names.is_linear(linear)) << linear;
  }
  for (const char* other :
       {"lm_head.weight", "model.embed_tokens.weight", "model.layers.5.mlp.gate.weight",
        "model.layers.61.eh_proj.weight", "model.layers.5.input_layernorm.weight",
        "model.layers.5.mlp.gate.e_score_correction_bias", "nothing.weight"}) {
    EXPECT_FALSE(names.is_linear(other)) << other;
  }
  EXPECT_TRUE(is_ignored_tensor("model.layers.0.self_attn.rotary_emb.inv_freq"));
}

TEST(WeightNames, PerTensorScalesAndIgnoredLayers) {
  const Checkpoint coder = published("coder_v2_fp8");
  const TensorEntry* scale = coder.find("model.layers.0.self_attn.o_proj.weight_scale");
  ASSERT_NE(scale, nullptr);
  EXPECT_EQ(scale->shape, std::vector<int64_t>{1});
  EXPECT_NE(coder.find("model.layers.0.self_attn.o_proj.input_scale"), nullptr);
  EXPECT_EQ(coder.find("lm_head.weight_scale"), nullptr);
  EXPECT_EQ(coder.find("model.layers.0.self_attn.o_proj.weight_scale_inv"), nullptr);
}

}  // namespace
}  // namespace fathom
