#include "checkpoint/model_config.h"

#include <gmock/gmock.h>

#include <cmath>

#include "checkpoint/generation_config.h"
#include "checkpoint/test_files.h"

namespace fathom {
namespace {

using testing::HasSubstr;

json::object published(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/data/configs/" + name + ".json";
  return parse_json(file_text(path), path)->as_object();
}

Result<ModelConfig> parse(const json::object& object) {
  return parse_model_config(json::serialize(object), "config.json");
}

// Expects an error that begins with the file's name and contains `part`.
void expect_refused(const json::object& object, std::string_view part) {
  const auto parsed = parse(object);
  ASSERT_FALSE(parsed) << part;
  EXPECT_TRUE(parsed.error().message.starts_with("config.json: ")) << parsed.error().message;
  EXPECT_THAT(parsed.error().message, HasSubstr(std::string(part)));
}

TEST(ModelConfig, ReadsThePublishedOnes) {
  const auto lite = parse(published("deepseek_v2_lite"));
  ASSERT_TRUE(lite) << lite.error().message;
  EXPECT_EQ(lite->q_lora_rank, 0);
  EXPECT_EQ(lite->gate, GateKind::kSoftmaxGreedy);
  EXPECT_FALSE(lite->normalize_weights);
  EXPECT_EQ(lite->quantization.kind, QuantizationConfig::Kind::kNone);
  EXPECT_EQ(lite->num_mtp_layers, 0);
  EXPECT_EQ(lite->eos_ids, std::vector<int32_t>{100001});
  EXPECT_FALSE(lite->is_moe_layer(0));
  EXPECT_TRUE(lite->is_moe_layer(1));

  const auto v2 = parse(published("deepseek_v2"));
  ASSERT_TRUE(v2) << v2.error().message;
  EXPECT_EQ(v2->gate, GateKind::kSoftmaxGroupLimited);
  EXPECT_EQ(v2->num_groups, 8);
  EXPECT_EQ(v2->groups_per_token, 3);
  EXPECT_EQ(v2->routed_scaling, 16);

  const auto v3 = parse(published("deepseek_v3"));
  ASSERT_TRUE(v3) << v3.error().message;
  EXPECT_EQ(v3->gate, GateKind::kSigmoidBias);
  EXPECT_TRUE(v3->normalize_weights);
  EXPECT_EQ(v3->num_mtp_layers, 1);
  EXPECT_EQ(v3->quantization.kind, QuantizationConfig::Kind::kFp8Block);
  EXPECT_EQ(v3->quantization.block_rows, 128);
  EXPECT_FALSE(v3->quantization.scales_are_powers_of_two);
  EXPECT_EQ(v3->qk_dim(), 192);
  EXPECT_EQ(v3->latent_dim(), 576);
  EXPECT_TRUE(parse(published("deepseek_v3_1"))->quantization.scales_are_powers_of_two);

  const auto kimi = parse(published("kimi_k2"));
  ASSERT_TRUE(kimi) << kimi.error().message;
  EXPECT_EQ(kimi->num_heads, 64);
  EXPECT_EQ(kimi->yarn->beta_fast, 1);
  EXPECT_EQ(kimi->rope_theta, 50000);
}

// Softmax scales of the published models.
TEST(ModelConfig, SoftmaxScale) {
  EXPECT_NEAR(parse(published("deepseek_v3"))->softmax_scale(), 0.1352338, 5e-8);
  EXPECT_NEAR(parse(published("deepseek_v2_lite"))->softmax_scale(), 0.1147214, 5e-8);
  EXPECT_NEAR(parse(published("kimi_k2"))->softmax_scale(), 0.1308608, 5e-8);
  auto plain = published("deepseek_v3");
  plain["rope_scaling"] = nullptr;
  EXPECT_NEAR(parse(plain)->softmax_scale(), 0.07216878, 5e-9);
  // Without mscale_all_dim there is no factor, whatever mscale is.
  auto partial = published("deepseek_v3");
  partial["rope_scaling"].as_object().erase("mscale_all_dim");
  EXPECT_NEAR(parse(partial)->softmax_scale(), 0.07216878, 5e-9);
}

TEST(ModelConfig, ReadsTransformersFiveSpelling) {
  auto object = published("deepseek_v3");
  json::object rope = object["rope_scaling"].as_object();
  rope.erase("type");
  rope["rope_type"] = "yarn";
  rope["rope_theta"] = 12345.0;
  object.erase("rope_scaling");
  object.erase("rope_theta");
  object.erase("topk_method");
  object.erase("scoring_func");
  object.erase("torch_dtype");
  object["dtype"] = "float32";
  object["rope_parameters"] = rope;
  const auto parsed = parse(object);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->rope_theta, 12345);
  ASSERT_TRUE(parsed->yarn);
  EXPECT_EQ(parsed->yarn->factor, 40);
  EXPECT_EQ(parsed->gate, GateKind::kSigmoidBias);
  EXPECT_EQ(parsed->stored_dtype, DType::kF32);
  object["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  EXPECT_FALSE(parse(object)->yarn);
  EXPECT_EQ(parse(object)->rope_theta, 5e5);
}

// A numeric field, and which of the five bad values are valid for it.
struct Field {
  const char* name;
  bool zero_allowed = false;
  bool missing_allowed = false;
};
constexpr Field kFields[] = {
    {"vocab_size"},
    {"hidden_size"},
    {"num_hidden_layers"},
    {"num_attention_heads"},
    {"num_key_value_heads", false, true},
    {"q_lora_rank", false, true},  // missing in V2-Lite
    {"kv_lora_rank"},
    {"qk_nope_head_dim"},
    {"qk_rope_head_dim", true},
    {"v_head_dim"},
    {"intermediate_size"},
    {"moe_intermediate_size"},
    {"n_routed_experts"},
    {"n_shared_experts", true, true},
    {"num_experts_per_tok"},
    {"first_k_dense_replace", true},
    {"moe_layer_freq", false, true},
    {"n_group"},
    {"topk_group"},
    {"routed_scaling_factor"},
    {"rms_norm_eps"},
    {"rope_theta"},
    {"max_position_embeddings"},
    {"num_nextn_predict_layers", true, true},
    {"bos_token_id", true, true},
    {"eos_token_id", true, true},
};

// Sets `key` of the member `inside`, or of the object itself, to `value`; nothing erases it.
void expect_number(const json::object& object, const std::string& inside, const Field& field,
                   const std::optional<json::value>& value, bool allowed) {
  json::object changed = object;
  json::object& target = inside.empty() ? changed : changed.at(inside).as_object();
  target.erase(field.name);
  if (value) target[field.name] = *value;
  const auto parsed = parse(changed);
  const std::string shown = value ? json::serialize(*value) : "missing";
  if (allowed) {
    EXPECT_TRUE(parsed) << field.name << " " << shown << ": " << parsed.error().message;
    return;
  }
  ASSERT_FALSE(parsed) << field.name << " " << shown;
  EXPECT_THAT(parsed.error().message, HasSubstr(field.name)) << shown;
}

TEST(ModelConfig, EveryNumberIsChecked) {
  const json::object v3 = published("deepseek_v3");
  for (const Field& field : kFields) {
    expect_number(v3, "", field, -1, false);
    expect_number(v3, "", field, -1e12, false);
    expect_number(v3, "", field, 0, field.zero_allowed);
    expect_number(v3, "", field, int64_t{1'000'000'000'000}, false);
    expect_number(v3, "", field, 1e300, false);
    expect_number(v3, "", field, "7", false);
    expect_number(v3, "", field, json::array{}, std::string_view(field.name) == "eos_token_id");
    expect_number(v3, "", field, std::nullopt, field.missing_allowed);
  }
  constexpr Field kYarn[] = {{"factor"},
                             {"beta_fast", false, true},
                             {"beta_slow", false, true},
                             {"original_max_position_embeddings"},
                             {"mscale", true, true},
                             {"mscale_all_dim", true, true}};
  for (const Field& field : kYarn) {
    expect_number(v3, "rope_scaling", field, -1, false);
    expect_number(v3, "rope_scaling", field, 0, field.zero_allowed);
    expect_number(v3, "rope_scaling", field, int64_t{1'000'000'000'000}, false);
    expect_number(v3, "rope_scaling", field, "7", false);
    expect_number(v3, "rope_scaling", field, std::nullopt, field.missing_allowed);
  }
}

TEST(ModelConfig, NumbersMustFitEachOther) {
  const struct {
    const char* key;
    json::value value;
    const char* part;
  } cases[] = {
      {"num_key_value_heads", 64, "num_key_value_heads is 64"},
      {"qk_rope_head_dim", 63, "must be even"},
      {"mlp_bias", true, "mlp_bias"},
      {"qk_rope_heads", 3, "qk_rope_heads is 3"},
      {"n_group", 7, "must divide"},
      {"n_group", 256, "the gate sums the best two"},
      {"topk_group", 9, "topk_group is 9"},
      {"num_experts_per_tok", 129, "the 4 groups of topk_group have 128"},
      {"first_k_dense_replace", 62, "first_k_dense_replace is 62"},
      {"eos_token_id", 129280, "eos_token_id is 129280"},
      {"eos_token_id", json::array{1, 129280}, "eos_token_id holds 129280"},
      {"hidden_act", "gelu", "hidden_act"},
      {"attention_bias", 1, "attention_bias"},
      {"tie_word_embeddings", 1, "tie_word_embeddings"},
      {"rope_interleave", false, "rope_interleave"},
      {"topk_method", "random", "topk_method"},
      {"scoring_func", "softmax", "scoring_func"},
      {"norm_topk_prob", 1, "norm_topk_prob"},
      {"torch_dtype", "int8", "torch_dtype"},
      {"rope_scaling", json::object{{"type", "linear"}, {"factor", 2}}, "\"linear\""},
      {"rope_scaling", json::object{{"rope_type", "llama3"}}, "rope_scaling.factor is missing"},
      {"rope_scaling", 4, "rope_scaling is 4"},
      {"n_routed_experts", 16384, "n_routed_experts"},
  };
  for (const auto& bad : cases) {
    auto object = published("deepseek_v3");
    object[bad.key] = bad.value;
    expect_refused(object, bad.part);
  }
}

TEST(ModelConfig, ReadsTheIndexer) {
  EXPECT_FALSE(parse(published("deepseek_v3"))->indexer);
  const auto v32 = parse(published("deepseek_v3_2"));
  ASSERT_TRUE(v32) << v32.error().message;
  ASSERT_TRUE(v32->indexer);
  EXPECT_EQ(v32->indexer->num_heads, 64);
  EXPECT_EQ(v32->indexer->head_dim, 128);
  EXPECT_EQ(v32->indexer->topk, 2048);
  EXPECT_EQ(v32->gate, GateKind::kSigmoidBias);
  // The architecture says so, too.
  auto renamed = published("deepseek_v3_2");
  renamed["model_type"] = "deepseek_v3";
  EXPECT_TRUE(parse(renamed)->indexer);
}

TEST(ModelConfig, RefusesIndexersThatDoNotExist) {
  struct {
    const char* key;
    json::value value;
    const char* part;
  } cases[] = {
      {"index_topk", 0, "index_topk is 0"},
      {"index_topk", -1, "index_topk is -1"},
      {"index_topk", 163'841, "index_topk is 163841"},  // above the positions
      {"index_topk", nullptr, "index_topk is missing"},
      {"index_n_heads", 0, "index_n_heads is 0"},
      {"index_n_heads", 257, "index_n_heads is 257"},
      {"index_n_heads", nullptr, "index_n_heads is missing"},
      {"index_head_dim", 63, "index_head_dim is 63"},  // below the rotated part
      {"index_head_dim", 96, "index_head_dim is 96, must be a power of two"},
      {"index_head_dim", 1024, "index_head_dim is 1024"},
      {"index_head_dim", "128", "index_head_dim"},
      {"q_lora_rank", nullptr, "q_lora_rank is missing"},
      {"indexer_rope_interleave", 1, "indexer_rope_interleave is 1"},
      {"index_topk_freq", 0, "index_topk_freq is 0"},
      {"index_skip_topk_offset", 0, "index_skip_topk_offset is 0"},
      {"indexer_types", "FS", "indexer_types has 2 entries, expected 61"},
      {"indexer_types", 3, "indexer_types is 3"},
      {"indexer_types", json::string(60, 'F') += "X", "indexer_types[60] is \"X\""},
      {"index_topk_pattern", json::string("S") += json::string(60, 'F'),
       "index_topk_pattern[0] is \"shared\""},
  };
  for (const auto& bad : cases) {
    auto object = published("deepseek_v3_2");
    object[bad.key] = bad.value;
    expect_refused(object, bad.part);
  }
  // An architecture without the fields: dense attention would be another model.
  auto disguised = published("deepseek_v3");
  disguised["architectures"] = json::array{"DeepseekV32ForCausalLM"};
  expect_refused(disguised, "index_n_heads is missing");
  // Fields without the architecture are an indexer, too.
  disguised = published("deepseek_v3_2");
  disguised["model_type"] = "deepseek_v3";
  disguised["architectures"] = json::array{"DeepseekV3ForCausalLM"};
  EXPECT_TRUE(parse(disguised)->indexer);
}

TEST(ModelConfig, ReadsWhichLayersShareTheirKeys) {
  const auto glm = parse(published("glm_5_2"));
  ASSERT_TRUE(glm) << glm.error().message;
  ASSERT_TRUE(glm->indexer);
  EXPECT_TRUE(glm->indexer->interleaved);
  EXPECT_EQ(glm->num_indexers(), 21);
  EXPECT_TRUE(glm->indexer->shares_drafts);
  for (int64_t layer = 0; layer < 79; ++layer) {
    const bool own = layer < 3 || layer == 78 || (layer - 2) % 4 == 0;
    EXPECT_EQ(glm->has_indexer(layer), own) << layer;
  }
  // The list, a string of letters and two numbers say the same.
  auto other = published("glm_5_2");
  other.erase("indexer_types");
  EXPECT_EQ(parse(other)->indexer->shared, glm->indexer->shared);
  other["index_topk_freq"] = 1;
  EXPECT_TRUE(parse(other)->indexer->shared.empty());
  std::string letters;
  for (const bool shared : glm->indexer->shared) letters += shared ? 'S' : 'F';
  other["index_topk_pattern"] = letters;
  EXPECT_EQ(parse(other)->indexer->shared, glm->indexer->shared);
  other["index_topk_pattern"] = letters + "F";  // the MTP layer's, too
  EXPECT_EQ(parse(other)->indexer->shared, glm->indexer->shared);
  // Not said: interleaved in GLM-5, not in DeepSeek-V3.2.
  other.erase("indexer_rope_interleave");
  EXPECT_TRUE(parse(other)->indexer->interleaved);
  EXPECT_FALSE(parse(published("deepseek_v3_2"))->indexer->interleaved);
  EXPECT_FALSE(parse(published("deepseek_v3_2"))->indexer->shares_drafts);
  EXPECT_EQ(parse(published("deepseek_v3_2"))->num_indexers(), 61);
}

// A model is what its fields say.
TEST(ModelConfig, ReadsRelativesByTheirFields) {
  const auto moonlight = parse(published("moonlight"));
  ASSERT_TRUE(moonlight) << moonlight.error().message;
  EXPECT_EQ(moonlight->q_lora_rank, 0);
  EXPECT_EQ(moonlight->num_groups, 1);
  EXPECT_EQ(moonlight->gate, GateKind::kSigmoidBias);

  const auto flash = parse(published("glm_4_7_flash"));
  ASSERT_TRUE(flash) << flash.error().message;
  EXPECT_EQ(flash->num_heads, 20);
  EXPECT_EQ(flash->qk_nope_dim, 192);
  EXPECT_EQ(flash->v_dim, 256);
  EXPECT_EQ(flash->num_mtp_layers, 1);
  EXPECT_FALSE(flash->indexer);

  const auto youtu = parse(published("youtu_llm_2b"));
  ASSERT_TRUE(youtu) << youtu.error().message;
  EXPECT_TRUE(youtu->tied_embeddings);
  EXPECT_EQ(youtu->num_experts, 0);
  EXPECT_FALSE(youtu->is_moe_layer(31));

  auto renamed = published("moonlight");
  renamed["model_type"] = "something_new";
  const auto unknown = parse(renamed);
  ASSERT_TRUE(unknown) << unknown.error().message;
  EXPECT_FALSE(unknown->is_known_type);
  EXPECT_TRUE(moonlight->is_known_type);
}

// Kimi K2.5: the language model's fields are in an object of their own.
TEST(ModelConfig, ReadsALanguageModelInALargerOne) {
  auto object = published("kimi_k2_5");
  const auto kimi = parse(object);
  ASSERT_TRUE(kimi) << kimi.error().message;
  EXPECT_EQ(kimi->model_type, "kimi_k25");
  EXPECT_EQ(kimi->num_experts, 384);
  EXPECT_EQ(kimi->rms_norm_eps, 1e-5);
  EXPECT_EQ(kimi->eos_ids, std::vector<int32_t>{163586});
  object["text_config"].as_object()["num_attention_heads"] = 0;
  expect_refused(object, "text_config.num_attention_heads is 0");
  // What is not said inside is read outside.
  json::object& inner = object["text_config"].as_object();
  inner["num_attention_heads"] = 64;
  inner.erase("torch_dtype");
  inner.erase("eos_token_id");
  object["dtype"] = "float32";
  object["quantization_config"] = {{"quant_method", "unheard"}};
  expect_refused(object, "config.json: quantization_config.quant_method");
  object.erase("quantization_config");
  EXPECT_EQ(parse(object)->stored_dtype, DType::kF32);
  EXPECT_EQ(parse(object)->eos_ids, std::vector<int32_t>{163586});
  object["text_config"] = 5;
  expect_refused(object, "text_config is 5, expected an object");
}

TEST(ModelConfig, ReadsDenseLayersFromAList) {
  auto object = published("glm_4_7_flash");
  json::array types{"dense"};
  for (int layer = 1; layer < 47; ++layer) types.emplace_back("sparse");
  object["mlp_layer_types"] = types;
  EXPECT_EQ(parse(object)->first_dense_layers, 1);
  object.erase("first_k_dense_replace");
  EXPECT_EQ(parse(object)->first_dense_layers, 1);
  object["first_k_dense_replace"] = 2;
  expect_refused(object, "first_k_dense_replace is 2, mlp_layer_types begins with 1 dense");
  object["first_k_dense_replace"] = 1;
  types[20] = "dense";
  object["mlp_layer_types"] = types;
  expect_refused(object, "mlp_layer_types[20] is \"dense\"");
  types.pop_back();
  object["mlp_layer_types"] = types;
  expect_refused(object, "expected a list of 47 entries");
}

// No head has a rotated part; theta is not asked for then.
TEST(ModelConfig, ReadsModelsWithoutRotation) {
  auto object = published("deepseek_v3");
  object["qk_rope_head_dim"] = 0;
  object["rope_scaling"] = nullptr;
  object.erase("rope_theta");
  const auto parsed = parse(object);
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->qk_dim(), 128);
}

// Fields of other architectures that also have latent attention.
TEST(ModelConfig, RefusesPartsThatAreNotComputed) {
  const struct {
    const char* key;
    json::value value;
    const char* part;
  } cases[] = {
      {"linear_attn_config", json::object{{"head_dim", 128}}, "layers of linear attention"},
      {"hc_mult", 4, "hc_mult is 4: models with hyper-connections"},
      {"compress_ratios", json::array{0, 4}, "attention to compressed keys"},
      {"scale_depth", 1.4, "scale_depth is 1.4"},
      {"zero_expert_num", 256, "zero_expert_num is 256"},
      {"gated_norm_rank", 16, "gated_norm_rank is 16"},
      {"final_logit_softcapping", 30.0, "final_logit_softcapping is 3"},
      {"layer_types", json::array{"full_attention", "linear_attention"},
       "layer_types holds \"linear_attention\""},
      {"rope_scaling", json::object{{"type", "yarn"}, {"llama_4_scaling_beta", 0.1}},
       "rope_scaling.llama_4_scaling_beta is 1E-1"},
      {"rope_scaling", json::object{{"type", "default"}, {"partial_rotary_factor", 0.5}},
       "partial_rotary_factor is 0.5"},
  };
  for (const auto& bad : cases) {
    auto object = published("deepseek_v3");
    object[bad.key] = bad.value;
    expect_refused(object, bad.part);
  }
  auto object = published("deepseek_v3");
  object["hc_mult"] = nullptr;
  object["linear_attn_config"] = false;
  EXPECT_TRUE(parse(object));
}

TEST(ModelConfig, NamesWhatIsNotSupported) {
  auto llama = published("deepseek_v3");
  llama["model_type"] = "gemma2";
  llama.erase("kv_lora_rank");
  expect_refused(llama, "kv_lora_rank is missing: model_type \"gemma2\" has no multi-head latent");
  llama.erase("model_type");
  expect_refused(llama, "model_type is missing");
  for (const char* text : {"", "[]", "5", "{", "{} {}", "\xFF"}) {
    EXPECT_FALSE(parse_model_config(text, "config.json")) << text;
  }
}

TEST(QuantizationConfig, Forms) {
  using Kind = QuantizationConfig::Kind;
  const auto read = [](std::string_view text) {
    auto object = published("deepseek_v3");
    object["quantization_config"] = *parse_json(text, "test");
    return parse(object);
  };
  const auto group = [](const std::string& weights, const std::string& inputs) {
    return R"({"quant_method":"compressed-tensors","format":"float-quantized","ignore":["lm_head",)"
           R"("re:.*gate$"],"config_groups":{"group_0":{"targets":["Linear"],"weights":)" +
           weights + R"(,"input_activations":)" + inputs + "}}}";
  };
  const auto per_tensor = parse(published("coder_v2_fp8"));
  ASSERT_TRUE(per_tensor) << per_tensor.error().message;
  EXPECT_EQ(per_tensor->quantization.kind, Kind::kFp8Tensor);
  EXPECT_TRUE(per_tensor->quantization.static_activations);
  EXPECT_EQ(per_tensor->quantization.ignored, std::vector<std::string>{"lm_head"});

  const auto channel = read(group(R"({"num_bits":8,"type":"float","strategy":"channel"})",
                                  R"({"num_bits":8,"dynamic":true})"));
  ASSERT_TRUE(channel) << channel.error().message;
  EXPECT_EQ(channel->quantization.kind, Kind::kFp8Row);
  EXPECT_FALSE(channel->quantization.static_activations);
  EXPECT_EQ(channel->quantization.ignored.size(), 2u);
  const auto tensor =
      read(group(R"({"num_bits":8,"type":"float","strategy":"tensor"})", R"({"dynamic":false})"));
  EXPECT_EQ(tensor->quantization.kind, Kind::kFp8Tensor);
  EXPECT_TRUE(tensor->quantization.static_activations);
  const auto block = read(group(
      R"({"num_bits":8,"type":"float","strategy":"block","block_structure":[128,128]})", "null"));
  EXPECT_EQ(block->quantization.kind, Kind::kFp8Block);
  EXPECT_EQ(read("null")->quantization.kind, Kind::kNone);

  const struct {
    std::string text;
    const char* part;
  } refused[] = {
      {R"({"quant_method":"bitsandbytes"})", "\"bitsandbytes\""},
      {R"({"quant_method":"awq","bits":8,"group_size":128})", "bits is 8, supported is 4"},
      {R"({"quant_method":"awq","bits":4,"group_size":48})", "group_size is 48"},
      {R"({"quant_method":"awq","bits":4,"group_size":128,"version":"gemv"})", "\"gemv\""},
      {R"({"quant_method":"gptq"})", "bits is missing"},
      {R"({"quant_method":"gptq","bits":4,"group_size":128,"checkpoint_format":"marlin"})",
       "\"marlin\""},
      {R"({"quant_method":"gptq","bits":4,"group_size":128,"dynamic":{"-:x":{}}})", "dynamic"},
      {R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"g":
          {"weights":{"type":"int","num_bits":8,"strategy":"channel"}}}})",
       "num_bits 8"},
      {R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"g":
          {"weights":{"type":"int","num_bits":4,"strategy":"tensor"}}}})",
       "\"tensor\""},
      {R"({"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized","config_groups":
          {"g":{"weights":{"type":"float","num_bits":4,"group_size":32}}}})",
       "4 and 16"},
      {R"({"quant_method":"bitsandbytes"})", "\"bitsandbytes\""},
      {R"({"quant_method":"mxfp4"})", "\"mxfp4\""},
      {R"({})", "quant_method is missing"},
      {R"({"quant_method":5})", "quant_method is 5"},
      {R"([])", "quantization_config is an array"},
      {R"({"quant_method":"fp8","fmt":"e5m2"})", "\"e5m2\""},
      {R"({"quant_method":"fp8","scale_fmt":"e3m4"})", "\"e3m4\""},
      {R"({"quant_method":"fp8","activation_scheme":"guess"})", "\"guess\""},
      {R"({"quant_method":"fp8","weight_block_size":[64,64]})", "weight_block_size is [64,64]"},
      {R"({"quant_method":"fp8","weight_block_size":[128]})", "weight_block_size"},
      {R"({"quant_method":"fp8","weight_block_size":[-128,128]})", "weight_block_size"},
      {R"({"quant_method":"fp8","weight_block_size":128})", "weight_block_size"},
      {R"({"quant_method":"fp8","ignored_layers":"lm_head"})", "ignored_layers"},
      {R"({"quant_method":"fp8","ignored_layers":[5]})", "ignored_layers"},
      {R"({"quant_method":"compressed-tensors","format":"int-quantized"})", "\"int-quantized\""},
      {R"({"quant_method":"compressed-tensors","format":"float-quantized"})", "config_groups"},
      {group(R"({"num_bits":4,"type":"int","strategy":"group"})", "null"), "num_bits 4"},
      {group(R"({"num_bits":8,"type":"float","strategy":"group"})", "null"), "\"group\""},
      {group(R"({"num_bits":8,"type":"float"})", "null"), "strategy is missing"},
      {group("5", "null"), "weights is missing"},
      {group(R"({"num_bits":8,"type":"float","strategy":"block","block_structure":[1,128]})",
             "null"),
       "block_structure is [1,128]"},
  };
  for (const auto& bad : refused) {
    const auto parsed = read(bad.text);
    ASSERT_FALSE(parsed) << bad.text;
    EXPECT_THAT(parsed.error().message, HasSubstr(bad.part));
    EXPECT_THAT(parsed.error().message, HasSubstr("config.json: quantization_config")) << bad.text;
  }
}

