// Two layers of DeepSeek-V3 at full size (hidden 7168, 128 heads; one dense, one of 16 experts)
// with random FP8 weights on the GPU, against float64. Run from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cache/latent_layout.h"
#include "device/cuda/device_array.h"
#include "e2e/float64_model.h"
#include "e2e/test_configs.h"
#include "model/deepseek_cuda.h"

namespace fathom {
namespace {

constexpr int32_t kTokens = 32;

// One text, or as many texts as tokens.
ForwardBatch batch_of(const std::vector<int32_t>& ids, bool texts_of_one) {
  ForwardBatch batch;
  batch.token_ids = ids;
  batch.query_start = {0};
  batch.max_pages = 1;
  for (int32_t i = 0; i < kTokens; ++i) {
    batch.logit_rows.push_back(i);
    batch.positions.push_back(texts_of_one ? 0 : i);
    if (!texts_of_one && i + 1 < kTokens) continue;
    batch.query_start.push_back(i + 1);
    batch.context_lens.push_back(0);
    batch.block_tables.push_back(i);
  }
  return batch;
}

// The logits, [kTokens, vocab].
std::vector<float> on_gpu(cuda::DeepSeekModel& model, const ForwardBatch& batch, AttentionForm form,
                          CacheFormat format) {
  const ModelConfig& config = model.config();
  cuda::StepPlanner planner(
      {.heads = config.num_heads,
       .num_multiprocessors = model.num_multiprocessors(),
       .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
       .policy = {.form = form},
       .most_keys = cuda::MhaPrefillTile::kKeys,
       .page_stride = config.num_layers});
  cuda::StepLayout layout;
  planner.plan(batch, kTokens, layout);
  const cuda::DeviceArray<std::byte> arrays(layout.memory);
  const LatentLayout row{format, config.kv_lora_rank, config.qk_rope_dim};
  const cuda::DeviceArray<std::byte> cache(std::vector<std::byte>(
      static_cast<size_t>(config.num_layers * kTokens * row.page_bytes()), std::byte{}));
  const cuda::DeviceArray<int32_t> sampled(std::vector<int32_t>{0});
  model.forward(layout, arrays.data(), sampled.data(),
                {format, cache.data(), kTokens, row.page_bytes(), config.num_layers}, nullptr);
  std::vector<float> logits(static_cast<size_t>(kTokens * config.vocab_size));
  cuda::check(cudaMemcpy(logits.data(), model.logits(), logits.size() * sizeof(float),
                         cudaMemcpyDeviceToHost),
              "copying logits");
  return logits;
}

// The cosine of each token's logits, ascending.
std::vector<double> cosines(const std::vector<float>& actual, const std::vector<double>& expected) {
  const size_t vocab = expected.size() / kTokens;
  std::vector<double> result;
  for (size_t first = 0; first < expected.size(); first += vocab) {
    double both = 0, one = 0, other = 0;
    for (size_t i = first; i < first + vocab; ++i) {
      both += actual[i] * expected[i];
      one += double{actual[i]} * actual[i];
      other += expected[i] * expected[i];
    }
    result.push_back(both / std::sqrt(one * other));
  }
  std::sort(result.begin(), result.end());
  return result;
}

class GpuV3Layers : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = open_test_config("v3_two_layers");
    ASSERT_TRUE(opened.has_value()) << opened.error().message;
    checkpoint_ = std::move(*opened);
    for (int32_t i = 0; i < kTokens; ++i) ids_.push_back((i * 7919 + 13) % 4000);
  }

  std::unique_ptr<cuda::DeepSeekModel> load(StoredFp8 stored_fp8) const {
    auto model = cuda::DeepSeekModel::load(checkpoint_,
                                           {.max_rows = kTokens,
                                            .max_logit_rows = kTokens,
                                            .most_keys = cuda::MhaPrefillTile::kKeys,
                                            .stored_fp8 = stored_fp8},
                                           {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    return std::move(*model);
  }

  // The median of the tokens' cosines.
  double cosine(cuda::DeepSeekModel& model, AttentionForm form, CacheFormat format,
                const std::vector<double>& expected, bool texts_of_one = false) const {
    const auto found = cosines(on_gpu(model, batch_of(ids_, texts_of_one), form, format), expected);
    std::printf("%s, cache in %s: cosine %.6f in the middle, %.6f at least\n",
                form == AttentionForm::kMha ? "multi-head" : "absorbed",
                std::string(name_of(format)).c_str(), found[found.size() / 2], found[0]);
    return found[found.size() / 2];
  }

  Checkpoint checkpoint_;
  std::vector<int32_t> ids_;
};

// Random weights make random scores, and softmax amplifies their errors: e4m3 in the cache alone
// costs as much as this.
TEST_F(GpuV3Layers, AreNearFloat64) {
  const std::vector<double> expected = Float64Model(checkpoint_).logits(ids_);
  for (const auto stored_fp8 : {StoredFp8::kExpandedToBF16, StoredFp8::kKept}) {
    const bool e4m3 = stored_fp8 == StoredFp8::kKept;
    std::printf("products of %s\n", e4m3 ? "e4m3" : "bf16");
    const auto model = load(stored_fp8);
    for (const auto form : {AttentionForm::kAbsorbed, AttentionForm::kMha}) {
      EXPECT_GE(cosine(*model, form, CacheFormat::kBF16, expected), e4m3 ? 0.98 : 0.999);
      EXPECT_GE(cosine(*model, form, CacheFormat::kFp8Scaled, expected), e4m3 ? 0.98 : 0.99);
    }
  }
}

// Quantized activations alone put float64 as far from itself. Texts of one token, whose attention
// is the key's value alone: absorbed or not, the same rows are quantized.
TEST_F(GpuV3Layers, AreAsNearToFloat64AsFloat64OfQuantisedActivations) {
  const std::vector<double> expected = Float64Model(checkpoint_).logits(ids_, true);
  const std::vector<double> quantised = Float64Model(checkpoint_, true).logits(ids_, true);
  const std::vector<double> float64 = cosines({quantised.begin(), quantised.end()}, expected);
  std::printf("float64 of quantised activations: cosine %.6f in the middle, %.6f at least\n",
              float64[float64.size() / 2], float64[0]);
  const auto model = load(StoredFp8::kKept);
  const double found = cosine(*model, AttentionForm::kAuto, CacheFormat::kBF16, expected, true);
  EXPECT_LE(1 - found, 1.5 * (1 - float64[float64.size() / 2]));
}

}  // namespace
}  // namespace fathom
