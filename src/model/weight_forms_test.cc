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
        "v_head_dim":128,"rope_theta":10000,"intermediate_size":{}{}}})",
                    inter_,
                    quantization.empty() ? "" : ", \"quantization_config\":" + quantization));
    auto opened = Checkpoint::open_dummy(folder_.path());
    EXPECT_TRUE(opened) << opened.error().message;
    checkpoint_ = std::move(*opened);
    return {checkpoint_, stored, options_};
  }

  // q_proj and kv_a_proj_with_mqa [rows, cols].
  static TensorPart q(int64_t rows = 384, int64_t cols = 256) {
    return whole("self_attn.q_proj.weight", rows, cols);
  }
  static TensorPart kv_a(int64_t cols = 256) {
    return whole("self_attn.kv_a_proj_with_mqa.weight", 576, cols);
  }
  static TensorPart kv_b() { return whole("self_attn.kv_b_proj.weight", 512, 512); }

  // The blocks of both layers, with so many columns.
  std::vector<MlpSpec> mlps(int64_t hidden = 256) const {
    std::vector<MlpSpec> blocks;
    for (const LayerSpec& layer : make_spec(checkpoint_.config()).layers) {
      blocks.push_back(*layer.dense);
      blocks.back().gate.cols.count = blocks.back().up.cols.count = hidden;
    }
    return blocks;
  }

  static TensorPart whole(const std::string& name, int64_t rows, int64_t cols) {
    return {"model.layers.0." + name, rows, cols, {0, rows}, {0, cols}};
  }

  int inter_ = 200;
  TestFolder folder_;
  Checkpoint checkpoint_;
  LoadOptions options_;
};

TEST_F(WeightFormsTest, KeepWhatProductsOfE4M3Take) {
  const WeightForms blocks = forms(kBlocks);
  const TensorPart q_part = q(), kv_part = kv_a(), kv_b_part = kv_b();
  EXPECT_EQ(blocks.matrix({&q_part, &kv_part}).type, DType::kF8E4M3);
  EXPECT_FALSE(blocks.matrix({&q_part, &kv_part}).by_row);
  const TensorPart ragged_q = q(384, 200), ragged_kv = kv_a(200), odd_q = q(376);
  EXPECT_EQ(blocks.matrix({&ragged_q, &ragged_kv}).type, DType::kBF16);
  EXPECT_EQ(blocks.matrix({&odd_q, &kv_part}).type, DType::kBF16);  // kv_a inside a block
  EXPECT_EQ(blocks.kv_b_halves(kv_b_part, 128, 128).type, DType::kF8E4M3);
  EXPECT_EQ(blocks.kv_b_halves(kv_b_part, 64, 192).type, DType::kBF16);
  EXPECT_EQ(blocks.kv_b_halves(kv_b_part, 256, 128).type, DType::kBF16);
}

TEST_F(WeightFormsTest, SlicesKeepWholeBlocks) {
  const WeightForms blocks = forms(kBlocks);
  TensorPart rows = q(), cols = q();
  rows.rows = {256, 128};
  EXPECT_EQ(blocks.matrix({&rows}).type, DType::kF8E4M3);
  rows.rows = {192, 192};  // the second head begins inside a block
  EXPECT_EQ(blocks.matrix({&rows}).type, DType::kBF16);
  cols.cols = {128, 128};
  EXPECT_EQ(blocks.matrix({&cols}).type, DType::kF8E4M3);
  cols.cols = {64, 128};
  EXPECT_EQ(blocks.matrix({&cols}).type, DType::kBF16);
  std::vector<MlpSpec> second = {mlps()[1]};
  second[0].down.cols = {128, 72};
  EXPECT_EQ(blocks.mlps(second), DType::kF8E4M3);
  second[0].down.cols = {64, 72};
  EXPECT_EQ(blocks.mlps(second), DType::kBF16);
}

TEST_F(WeightFormsTest, MlpsAreInE4M3IfAllTheirMatricesAre) {
  const WeightForms blocks = forms(kBlocks);
  EXPECT_EQ(blocks.mlps(mlps()), DType::kBF16);  // an ignored matrix in the first
  EXPECT_EQ(blocks.mlps({&mlps()[1], 1}), DType::kF8E4M3);
  EXPECT_EQ(blocks.mlps({&mlps(200)[1], 1}), DType::kBF16);
  EXPECT_EQ(forms(kRow).mlps(mlps()), DType::kF8E4M3);
}

