// Models of grouped-query attention converted to latent attention: logits against those of Hugging
// Face transformers on the unconverted model. Where nothing is cut they are equal, in both forms of
// attention; with a smaller rank they go away from them step by step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/json.h"
#include "checkpoint/test_files.h"
#include "convert/calibration.h"
#include "convert/convert_checkpoint.h"
#include "e2e/golden.h"
#include "model/gpu_support.h"

namespace fathom {
namespace {

using mla::MlaRequest;

struct Expected {
  std::vector<int32_t> ids;
  std::vector<int64_t> rows;
  GoldenTensor logits;
};

Expected read_expected(const std::string& name, const std::string& suffix = "") {
  const std::string directory = goldens_directory() + name;
  const auto text = read_text_file(directory + "/golden" + suffix + ".json", 1 << 24);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  Expected expected;
  expected.ids =
      json::value_to<std::vector<int32_t>>(parse_json(*text, "golden.json")->at("prompt_ids"));
  auto tensors = read_tensors(directory + "/logits" + suffix + ".safetensors");
  expected.logits = tensors.at("logits");
  for (const float row : tensors.at("rows").values) {
    expected.rows.push_back(static_cast<int64_t>(row));
  }
  return expected;
}

Checkpoint opened(const std::string& directory) {
  auto checkpoint = Checkpoint::open(directory);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::move(*checkpoint);
}

MlaRequest with_rank(int64_t rank) { return {rank, std::nullopt, std::nullopt}; }

mla::ConvertSummary convert_golden(const std::string& name, const std::string& output,
                                   const MlaRequest& request,
                                   std::span<const mla::Matrix> moments = {}) {
  const Checkpoint source = opened(goldens_directory() + name);
  const auto shape = mla::plan_mla_shape(source.config(), request);
  FATHOM_CHECK(shape.has_value(), "{}", shape.error().message);
  mla::ConvertOptions options;
  options.output = output;
  options.num_threads = 2;
  options.show_progress = false;
  auto summary = mla::convert_checkpoint(source, *shape, moments, options);
  FATHOM_CHECK(summary.has_value(), "{}", summary.error().message);
  return std::move(*summary);
}

struct Difference {
  double largest = 0, mean = 0;
};

Difference difference(const std::string& model, const Expected& expected, AttentionForm form) {
  ModelOptions options;
  options.compute = DType::kF32;
  options.attention.form = form;
  ModelHarness harness(model, options, CacheFormat::kF32);
  const auto logits = harness.run({{expected.ids, {1024}}});
  Difference result;
  for (size_t r = 0; r < expected.rows.size(); ++r) {
    for (int64_t i = 0; i < harness.vocab(); ++i) {
      const double apart = std::abs(logits[0][expected.rows[r] * harness.vocab() + i] -
                                    expected.logits.row(static_cast<int64_t>(r))[i]);
      result.largest = std::max(result.largest, std::isnan(apart) ? INFINITY : apart);
      result.mean += apart;
    }
  }
  result.mean /= static_cast<double>(expected.rows.size()) * static_cast<double>(harness.vocab());
  return result;
}

class LosslessConversion : public testing::TestWithParam<std::string> {};

TEST_P(LosslessConversion, EqualsTransformersOnTheSourceInBothForms) {
  const TestFolder folder;
  const auto summary = convert_golden(GetParam(), folder / "mla", {});
  for (const mla::LayerReport& layer : summary.layers) {
    EXPECT_NEAR(layer.rope_energy, 1, 1e-9);
    EXPECT_NEAR(layer.latent_energy, 1, 1e-9);
  }
  const Checkpoint converted = opened(folder / "mla");
  EXPECT_FALSE(converted.config().gqa);
  EXPECT_EQ(converted.config().qk_rope_dim, 64);
  EXPECT_EQ(converted.config().kv_lora_rank, 64);
  const Expected expected = read_expected(GetParam());
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kMha}) {
    const Difference apart = difference(folder / "mla", expected, form);
    EXPECT_LE(apart.largest, 1e-4);
    std::printf("%s: largest difference %.2g\n", GetParam().c_str(), apart.largest);
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, LosslessConversion,
                         testing::Values("llama_mqa", "qwen2_mqa", "qwen2_two", "llama_four"),
                         [](const auto& test) { return test.param; });

TEST(Conversion, IsLosslessOverTwoThousandTokens) {
  const TestFolder folder;
  convert_golden("llama_mqa", folder / "mla", {});
  const Expected expected = read_expected("llama_mqa", "_long");
  ASSERT_EQ(expected.ids.size(), 2000u);
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kMha}) {
    const Difference apart = difference(folder / "mla", expected, form);
    EXPECT_LE(apart.largest, 1e-4);
    std::printf("2,000 tokens: largest difference %.2g\n", apart.largest);
  }
}