TEST(GenerationConfig, ReadsAndChecks) {
  const auto read = [](std::string_view text) {
    return parse_generation_config(text, "generation_config.json", 1000);
  };
  const auto good = read(R"({"temperature":0.6,"top_p":0.95,"top_k":50,"eos_token_id":[1,7]})");
  ASSERT_TRUE(good) << good.error().message;
  EXPECT_EQ(good->temperature, 0.6);
  EXPECT_EQ(good->top_k, 50);
  EXPECT_EQ(good->eos_ids, (std::vector<int32_t>{1, 7}));
  EXPECT_TRUE(read("{}")->eos_ids.empty());
  // A request's bounds: what a request may not ask for is no default either.
  EXPECT_EQ(read(R"({"temperature":2})")->temperature, 2);
  EXPECT_EQ(read(R"({"temperature":0})")->temperature, 0);
  EXPECT_EQ(read(R"({"top_p":1})")->top_p, 1);
  for (const char* bad :
       {"[]", R"({"temperature":-1})", R"({"temperature":2.5})", R"({"top_p":0})", R"({"top_p":2})",
        R"({"top_p":"a"})", R"({"eos_token_id":1000})", R"({"eos_token_id":[-1]})",
        R"({"eos_token_id":"x"})", R"({"top_k":1000000000000})"}) {
    ASSERT_FALSE(read(bad)) << bad;
    EXPECT_TRUE(read(bad).error().message.starts_with("generation_config.json: ")) << bad;
  }
}

}  // namespace
}  // namespace fathom
