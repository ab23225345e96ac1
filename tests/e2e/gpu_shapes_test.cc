// Models of unpublished sizes, and more than 256 experts, on the GPU: as near to float32 on the CPU
// as the same model of even sizes. Weights are random (--load-format dummy). Run from the
// repository's root.
#include <gtest/gtest.h>

#include "base/json.h"
#include "checkpoint/test_files.h"
#include "e2e/gpu_deviation.h"
#include "e2e/gpu_fixture.h"

namespace fathom {
namespace {

json::object bundled_config() {
  const auto text = read_text_file("models/fathom-tiny/config.json", 1 << 20);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  return parse_json(*text, "config.json")->as_object();
}

Checkpoint dummy_of(const json::object& config, const TestFolder& folder) {
  folder.write("config.json", json::serialize(config));
  auto checkpoint = Checkpoint::open_dummy(folder.path(), 3);
  FATHOM_CHECK(checkpoint.has_value(), "{}", checkpoint.error().message);
  return std::move(*checkpoint);
}

Deviation deviation_of(const json::object& config, const char* what) {
  const TestFolder folder;
  const Checkpoint checkpoint = dummy_of(config, folder);
  std::mt19937 random(2);
  const auto texts = random_texts(random);
  const auto right = run(*on_cpu(checkpoint, DType::kF32, CacheFormat::kF32), texts);
  return deviation(run(*on_gpu(gpu_options(), checkpoint), texts), right, what);
}

class GpuShapes : public testing::TestWithParam<bool> {};  // e4m3

TEST_P(GpuShapes, OddSizesAreAsNearAsEvenOnes) {
  json::object even = bundled_config();
  if (!GetParam()) even.erase("quantization_config");
  const Deviation base = deviation_of(even, "even sizes");
  const auto expect_as_near = [&](const char* what, const json::object& changes) {
    json::object odd = even;
    for (const auto& [key, value] : changes) odd[key] = value;
    const Deviation its = deviation_of(odd, what);
    // More experts leave more near ties: 512 of them twice as many as 16.
    EXPECT_LE(its.logprobs, 3 * base.logprobs + 1e-3) << what;
    EXPECT_LE(its.other_tokens, 3 * base.other_tokens + 0.03) << what;
  };
  expect_as_near("vocab_size 8009", {{"vocab_size", 8009}});
  expect_as_near("intermediate sizes 750 and 100",
                 {{"intermediate_size", 750}, {"moe_intermediate_size", 100}});
  expect_as_near(
      "384 experts, one group",
      {{"n_routed_experts", 384}, {"n_group", 1}, {"topk_group", 1}, {"num_experts_per_tok", 8}});
  expect_as_near(
      "512 experts in 8 groups",
      {{"n_routed_experts", 512}, {"n_group", 8}, {"topk_group", 4}, {"num_experts_per_tok", 8}});
  expect_as_near("3 heads", {{"num_attention_heads", 3}, {"num_key_value_heads", 3}});
  expect_as_near("no query compression", {{"q_lora_rank", nullptr}});
  expect_as_near("no shared expert", {{"n_shared_experts", 0}});
}

INSTANTIATE_TEST_SUITE_P(Weights, GpuShapes, testing::Bool(),
                         [](const auto& test) { return test.param ? "E4m3" : "Bf16"; });

// Refused before a weight is read: the folder has none.
TEST(GpuShapesRefused, ByTheFieldsName) {
  json::object config = bundled_config();
  config["kv_lora_rank"] = 256;
  const TestFolder folder;
  const Checkpoint checkpoint = dummy_of(config, folder);
  for (const Status& status : {create_gpu_runner(checkpoint, gpu_options()).error(),
                               gpu_memory(checkpoint, gpu_options()).error()}) {
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_TRUE(status.message.starts_with("config.json: kv_lora_rank is 256")) << status.message;
  }
}

}  // namespace
}  // namespace fathom