// The flag is read, not assumed: with V3's norm on the latent, which a converted model has not,
// the logits are others.
TEST(Conversion, ANormOnTheLatentWouldBeSeen) {
  const TestFolder folder;
  convert_golden("llama_mqa", folder / "mla", {});
  const auto text = read_text_file(folder / "mla/config.json", 1 << 20);
  json::object config = parse_json(*text, "config.json")->as_object();
  config["qk_latent_layernorm"] = true;
  folder.write("mla/config.json", json::serialize(config));
  // The norms' weights of a model that was trained with them.
  std::vector<TestTensor> norms;
  const std::vector<float> ones(64, 1.0f);
  std::string data(ones.size() * sizeof(float), '\0');
  std::memcpy(data.data(), ones.data(), data.size());
  for (int layer = 0; layer < 2; ++layer) {
    norms.push_back(
        {fmt::format("model.layers.{}.self_attn.kv_a_layernorm.weight", layer), "F32", {64}, data});
  }
  folder.write("mla/norms.safetensors", shard_of(norms));
  const auto index_text = read_text_file(folder / "mla/model.safetensors.index.json", 1 << 20);
  json::value index = *parse_json(*index_text, "index");
  for (const TestTensor& norm : norms) {
    index.at("weight_map").as_object()[norm.name] = "norms.safetensors";
  }
  folder.write("mla/model.safetensors.index.json", json::serialize(index));
  const Difference apart =
      difference(folder / "mla", read_expected("llama_mqa"), AttentionForm::kAuto);
  EXPECT_GT(apart.largest, 0.1);
}

TEST(Conversion, ErrorGrowsAsTheRankFalls) {
  const Expected expected = read_expected("qwen2_two");
  double last = -1;
  for (const int64_t rank : {64, 63, 48, 32, 16, 8}) {
    const TestFolder folder;
    convert_golden("qwen2_two", folder / "mla", with_rank(rank));
    const Difference apart = difference(folder / "mla", expected, AttentionForm::kAuto);
    std::printf("rank %d: mean difference %.3g\n", static_cast<int>(rank), apart.mean);
    EXPECT_GT(apart.mean, last) << rank;
    if (rank == 64) {
      EXPECT_LE(apart.largest, 1e-4);
    }
    last = apart.mean;
  }
}

Result<mla::Calibration> calibrated(const Checkpoint& source, const std::vector<int32_t>& ids) {
  mla::CalibrationOptions options;
  options.compute = DType::kF32;
  options.num_threads = 2;
  options.show_progress = false;
  return mla::calibrate(source, ids, options);
}

