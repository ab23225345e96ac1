#include "model/weight_forms.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace fathom {
namespace {

constexpr const char* kBlocks =
    R"({"quant_method": "fp8", "weight_block_size": [128, 128],
        "ignored_layers": ["model.layers.0.mlp.up_proj"]})";
constexpr const char* kTensor = R"({"quant_method": "fp8"})";
constexpr const char* kRow =
    R"({"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float",
                                                  "strategy": "channel"}}}})";

// A model of two dense layers. Only its config exists: dummy weights have the published forms.
class WeightFormsTest : public testing::Test {
 protected:
  WeightForms forms(const std::string& quantization, StoredFp8 stored = StoredFp8::kKept) {
    folder_.write(
        "config.json",
        fmt::format(R"({{"model_type":"deepseek_v3","vocab_size":8,
        "hidden_size":256,"num_hidden_layers":2,"max_position_embeddings":8,"rms_norm_eps":1e-6,
        "num_attention_heads":2,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,
        "v_head_dim":128,"rope_theta":10000,"intermediate_size":200{}}})",
                    quantization.empty() ? "" : ", \"quantization_config\":" + quantization));
    auto opened = Checkpoint::open_dummy(folder_.path());
    EXPECT_TRUE(opened) << opened.error().message;
    checkpoint_ = std::move(*opened);
    return {checkpoint_, stored, options_};
  }

  static std::string layer(int64_t index, const std::string& rest) {
    return fmt::format("model.layers.{}.{}", index, rest);
  }
  // q_proj and kv_a_proj_with_mqa, with so many rows of q_proj.
  static std::vector<MatrixPart> q_kv_a(int64_t q_rows = 384) {
    return {{layer(0, "self_attn.q_proj.weight"), q_rows},
            {layer(0, "self_attn.kv_a_proj_with_mqa.weight"), 576}};
  }
  static MatrixPart kv_b() { return {layer(0, "self_attn.kv_b_proj.weight"), 512}; }
  static std::string mlp(int64_t index) { return layer(index, "mlp."); }

  TestFolder folder_;
  Checkpoint checkpoint_;
  LoadOptions options_;
};

TEST_F(WeightFormsTest, KeepWhatProductsOfE4M3Take) {
  const WeightForms blocks = forms(kBlocks);
  EXPECT_EQ(blocks.matrix(q_kv_a(), 256).type, DType::kF8E4M3);
  EXPECT_FALSE(blocks.matrix(q_kv_a(), 256).by_row);
  EXPECT_EQ(blocks.matrix(q_kv_a(), 200).type, DType::kBF16);     // ragged columns
  EXPECT_EQ(blocks.matrix(q_kv_a(376), 256).type, DType::kBF16);  // kv_a inside a block
  EXPECT_EQ(blocks.kv_b_halves(kv_b(), 512, 128, 128).type, DType::kF8E4M3);
  EXPECT_EQ(blocks.kv_b_halves(kv_b(), 512, 64, 192).type, DType::kBF16);
}

TEST_F(WeightFormsTest, MlpsAreInE4M3IfAllTheirMatricesAre) {
  const WeightForms blocks = forms(kBlocks);
  EXPECT_EQ(blocks.mlps(mlp, 1, 256).type, DType::kBF16);  // an ignored matrix
  EXPECT_EQ(blocks.mlps([](int64_t) { return mlp(1); }, 1, 256).type, DType::kF8E4M3);
  EXPECT_EQ(blocks.mlps([](int64_t) { return mlp(1); }, 1, 200).type, DType::kBF16);
  EXPECT_EQ(forms(kRow).mlps(mlp, 2, 256).type, DType::kF8E4M3);
}

TEST_F(WeightFormsTest, AScaleARowStays) {
  const WeightForms tensor = forms(kTensor);
  EXPECT_EQ(tensor.matrix(q_kv_a(), 256).type, DType::kF8E4M3);
  EXPECT_FALSE(tensor.matrix(q_kv_a(), 256).by_row);
  EXPECT_EQ(tensor.kv_b_halves(kv_b(), 512, 128, 128).type, DType::kF8E4M3);
  const WeightForms row = forms(kRow);
  EXPECT_EQ(row.matrix(q_kv_a(), 256).type, DType::kF8E4M3);
  EXPECT_TRUE(row.matrix(q_kv_a(), 256).by_row);
  EXPECT_EQ(row.kv_b_halves(kv_b(), 512, 128, 128).type, DType::kBF16);
}

TEST_F(WeightFormsTest, WhatIsWideStaysSoUnlessItIsQuantised) {
  EXPECT_EQ(forms("").matrix(q_kv_a(), 256).type, DType::kBF16);
  options_.quantize_fp8 = true;
  EXPECT_EQ(forms("").matrix(q_kv_a(), 256).type, DType::kF8E4M3);
  EXPECT_EQ(forms("").mlps(mlp, 2, 256).type, DType::kF8E4M3);
  EXPECT_EQ(forms("").kv_b_halves(kv_b(), 512, 128, 128).type, DType::kF8E4M3);
  EXPECT_EQ(forms("", StoredFp8::kExpandedToBF16).matrix(q_kv_a(), 256).type, DType::kBF16);
  EXPECT_EQ(forms(kBlocks, StoredFp8::kExpandedToBF16).matrix(q_kv_a(), 256).type, DType::kBF16);
}

}  // namespace
}  // namespace fathom
