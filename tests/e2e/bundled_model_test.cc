// The bundled model compared with Hugging Face transformers: golden logits and greedy tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "e2e/golden.h"

namespace fathom {
namespace {

struct Prompt {
  std::string name;
  std::vector<int32_t> ids;
  std::vector<int32_t> greedy;
  std::vector<double> margins;
  GoldenTensor logits;  // of the prompt's last rows
};

std::vector<Prompt> prompts() {
  const std::string directory = goldens_directory() + "bundled/";
  const auto text = read_text_file(directory + "golden.json", 1 << 24);
  auto tensors = read_tensors(directory + "logits.safetensors");
  std::vector<Prompt> all;
  const auto parsed = parse_json(*text, "golden.json");
  for (const json::value& entry : parsed->as_array()) {
    Prompt prompt;
    prompt.name = std::string(entry.at("name").as_string());
    prompt.ids = json::value_to<std::vector<int32_t>>(entry.at("prompt_ids"));
    prompt.greedy = json::value_to<std::vector<int32_t>>(entry.at("greedy_ids"));
    prompt.margins = json::value_to<std::vector<double>>(entry.at("margins"));
    prompt.logits = tensors.at(prompt.name);
    all.push_back(std::move(prompt));
  }
  return all;
}

double worst_difference(const Prompt& prompt, const std::vector<float>& logits, int64_t vocab) {
  const int64_t rows = prompt.logits.shape[0];
  const int64_t first = static_cast<int64_t>(prompt.ids.size()) - rows;
  double worst = 0;
  for (int64_t i = 0; i < rows * vocab; ++i) {
    const double difference = std::abs(logits[first * vocab + i] - prompt.logits.values[i]);
    worst = difference <= worst ? worst : difference;  // NaN counts as worst
  }
  return worst;
}

ModelOptions float32() {
  ModelOptions options;
  options.compute = DType::kF32;
  return options;
}

TEST(BundledModel, Float32LogitsEqualTransformers) {
  ModelHarness model(bundled_model(), float32(), CacheFormat::kF32);
  for (const Prompt& prompt : prompts()) {
    const auto logits = model.run({{prompt.ids, {1 << 20}}});
    EXPECT_LE(worst_difference(prompt, logits[0], model.vocab()), 1e-4) << prompt.name;
  }
}

TEST(BundledModel, Float32GreedyTokensEqualTransformers) {
  ModelHarness model(bundled_model(), float32(), CacheFormat::kF32);
  for (const Prompt& prompt : prompts()) {
    EXPECT_EQ(model.greedy(prompt.ids, static_cast<int>(prompt.greedy.size())), prompt.greedy)
        << prompt.name;
  }
}

// bf16 may choose another token where the margin is small: tokens must be equal up to the first
// margin below kMargin.
TEST(BundledModel, Bf16GreedyTokensEqualWhereTheMarginIsClear) {
  constexpr double kMargin = 0.15;
  for (const CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFp8Scaled}) {
    ModelHarness model(bundled_model(), ModelOptions(), format);
    int64_t compared = 0;
    for (const Prompt& prompt : prompts()) {
      const auto unclear = std::find_if(prompt.margins.begin(), prompt.margins.end(),
                                        [](double margin) { return margin < kMargin; });
      const auto count = unclear - prompt.margins.begin();
      auto ids = model.greedy(prompt.ids, static_cast<int>(prompt.greedy.size()));
      ids.resize(static_cast<size_t>(count));
      EXPECT_TRUE(std::equal(ids.begin(), ids.end(), prompt.greedy.begin()))
          << prompt.name << ", cache " << name_of(format);
      compared += count;
    }
    EXPECT_GT(compared, 60);
  }
}

}  // namespace
}  // namespace fathom