// Layer 0 reads the embedding, so its keys before rotation and its values follow in a few lines.
TEST(Conversion, MomentsAreThoseOfUnrotatedKeysAndValues) {
  const Checkpoint source = opened(goldens_directory() + "qwen2_two");
  const Expected expected = read_expected("qwen2_two");
  const auto calibration = calibrated(source, expected.ids);
  ASSERT_TRUE(calibration.has_value()) << calibration.error().message;
  const auto tensors = read_tensors(goldens_directory() + "qwen2_two/model.safetensors");
  const auto layer = [&](const std::string& name) -> const GoldenTensor& {
    return tensors.at("model.layers.0." + name);
  };
  const int64_t hidden = source.config().hidden, dim = source.config().kv_lora_rank;
  mla::Matrix wanted = mla::Matrix::Zero(2 * dim, 2 * dim);
  for (const int32_t id : expected.ids) {
    const float* x = tensors.at("model.embed_tokens.weight").row(id);
    double squares = 0;
    for (int64_t i = 0; i < hidden; ++i) squares += static_cast<double>(x[i]) * x[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-6);
    mla::Vector both(2 * dim);
    for (const auto& [name, first] : {std::pair("k", int64_t{0}), {"v", dim}}) {
      const std::string module = std::string("self_attn.") + name + "_proj";
      for (int64_t r = 0; r < dim; ++r) {
        double sum = layer(module + ".bias").values[static_cast<size_t>(r)];
        for (int64_t i = 0; i < hidden; ++i) {
          sum += layer(module + ".weight").row(r)[i] * scale * x[i] *
                 layer("input_layernorm.weight").values[static_cast<size_t>(i)];
        }
        both[first + r] = sum;
      }
    }
    wanted += both * both.transpose() / static_cast<double>(expected.ids.size());
  }
  EXPECT_LT((calibration->moments[0] - wanted).cwiseAbs().maxCoeff(), 1e-4);
}

// Moments of a text that ran through the model: those of the weights alone need more rank for the
// same loss on it.
TEST(Conversion, CalibrationIsNoWorseOnItsOwnText) {
  const Checkpoint source = opened(goldens_directory() + "qwen2_two");
  const Expected expected = read_expected("qwen2_two");
  const auto calibration = calibrated(source, expected.ids);
  ASSERT_TRUE(calibration.has_value()) << calibration.error().message;
  EXPECT_EQ(calibration->tokens, static_cast<int64_t>(expected.ids.size()) - 1);
  ASSERT_EQ(calibration->moments.size(), 2u);
  const TestFolder folder;
  convert_golden("qwen2_two", folder / "weights", with_rank(24));
  convert_golden("qwen2_two", folder / "text", with_rank(24), calibration->moments);
  const double with_text = difference(folder / "text", expected, AttentionForm::kAuto).mean;
  const double without = difference(folder / "weights", expected, AttentionForm::kAuto).mean;
  std::printf("mean difference %.3g with the text's moments, %.3g without\n", with_text, without);
  EXPECT_LT(with_text, without);
  // The loss is the golden's: the mean of the negative log-likelihoods of its logits.
  double loss = 0;
  for (size_t t = 0; t + 1 < expected.ids.size(); ++t) {
    const float* row = expected.logits.row(static_cast<int64_t>(t));
    double sum = 0;
    for (int64_t i = 0; i < source.config().vocab_size; ++i)
      sum += std::exp(static_cast<double>(row[i]));
    loss += std::log(sum) - row[expected.ids[t + 1]];
  }
  EXPECT_NEAR(calibration->loss, loss / static_cast<double>(calibration->tokens), 1e-4);
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A run that fails leaves no config.json, and the next one keeps its complete layers: the result
// has the bytes of an uninterrupted run.
TEST(Conversion, ResumesAndKeepsCompleteLayers) {
  const TestFolder folder;
  convert_golden("qwen2_two", folder / "whole", with_rank(24));
  std::filesystem::copy(goldens_directory() + "qwen2_two", folder / "source");
  // The layers can be written, but not this file's copy: its temporary name is too long.
  const std::string too_long = "source/" + std::string(250, 'x');
  folder.write(too_long, "text");
  const Checkpoint source = opened(folder / "source");
  const auto shape = mla::plan_mla_shape(source.config(), with_rank(24));
  mla::ConvertOptions options;
  options.output = folder / "out";
  options.show_progress = false;
  EXPECT_FALSE(mla::convert_checkpoint(source, *shape, {}, options).has_value());
  EXPECT_FALSE(std::filesystem::exists(folder / "out/config.json"));
  const std::string last = "/model-00003-of-00003.safetensors";
  EXPECT_TRUE(std::filesystem::exists(folder / "out" + last));

  std::filesystem::remove(folder / too_long);
  std::filesystem::remove(folder / "out" + last);
  // A second name shows whether the file is still the same one.
  const std::string kept = folder / "out/model-00002-of-00003.safetensors";
  std::filesystem::create_hard_link(kept, folder / "kept");
  const auto other = mla::plan_mla_shape(source.config(), with_rank(23));
  const auto refused = mla::convert_checkpoint(source, *other, {}, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message.find("rank 24"), std::string::npos) << refused.error().message;
  const auto summary = mla::convert_checkpoint(source, *shape, {}, options);
  ASSERT_TRUE(summary.has_value()) << summary.error().message;
  EXPECT_EQ(summary->kept, 1);
  EXPECT_TRUE(std::filesystem::equivalent(kept, folder / "kept"));
  ASSERT_EQ(summary->layers.size(), 2u);
  EXPECT_GT(summary->layers[0].latent_energy, 0.5);
  for (const auto& entry : std::filesystem::directory_iterator(folder / "whole")) {
    const std::string name = "/" + entry.path().filename().string();
    EXPECT_EQ(bytes_of(folder / "out" + name), bytes_of(folder / "whole" + name)) << name;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "out"), {}),
            std::distance(std::filesystem::directory_iterator(folder / "whole"), {}));
}

