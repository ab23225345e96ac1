// Every model form of docs/models.md with all its linear weights in four bits, as
// compressed-tensors stores INT4 with a scale a row, against the same weights multiplied out: in
// fp32 within 1e-4.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/load_plan.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"
#include "convert/convert_checkpoint.h"
#include "e2e/golden.h"

namespace fathom {
namespace {

constexpr const char* kQuantization =
    R"(, "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": [], "config_groups": {"group_0": {"targets": ["Linear"], "weights":
    {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": true}}}})";

Checkpoint opened(const std::string& directory) {
  auto checkpoint = Checkpoint::open(directory);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::move(*checkpoint);
}

// A row's codes, -7 to 7, in words of eight, the first in the lowest bits; scale = largest / 7.
struct PackedRow {
  explicit PackedRow(std::span<float> values) : words((values.size() + 7) / 8) {
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::abs(value));
    scale = to_bf16(largest / 7);
    for (size_t i = 0; i < values.size(); ++i) {
      const float code = largest > 0 ? std::round(values[i] / to_float(scale)) : 0;
      values[i] = code * to_float(scale);
      words[i / 8] |= static_cast<uint32_t>(static_cast<int>(code) + 8) << (4 * (i % 8));
    }
  }
  std::vector<uint32_t> words;
  bf16 scale;
};

// The tensors of a model in four bits, and with the same values in fp32.
struct BothModels {
  void add(const PublishedTensor& tensor, const ScaledMatrix& matrix, bool linear) {
    std::vector<float> values;
    std::vector<uint32_t> words;
    std::vector<bf16> scales;
    for (int64_t r = 0; r < matrix.rows(); ++r) {
      for (int64_t c = 0; c < matrix.cols(); ++c) values.push_back(matrix.at(r, c));
      if (!linear) continue;
      const PackedRow row({values.end() - matrix.cols(), values.end()});
      words.insert(words.end(), row.words.begin(), row.words.end());
      scales.push_back(row.scale);
    }
    wide.push_back({tensor.name, "F32", tensor.shape, bytes_of(values)});
    if (!linear) {
      stored.push_back(wide.back());
      return;
    }
    const std::string name = tensor.name.substr(0, tensor.name.rfind(".weight")) + ".weight_";
    const int64_t rows = tensor.shape[0];
    stored.push_back({name + "packed", "I32", {rows, std::ssize(words) / rows}, bytes_of(words)});
    stored.push_back({name + "scale", "BF16", {rows, 1}, bytes_of(scales)});
    stored.push_back({name + "shape", "I64", {2}, bytes_of(tensor.shape)});
    ++packed;
  }

  std::vector<TestTensor> stored, wide;
  int packed = 0;
};

// Writes the models `folder`/stored, in four bits, and `folder`/wide; returns how many weights have
// four bits.
int write_both(const std::string& source, const TestFolder& folder) {
  const Checkpoint checkpoint = opened(source);
  const WeightNames names(checkpoint.config());
  BothModels both;
  std::vector<TensorRequest> requests;
  names.for_each_weight([&](const PublishedTensor& tensor) {
    requests.push_back({tensor.name, tensor.shape, [&, tensor](const ScaledMatrix& matrix) {
                          both.add(tensor, matrix, names.is_linear(tensor.name));
                          return Result<>();
                        }});
    return true;
  });
  LoadOptions options;
  options.show_progress = false;
  options.num_threads = 1;
  const auto loaded = load_tensors(checkpoint, requests, options);
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  std::string config = file_text(source + "/config.json");
  folder.write("wide/config.json", config);
  config.insert(config.rfind('}'), kQuantization);
  folder.write("stored/config.json", config);
  folder.write("wide/model.safetensors", shard_of(both.wide));
  folder.write("stored/model.safetensors", shard_of(both.stored));
  return both.packed;
}

// `fathom convert` of a golden's model at a rank that cuts.
std::string converted(const std::string& name, const TestFolder& folder) {
  const Checkpoint source = opened(goldens_directory() + name);
  const auto shape = mla::plan_mla_shape(source.config(), {48, std::nullopt, std::nullopt});
  FATHOM_CHECK(shape.has_value(), "{}", shape.error().message);
  mla::ConvertOptions options;
  options.output = folder / "converted";
  options.num_threads = 1;
  options.show_progress = false;
  const auto summary = mla::convert_checkpoint(source, *shape, {}, options);
  FATHOM_CHECK(summary.has_value(), "{}", summary.error().message);
  return options.output;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double apart = std::abs(static_cast<double>(a[i]) - b[i]);
    worst = std::max(worst, std::isnan(apart) ? INFINITY : apart);
  }
  return worst;
}

class FourBitRelatives : public testing::TestWithParam<std::string> {};

TEST_P(FourBitRelatives, EqualTheirDequantizedValues) {
  constexpr std::string_view kConverted = "converted_";
  const TestFolder folder;
  const std::string source = GetParam().starts_with(kConverted)
                                 ? converted(GetParam().substr(kConverted.size()), folder)
                                 : goldens_directory() + GetParam();
  EXPECT_GE(write_both(source, folder), 6);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 60; ++i) prompt.push_back(i * 37 % 61);
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kMha}) {
    ModelOptions options;
    options.compute = DType::kF32;
    options.attention.form = form;
    ModelHarness four_bit(folder / "stored", options, CacheFormat::kF32);
    ModelHarness wide(folder / "wide", options, CacheFormat::kF32);
    for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{2048}, {50, 1, 9}}) {
      EXPECT_LT(
          largest_difference(four_bit.run({{prompt, chunks}})[0], wide.run({{prompt, chunks}})[0]),
          1e-4);
    }
    // Four bits matter: the source's logits are elsewhere.
    ModelHarness whole(source, options, CacheFormat::kF32);
    EXPECT_GT(
        largest_difference(four_bit.run({{prompt, {2048}}})[0], whole.run({{prompt, {2048}}})[0]),
        1e-3);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, FourBitRelatives,
                         testing::Values("v2lite", "v2_group", "v3", "kimi", "moonlight", "kanana",
                                         "glm_lite", "gigachat", "youtu", "no_rope", "llama_mqa",
                                         "llama_bias", "qwen2_two", "converted_qwen2_two", "v32",
                                         "glm_dsa", "kimi_k25"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace fathom
