// One token through the MoE layers in one launch: four layers of one TP8 rank of DeepSeek-V3
// (hidden 7168, 16 heads, 256 experts of 256 columns) in FP8 and of DeepSeek-V2-Lite in bf16 and in
// FP8, with random weights, against float64 and against the launches for each operation. Run from
// the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cache/latent_layout.h"
#include "device/cuda/device_array.h"
#include "e2e/float64_model.h"
#include "e2e/test_configs.h"
#include "model/deepseek_cuda.h"
#include "model/model_bench_cuda.h"

namespace fathom {
namespace {

constexpr int64_t kPages = 64, kTokens = kPages * kPageSize;

// A model with a cache of one sequence.
class OnGpu {
 public:
  OnGpu(const Checkpoint& checkpoint, CacheFormat format, bool by_operations)
      : row_{format, checkpoint.config().kv_lora_rank, checkpoint.config().qk_rope_dim},
        // Unwritten rows hold another sequence's data.
        cache_(cuda::random_cache(row_, kPages * checkpoint.config().num_layers)) {
    auto model = cuda::DeepSeekModel::load(checkpoint,
                                           {.max_rows = 16,
                                            .max_logit_rows = 16,
                                            .most_keys = cuda::MhaPrefillTile::kKeys,
                                            .batch_invariant = by_operations},
                                           {.show_progress = false});
    FATHOM_CHECK(model.has_value(), "{}", model.error().message);
    model_ = std::move(*model);
  }

  // Logits of one token at this position; the sequence's pages are in reverse order.
  std::vector<float> logits(int32_t id, int32_t position) {
    const ModelConfig& config = model_->config();
    ForwardBatch batch;
    batch.token_ids = {id};
    batch.query_start = {0, 1};
    batch.max_pages = static_cast<int32_t>(kPages);
    batch.logit_rows = {0};
    batch.positions = {position};
    batch.context_lens = {position};
    for (int32_t page = 0; page < kPages; ++page) {
      batch.block_tables.push_back(static_cast<int32_t>(kPages) - 1 - page);
    }
    cuda::StepPlanner planner(
        {.heads = config.num_heads,
         .num_multiprocessors = model_->num_multiprocessors(),
         .shape = {config.kv_lora_rank, config.qk_rope_dim, config.qk_nope_dim, config.v_dim},
         .policy = {.form = AttentionForm::kAbsorbed},
         .most_keys = cuda::MhaPrefillTile::kKeys});
    cuda::StepLayout layout;
    planner.plan(batch, 1, layout);
    const cuda::DeviceArray<std::byte> arrays(layout.memory);
    const cuda::DeviceArray<int32_t> sampled(std::vector<int32_t>{0});
    std::vector<float> logits(static_cast<size_t>(config.vocab_size));
    cuda::check(cudaMemset(model_->logits(), 0xFF, logits.size() * sizeof(float)), "poisoning");
    model_->forward(layout, arrays.data(), sampled.data(),
                    {row_.format, cache_.data(), kPages, kPages * row_.page_bytes()}, nullptr);
    cuda::check(cudaMemcpy(logits.data(), model_->logits(), logits.size() * sizeof(float),
                           cudaMemcpyDeviceToHost),
                "copying logits");
    return logits;
  }

  std::vector<std::byte> cache() const { return cache_.to_host(); }
  const LatentLayout& row() const { return row_; }

 private:
  const LatentLayout row_;
  const cuda::DeviceArray<std::byte> cache_;
  std::unique_ptr<cuda::DeepSeekModel> model_;
};

template <typename T>
double cosine(const std::vector<float>& a, const T* b) {
  double both = 0, one = 0, other = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    both += double{a[i]} * static_cast<double>(b[i]);
    one += double{a[i]} * a[i];
    other += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return both / std::sqrt(one * other);
}

struct Form {
  std::string model;
  CacheFormat format;
};

class GpuDecodeLayers : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    auto opened = open_test_config(GetParam().model);
    ASSERT_TRUE(opened.has_value()) << opened.error().message;
    checkpoint_ = std::move(*opened);
  }
  static int32_t id_of(int32_t i) { return (i * 7919 + 13) % 4000; }

  Checkpoint checkpoint_;
};

