#include "model/gpu_support.h"

#include <gmock/gmock.h>

#include <fstream>
#include <functional>
#include <sstream>

#include "model/layer_options.h"
#include "ops/moe/moe_support.h"

namespace fathom {
namespace {

using testing::HasSubstr;

ModelConfig published(const std::string& name) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/data/configs/" + name;
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const auto parsed = parse_model_config(text.str(), path);
  EXPECT_TRUE(parsed) << parsed.error().message;
  return parsed.value_or(ModelConfig());
}

// V2's sizes are also Coder-V2's and V2.5's; V3's are also R1's.
TEST(GpuSupport, TakesEveryPublishedModel) {
  for (const char* name :
       {"deepseek_v2.json", "deepseek_v2_lite.json", "coder_v2_fp8.json", "deepseek_v3.json",
        "deepseek_v3_1.json", "deepseek_v3_2.json", "kimi_k2.json", "kimi_k2_5.json",
        "moonlight.json", "youtu_llm_2b.json", "v3_eighth_layers/config.json",
        "v3_two_layers/config.json", "glm5_small/config.json"}) {
    const ModelConfig config = published(name);
    for (const CacheFormat format :
         {CacheFormat::kBF16, CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
      if (config.indexer && format != CacheFormat::kBF16) continue;
      const auto supported = gpu_supports(make_spec(config), format);
      EXPECT_TRUE(supported) << name << ": " << supported.error().message;
    }
  }
  EXPECT_EQ(published("kimi_k2.json").num_experts, 384);
}

// What docs/models.md says of the others.
TEST(GpuSupport, HeadsOfGlmAreAbsorbedWithAnIndexerAlone) {
  const auto refusal = [](const ModelConfig& config) {
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    return supported ? std::string() : supported.error().message;
  };
  EXPECT_THAT(refusal(published("glm_4_7_flash.json")), HasSubstr("qk_nope_head_dim is 192"));
  ModelConfig glm = published("glm_5_2.json");
  EXPECT_THAT(refusal(glm), HasSubstr("max_position_embeddings is 1048576"));
  glm.max_position = 202752;  // as GLM-5 and 5.1 have it
  EXPECT_THAT(refusal(glm), HasSubstr("indexer_types"));
  glm.indexer->shared.clear();
  EXPECT_EQ(refusal(glm), "");
  EXPECT_FALSE(gpu_takes_multi_head(glm));
  EXPECT_TRUE(gpu_takes_multi_head(published("deepseek_v3_2.json")));
}

TEST(GpuSupport, NamesWhatSparseAttentionLacks) {
  const auto refusal = [](const std::function<void(ModelSpec&)>& push) {
    ModelSpec spec = make_spec(published("deepseek_v3_2.json"));
    push(spec);
    const auto supported = gpu_supports(spec, CacheFormat::kBF16);
    return supported ? std::string() : supported.error().message;
  };
  EXPECT_EQ(refusal([](ModelSpec&) {}), "");
  EXPECT_THAT(refusal([](ModelSpec& s) { s.config.indexer->head_dim = 64; }),
              HasSubstr("config.json: index_head_dim is 64; kernels for GPUs take 128 only"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.config.indexer->num_heads = 48; }),
              HasSubstr("config.json: index_n_heads is 48; kernels for GPUs take 16, 32 or 64"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.config.max_position = 400'000; }),
              HasSubstr("config.json: max_position_embeddings is 400000"));
  EXPECT_THAT(refusal([](ModelSpec& s) { s.config.indexer->shared.assign(61, true); }),
              HasSubstr("config.json: indexer_types"));
  for (const CacheFormat format :
       {CacheFormat::kFp8Scaled, CacheFormat::kE4M3, CacheFormat::kE5M2}) {
    EXPECT_TRUE(gpu_supports(make_spec(published("deepseek_v3_2.json")), format));
  }
}

// tests/goldens/README.md: transformers' checkpoints with an indexer are smaller than any kernel
// takes, so what a GPU computes is compared with the CPU's float32, which is compared with them.
TEST(GpuSupport, NoGoldenWithAnIndexerHasWidthsOfAKernel) {
  for (const char* name : {"v32", "v32_one", "v32_yarn", "v32_fp8", "glm_dsa", "glm_dsa_shared"}) {
    const ModelConfig config = published(std::string("../../goldens/") + name + "/config.json");
    ASSERT_TRUE(config.indexer) << name;
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    ASSERT_FALSE(supported) << name;
    EXPECT_THAT(supported.error().message, HasSubstr("config.json: kv_lora_rank is ")) << name;
  }
}

// A page begins where one of whole layers begins, and holds a CPU's page and something more.
TEST(GpuSupport, PagesHoldIndexKeys) {
  const ModelConfig v3 = published("deepseek_v3.json"), v32 = published("deepseek_v3_2.json");
  struct Case {
    CacheFormat format;
    int64_t parts, with_mtp;  // that index keys take
  };
  for (const auto& [format, parts, parts_with_mtp] :
       {Case{CacheFormat::kBF16, 7, 8}, Case{CacheFormat::kFp8Scaled, 13, 13},
        Case{CacheFormat::kE4M3, 14, 15}}) {
    const int64_t part = latent_layout(v32, format).page_bytes();
    EXPECT_EQ(gpu_page_stride(v3, format, false), 61);
    EXPECT_EQ(gpu_page_rest(v3, format, false), 0);
    EXPECT_EQ(gpu_page_stride(v32, format, false), 61 + parts);
    EXPECT_EQ(gpu_page_rest(v32, format, false), parts * part - int64_t{61} * 64 * 132);
    // Four states of 7,168 bf16 values are 57,344 bytes.
    const int64_t states = (57344 + part - 1) / part;
    EXPECT_EQ(gpu_page_stride(v3, format, true), 62 + states);
    EXPECT_EQ(gpu_page_rest(v3, format, true), states * part);
    EXPECT_EQ(gpu_page_stride(v32, format, true), 62 + states + parts_with_mtp);
    EXPECT_EQ(gpu_page_rest(v32, format, true),
              (states + parts_with_mtp) * part - int64_t{62} * 64 * 132);
  }
}

TEST(GpuSupport, NamesTheFieldThatNoKernelTakes) {
  struct Case {
    std::string field;  // start of the message after "config.json: "
    std::function<void(ModelConfig&)> push;
  };
  const std::vector<Case> cases = {
      {"kv_lora_rank is 256", [](ModelConfig& c) { c.kv_lora_rank = 256; }},
      {"kv_lora_rank is 1024", [](ModelConfig& c) { c.kv_lora_rank = 1024; }},
      {"qk_rope_head_dim is 32", [](ModelConfig& c) { c.qk_rope_dim = 32; }},
      {"qk_nope_head_dim is 64", [](ModelConfig& c) { c.qk_nope_dim = 64; }},
      {"qk_nope_head_dim is 256", [](ModelConfig& c) { c.qk_nope_dim = 256; }},
      {"v_head_dim is 192", [](ModelConfig& c) { c.v_dim = 192; }},
      {"hidden_size is 7008", [](ModelConfig& c) { c.hidden = 7008; }},
      {"hidden_size is 7170", [](ModelConfig& c) { c.hidden = 7170; }},
      {"hidden_size is 16448", [](ModelConfig& c) { c.hidden = 16448; }},
      {"q_lora_rank is 1528", [](ModelConfig& c) { c.q_lora_rank = 1528; }},
      {"q_lora_rank is 16448", [](ModelConfig& c) { c.q_lora_rank = 16448; }},
      {"num_attention_heads * v_head_dim is 32896", [](ModelConfig& c) { c.num_heads = 257; }},
      {"n_routed_experts is 513", [](ModelConfig& c) { c.num_experts = 513; }},
      {"n_routed_experts is 1024", [](ModelConfig& c) { c.num_experts = 1024; }},
      {"num_experts_per_tok is 33", [](ModelConfig& c) { c.experts_per_token = 33; }},
      {"n_group is 64", [](ModelConfig& c) { c.num_groups = 64; }},
      {"vocab_size is 400001", [](ModelConfig& c) { c.vocab_size = 400001; }},
  };
  for (const Case& one : cases) {
    ModelConfig config = published("deepseek_v3.json");
    one.push(config);
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    ASSERT_FALSE(supported) << one.field;
    EXPECT_EQ(supported.error().code, Code::kInvalidArgument);
    EXPECT_THAT(supported.error().message, testing::StartsWith("config.json: " + one.field));
    EXPECT_THAT(supported.error().message, HasSubstr("kernels for GPUs take"));
  }
}

TEST(GpuSupport, NamesTheFourBitFormsThatOnlyTheCpuTakes) {
  using Kind = QuantizationConfig::Kind;
  const auto check = [](Kind kind, bool symmetric) {
    ModelConfig config = published("deepseek_v3.json");
    config.quantization = {};
    config.quantization.kind = kind;
    config.quantization.group_cols = 32;
    config.quantization.symmetric = symmetric;
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    return supported ? std::string() : supported.error().message;
  };
  EXPECT_EQ(check(Kind::kPackedInt4, true), "");
  EXPECT_EQ(check(Kind::kMxfp4, true), "");
  const std::string end = ", which runs on the CPU alone so far (--device cpu)",
                    begin = "config.json: quantization_config.";
  EXPECT_EQ(check(Kind::kPackedInt4, false),
            begin + "config_groups.weights.symmetric is false" + end);
  EXPECT_EQ(check(Kind::kAwq, false), begin + "quant_method is awq" + end);
  EXPECT_EQ(check(Kind::kGptq, true), begin + "quant_method is gptq" + end);
  EXPECT_EQ(check(Kind::kNvfp4, true), begin + "format is nvfp4-pack-quantized" + end);
}

TEST(GpuSupport, NamesTheWidthThatFourBitExpertsDoNotTake) {
  const NamedSize hidden{"hidden_size", 7168}, inter{"moe_intermediate_size", 2048};
  EXPECT_TRUE(cuda::four_bit_moe_supports(hidden, inter));
  EXPECT_EQ(cuda::four_bit_moe_supports({"hidden_size", 8192}, inter).error().message,
            "hidden_size is 8192; kernels for GPUs take up to 7168");
  EXPECT_EQ(cuda::four_bit_moe_supports(hidden, {"moe_intermediate_size", 18432}).error().message,
            "moe_intermediate_size is 18432; kernels for GPUs take up to 7168");
}

TEST(GpuSupport, TakesWhatIsPaddedOrCutOnTheHost) {
  const std::vector<std::function<void(ModelConfig&)>> pushes = {
      [](ModelConfig& c) { c.vocab_size = 129281; },
      [](ModelConfig& c) { c.intermediate = 18433; },
      [](ModelConfig& c) { c.moe_intermediate = 18; },
      [](ModelConfig& c) { c.num_shared_experts = 0; },
      [](ModelConfig& c) { c.num_heads = 3; },
      [](ModelConfig& c) { c.q_lora_rank = 0; },
      [](ModelConfig& c) { c.num_experts = 512; },
      [](ModelConfig& c) { c.num_experts = 250, c.num_groups = 5; },
      [](ModelConfig& c) { c.experts_per_token = 32; },
      [](ModelConfig& c) { c.num_experts = 0; },
      [](ModelConfig& c) { c.num_layers = 1; },
      [](ModelConfig& c) { c.first_dense_layers = 0; },
      [](ModelConfig& c) { c.stored_dtype = DType::kF16; },
  };
  for (size_t i = 0; i < pushes.size(); ++i) {
    ModelConfig config = published("deepseek_v3.json");
    pushes[i](config);
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    EXPECT_TRUE(supported) << i << ": " << supported.error().message;
  }
}

TEST(GpuSupport, RefusesACacheInFp32ByItsFlag) {
  const auto supported = gpu_supports(make_spec(published("deepseek_v3.json")), CacheFormat::kF32);
  ASSERT_FALSE(supported);
  EXPECT_THAT(supported.error().message, HasSubstr("--kv-cache-dtype"));
}

TEST(GpuSupport, PadsTheHeadToWholeEights) {
  ModelConfig config = published("deepseek_v3.json");
  EXPECT_EQ(gpu_logit_columns(make_spec(config)), config.vocab_size);
  config.vocab_size = 129281;
  EXPECT_EQ(gpu_logit_columns(make_spec(config)), 129288);
}

}  // namespace
}  // namespace fathom