TEST_F(WeightFormsTest, AScaleARowStays) {
  const TensorPart q_part = q(), kv_part = kv_a(), kv_b_part = kv_b();
  const WeightForms tensor = forms(kTensor);
  EXPECT_EQ(tensor.matrix({&q_part, &kv_part}).type, DType::kF8E4M3);
  EXPECT_FALSE(tensor.matrix({&q_part, &kv_part}).by_row);
  EXPECT_EQ(tensor.kv_b_halves(kv_b_part, 128, 128).type, DType::kF8E4M3);
  const WeightForms row = forms(kRow);
  EXPECT_EQ(row.matrix({&q_part, &kv_part}).type, DType::kF8E4M3);
  EXPECT_TRUE(row.matrix({&q_part, &kv_part}).by_row);
  EXPECT_EQ(row.kv_b_halves(kv_b_part, 128, 128).type, DType::kBF16);
}

TEST_F(WeightFormsTest, WhatIsWideStaysSoUnlessItIsQuantised) {
  const TensorPart q_part = q(), kv_part = kv_a(), kv_b_part = kv_b();
  const auto type = [&](const WeightForms& of) { return of.matrix({&q_part, &kv_part}).type; };
  EXPECT_EQ(type(forms("")), DType::kBF16);
  options_.quantize_fp8 = true;
  EXPECT_EQ(type(forms("")), DType::kF8E4M3);
  EXPECT_EQ(forms("").mlps(mlps()), DType::kF8E4M3);
  EXPECT_EQ(forms("").kv_b_halves(kv_b_part, 128, 128).type, DType::kF8E4M3);
  EXPECT_EQ(type(forms("", StoredFp8::kExpandedToBF16)), DType::kBF16);
  EXPECT_EQ(type(forms(kBlocks, StoredFp8::kExpandedToBF16)), DType::kBF16);
}

// Groups of 32 columns or more of routed experts stay; a rank's columns begin a group.
TEST_F(WeightFormsTest, FourBitsStayWhereKernelsTakeThem) {
  const auto packed = [](int group, const char* more = "") {
    return fmt::format(
        R"({{"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {{"g": {{"weights": {{"num_bits": 4, "type": "int",
            "strategy": "group", "group_size": {}{}}}}}}}}})",
        group, more);
  };
  inter_ = 192;
  const auto kept = [&](const std::string& quantization, int64_t first = 0) {
    const WeightForms of = forms(quantization);
    std::vector<MlpSpec> blocks = mlps();
    blocks[1].down.cols = {first, 96};
    return of.four_bit(blocks);
  };
  EXPECT_EQ(kept(packed(32)), FourBitCode::kInteger);
  EXPECT_EQ(kept(packed(32), 96), FourBitCode::kInteger);
  EXPECT_EQ(kept(packed(32), 16), std::nullopt);
  EXPECT_EQ(kept(packed(16)), std::nullopt);
  EXPECT_EQ(kept(kBlocks), std::nullopt);
  EXPECT_EQ(kept(""), std::nullopt);
  const WeightForms of = forms(packed(16));
  const auto layers = layer_forms(make_spec(checkpoint_.config()), of);
  EXPECT_TRUE(layers[0].dequantizes_four_bits);
  EXPECT_EQ(layers[0].o.type, DType::kBF16);
  EXPECT_EQ(layers[0].mlps, DType::kBF16);
}

TEST_F(WeightFormsTest, OfLayersFollowTheSpec) {
  const WeightForms blocks = forms(kBlocks);
  const auto layers = layer_forms(make_spec(checkpoint_.config()), blocks);
  const WeightForm e4m3{DType::kF8E4M3};
  ASSERT_EQ(layers.size(), 2);
  EXPECT_EQ(layers[0], (LayerForms{e4m3, {}, e4m3, e4m3, e4m3, DType::kBF16, DType::kF32, {}}));
  EXPECT_EQ(layers[1].mlps, DType::kF8E4M3);
  // A rank's second of two heads: its rows of q_proj begin inside a block.
  const auto part = layer_forms(make_spec(checkpoint_.config(), {.tp = 2}, 1), blocks);
  EXPECT_EQ(part[1].q_kv_a, WeightForm{});
  EXPECT_EQ(part[1].o, e4m3);
}

}  // namespace
}  // namespace fathom