// The single launch does not quantize GEMV inputs, so it is nearer to float64 than the launches for
// each operation.
TEST_P(GpuDecodeLayers, AreNearFloat64) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 12; ++i) ids.push_back(id_of(i));
  const std::vector<double> expected = Float64Model(checkpoint_).logits(ids);
  OnGpu model(checkpoint_, GetParam().format, false),
      by_operations(checkpoint_, GetParam().format, true);
  std::vector<double> found, others;
  for (int32_t i = 0; i < 12; ++i) {
    const double* const at = expected.data() + i * checkpoint_.config().vocab_size;
    found.push_back(cosine(model.logits(id_of(i), i), at));
    others.push_back(cosine(by_operations.logits(id_of(i), i), at));
  }
  std::sort(found.begin(), found.end());
  std::sort(others.begin(), others.end());
  std::printf("cosine to float64 %.6f in the middle, %.6f at least; by operations %.6f, %.6f\n",
              found[6], found[0], others[6], others[0]);
  EXPECT_GE(found[6], others[6] - 0.02);
}

// A step writes the token's row in each layer, at its position's place in the block table, and no
// other byte. The rows and the logits at any length are tested with the operation itself
// (ops/decode_layers/decode_layers_cuda_test.cc): here a rounding difference makes random weights
// choose other experts, and no bound per token would hold.
TEST_P(GpuDecodeLayers, WriteTheTokensRowsAlone) {
  OnGpu model(checkpoint_, GetParam().format, false);
  const int64_t layers = checkpoint_.config().num_layers, row_bytes = model.row().row_bytes();
  std::vector<std::byte> before = model.cache();
  for (const int32_t position : {0, 1, 63, 64, 1023, 1024, 3001, 4095}) {
    for (const float logit : model.logits(id_of(position), position)) {
      ASSERT_TRUE(std::isfinite(logit)) << position;
    }
    const std::vector<std::byte> after = model.cache();
    std::vector<int64_t> expected, found;
    const int64_t row = (kPages - 1 - position / kPageSize) * kPageSize + position % kPageSize;
    for (int64_t layer = 0; layer < layers; ++layer) expected.push_back(layer * kTokens + row);
    for (int64_t at = 0; at < std::ssize(after); at += row_bytes) {
      const auto first = after.begin() + at;
      if (!std::equal(first, first + row_bytes, before.begin() + at)) {
        found.push_back(at / row_bytes);
      }
    }
    EXPECT_EQ(found, expected) << position;
    before = after;
  }
}

TEST_P(GpuDecodeLayers, GiveTheSameBitsAgain) {
  OnGpu model(checkpoint_, GetParam().format, false);
  const std::vector<float> first = model.logits(17, 1500);
  for (int i = 0; i < 20; ++i) {
    model.logits(id_of(i), 1501 + 100 * i);
    model.logits(id_of(i), 1500);
    EXPECT_EQ(model.logits(17, 1500), first) << i;
  }
}

// Short cases for sanitizers, which are slow.
class GpuDecodeLayersShort : public testing::TestWithParam<Form> {};

TEST_P(GpuDecodeLayersShort, OneToken) {
  auto checkpoint = open_test_config(GetParam().model);
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  OnGpu model(*checkpoint, GetParam().format, false);
  for (const float logit : model.logits(17, 200)) EXPECT_TRUE(std::isfinite(logit));
}

INSTANTIATE_TEST_SUITE_P(Models, GpuDecodeLayersShort,
                         testing::Values(Form{"v3_eighth_layers", CacheFormat::kFp8Scaled},
                                         Form{"v2_lite_layers", CacheFormat::kBF16},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kBF16}));

INSTANTIATE_TEST_SUITE_P(Formats, GpuDecodeLayers,
                         testing::Values(Form{"v3_eighth_layers", CacheFormat::kFp8Scaled},
                                         Form{"v3_eighth_layers", CacheFormat::kBF16},
                                         Form{"v3_eighth_layers", CacheFormat::kE4M3},
                                         Form{"v3_eighth_layers", CacheFormat::kE5M2},
                                         Form{"v2_lite_layers", CacheFormat::kBF16},
                                         Form{"v2_lite_layers", CacheFormat::kFp8Scaled},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kBF16},
                                         Form{"v2_lite_fp8_layers", CacheFormat::kE5M2}));

}  // namespace
}  // namespace fathom
