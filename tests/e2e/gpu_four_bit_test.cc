// The bundled model with experts in four bits on the GPU, against the same checkpoint in float32 on
// the CPU; and a model all of whose linear layers have four bits. Run from the repository's root.
#include <gtest/gtest.h>

#include <mutex>

#include "base/json.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/quantize_checkpoint.h"
#include "checkpoint/test_files.h"
#include "checkpoint/weight_names.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

[[maybe_unused]] const bool kExpectsRanks = (expect_gpu_ranks(), true);

json::object bundled_config() {
  const auto text = read_text_file("models/fathom-tiny/config.json", 1 << 20);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  const auto parsed = parse_json(*text, "config.json");
  FATHOM_CHECK(parsed.has_value(), "{}", parsed.error().message);
  return parsed->as_object();
}

// The bundled model's weights in bf16: only those can be quantized.
void write_wide(const TestFolder& folder, const std::string& name) {
  const Checkpoint& source = bundled_checkpoint();
  std::vector<TestTensor> tensors;
  std::mutex mutex;
  std::vector<TensorRequest> requests;
  for (const auto& [key, entry] : source.tensors()) {
    if (key.ends_with("weight_scale_inv")) continue;
    requests.push_back(
        {key, entry.shape, [&, key](const ScaledMatrix& matrix) -> Result<> {
           std::vector<bf16> values;
           for (int64_t r = 0; r < matrix.rows(); ++r) {
             for (int64_t c = 0; c < matrix.cols(); ++c) {
               values.push_back(to_bf16(matrix.at(r, c)));
             }
           }
           const std::scoped_lock lock(mutex);
           tensors.push_back({key, "BF16", source.find(key)->shape, bytes_of(values)});
           return {};
         }});
  }
  const auto loaded = load_tensors(source, requests, {.show_progress = false});
  FATHOM_CHECK(loaded.has_value(), "{}", loaded.error().message);
  json::object config = bundled_config();
  config.erase("quantization_config");
  folder.write(name + "/config.json", json::serialize(config));
  folder.write(name + "/model.safetensors", shard_of(tensors));
}

class GpuFourBits : public testing::TestWithParam<const char*> {
 protected:
  GpuFourBits() {
    write_wide(folder_, "wide");
    const auto source = Checkpoint::open(folder_ / "wide");
    FATHOM_CHECK(source.has_value(), "{}", source.error().message);
    QuantizeOptions options;
    options.format = *quantize_format_named(GetParam());
    options.output = folder_ / "stored";
    options.show_progress = false;
    const auto done = quantize_checkpoint(*source, options);
    FATHOM_CHECK(done.has_value(), "{}", done.error().message);
    auto opened = Checkpoint::open(folder_ / "stored");
    FATHOM_CHECK(opened.has_value(), "{}", opened.error().message);
    checkpoint_ = std::move(*opened);
  }

  TestFolder folder_;
  Checkpoint checkpoint_;
};

// Steps have from one row to hundreds: experts of few rows and of many. The bounds are those of
// bf16 weights (gpu_published_forms_test.cc).
TEST_P(GpuFourBits, AreNearToFloat32) {
  std::mt19937 random(1);
  const auto texts = random_texts(random);
  const auto right = run(*on_cpu(checkpoint_, DType::kF32, CacheFormat::kF32), texts);
  const Deviation wide =
      deviation(run(*on_cpu(bundled_checkpoint(), DType::kF32, CacheFormat::kF32), texts), right,
                "CPU, float32, experts not quantized");
  EXPECT_GT(wide.logprobs, 0.1) << "four bits are seen";
  for (const bool deterministic : {false, true}) {
    GpuRunnerOptions options = gpu_options();
    options.deterministic = deterministic;
    const Deviation its = deviation(run(*on_gpu(options, checkpoint_), texts), right,
                                    deterministic ? "GPU, deterministic" : "GPU");
    EXPECT_LE(its.logprobs, 0.07);
    EXPECT_LE(its.other_tokens, 0.055);
  }
  const Deviation split =
      deviation(run(*on_gpu(ranks(2), checkpoint_), texts), right, "GPU, two ranks");
  EXPECT_LE(split.logprobs, 0.07);
  EXPECT_LE(split.other_tokens, 0.055);
}

INSTANTIATE_TEST_SUITE_P(Of, GpuFourBits, testing::Values("int4-g32", "int4-g128", "mxfp4"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

// What is not a routed expert is dequantized; dummy weights are those of the CPU.
TEST(GpuFourBitDummy, AllLinearLayers) {
  const TestFolder folder;
  json::object config = bundled_config();
  const auto quantization = parse_json(
      R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
          "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                              "group_size": 32}}}})",
      "quantization_config");
  ASSERT_TRUE(quantization) << quantization.error().message;
  config["quantization_config"] = *quantization;
  folder.write("model/config.json", json::serialize(config));
  const auto checkpoint = Checkpoint::open_dummy(folder / "model");
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  std::mt19937 random(2);
  const auto texts = random_texts(random);
  const auto right = run(*on_cpu(*checkpoint, DType::kF32, CacheFormat::kF32), texts);
  const Deviation cpu =
      deviation(run(*on_cpu(*checkpoint, DType::kBF16, CacheFormat::kBF16), texts), right, "CPU");
  const Deviation its = deviation(run(*on_gpu(gpu_options(), *checkpoint), texts), right, "GPU");
  EXPECT_LE(its.logprobs, 1.5 * cpu.logprobs);
  EXPECT_LE(its.other_tokens, 1.5 * cpu.other_tokens + 0.01);
}

}  // namespace
}  // namespace fathom