TEST(Conversion, RefusesWeightsThatAreNoNumbers) {
  const TestFolder folder;
  std::filesystem::copy(goldens_directory() + "qwen2_two", folder / "source");
  const Checkpoint source = opened(folder / "source");
  const std::string name = "model.layers.1.self_attn.v_proj.weight";
  {
    std::fstream file(folder / "source/model.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    const float nan = std::nanf("");
    file.seekp(source.find(name)->offset);
    file.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  }
  mla::ConvertOptions options;
  options.output = folder / "out";
  options.show_progress = false;
  const auto shape = mla::plan_mla_shape(source.config(), {});
  const auto refused = mla::convert_checkpoint(source, *shape, {}, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_NE(refused.error().message.find(name), std::string::npos) << refused.error().message;
  EXPECT_FALSE(std::filesystem::exists(folder / "out/config.json"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model-00003-of-00003.safetensors"));
}

// GPUs take none of these so far, whatever their widths.
TEST(Conversion, GpusRefuseByField) {
  const TestFolder folder;
  const Checkpoint source = opened(goldens_directory() + "qwen2_two");
  const auto refusal = [](const ModelConfig& config) {
    const auto supported = gpu_supports(make_spec(config), CacheFormat::kBF16);
    return supported ? std::string() : supported.error().message;
  };
  EXPECT_NE(refusal(source.config()).find("num_key_value_heads is 2"), std::string::npos);
  convert_golden("qwen2_two", folder / "mla", {});
  ModelConfig converted = opened(folder / "mla").config();
  EXPECT_NE(refusal(converted).find("qk_latent_layernorm is false"), std::string::npos);
  converted.latent_norm = true;
  EXPECT_NE(refusal(converted).find("attention_bias is true"), std::string::npos);
  converted.has_qkv_bias = false;
  EXPECT_NE(refusal(converted).find("qk_rope_heads is 2"), std::string::npos);
  converted.rope_heads = 1;
  EXPECT_NE(refusal(converted).find("kv_lora_rank"), std::string::npos) << refusal(converted);
}

}  // namespace
}  // namespace fathom
