// bf16 and f16 checkpoints quantized offline and while loading give the same model.
#include <gtest/gtest.h>

#include <cmath>

#include "base/json.h"
#include "checkpoint/quantize_checkpoint.h"
#include "checkpoint/test_files.h"
#include "e2e/golden.h"
#include "e2e/published_forms.h"

namespace fathom {
namespace {

std::vector<int32_t> prompt_of(const std::string& directory) {
  const auto text = read_text_file(directory + "/golden.json", 1 << 24);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  return json::value_to<std::vector<int32_t>>(parse_json(*text, "golden.json")->at("prompt_ids"));
}

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, length_a = 0, length_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += static_cast<double>(a[i]) * b[i];
    length_a += static_cast<double>(a[i]) * a[i];
    length_b += static_cast<double>(b[i]) * b[i];
  }
  return dot / std::sqrt(length_a * length_b);
}

TEST(QuantizedModel, OfflineAndWhileLoadingAreTheSameBits) {
  for (const char* name :
       {"v3", "v2lite", "v2_group", "kimi", "moonlight", "kanana", "glm_lite", "youtu", "gigachat",
        "kimi_k25", "no_rope", "glm_dsa", "glm_dsa_shared"}) {
    const std::string source = goldens_directory() + name;
    const TestFolder folder;
    QuantizeOptions options;
    options.output = folder / "made";
    options.show_progress = false;
    const auto checkpoint = Checkpoint::open(source);
    ASSERT_TRUE(checkpoint) << checkpoint.error().message;
    const auto made = quantize_checkpoint(*checkpoint, options);
    ASSERT_TRUE(made) << made.error().message;

    const std::vector<TestSequence> prompt{{prompt_of(source), {1 << 20}}};
    for (const DType compute : {DType::kBF16, DType::kF32}) {
      ModelOptions model;
      model.compute = compute;
      const auto logits = [&](const std::string& directory, bool quantize) {
        return ModelHarness(directory, model, CacheFormat::kBF16, 64, quantize).run(prompt)[0];
      };
      const auto stored = logits(source, false), quantized = logits(source, true);
      EXPECT_EQ(logits(options.output, false), quantized) << name;
      EXPECT_NE(stored, quantized) << name;
      // The effect of rounding to 4 bits on random weights with few columns; a wrong scale gives 0.
      // Where rows choose their keys some choose others.
      const bool is_sparse = checkpoint->config().indexer.has_value();
      EXPECT_GT(cosine(stored, quantized), is_sparse ? 0.9 : 0.98) << name;
    }
  }
}

// The checkpoints of the GPU tests: the trained model, whose activation scales are not used here.
TEST(QuantizedModel, PublishedFormsAreNearToBlocks) {
  const auto checkpoint = Checkpoint::open(bundled_model());
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const std::vector<TestSequence> text{{{100, 2000, 5, 77, 4000, 321, 9, 1234}, {1 << 20}}};
  const auto logits = [&](const std::string& directory) {
    return ModelHarness(directory, {.compute = DType::kF32, .attention = {}}, CacheFormat::kF32)
        .run(text)[0];
  };
  const std::vector<float> blocks = logits(bundled_model());
  for (const PublishedForm form : {PublishedForm::kStaticActivations, PublishedForm::kScaleARow,
                                   PublishedForm::kPowersOfTwo}) {
    const TestFolder folder;
    write_published_form(*checkpoint, form, folder.path());
    // Weights are rounded to 4 bits a second time, and random text has close expert selections; a
    // wrong scale gives far less.
    EXPECT_GT(cosine(logits(folder.path()), blocks), 0.95) << static_cast<int>(form);
  }
}

}  // namespace
}  // namespace fathom
