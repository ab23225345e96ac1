// One token through the layers of experts in one launch: four layers of DeepSeek-V3 as one of eight
// GPUs has them (hidden 7168, 16 heads, 128 experts of 256 columns), with random FP8 weights,
// against float64 and against the launches for each operation. Run from the repository's root.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cache/latent_layout.h"
#include "device/cuda/device_array.h"
#include "e2e/float64_model.h"
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
        // Rows of another sequence in what nobody has written.
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

  // Of one token at this position; the pages of the sequence lie from the last to the first.
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

class GpuDecodeLayers : public testing::TestWithParam<CacheFormat> {
 protected:
  void SetUp() override {
    auto opened = Checkpoint::open_dummy("tests/data/configs/v3_eighth_layers");
    ASSERT_TRUE(opened.has_value()) << opened.error().message;
    checkpoint_ = std::move(*opened);
  }
  static int32_t id_of(int32_t i) { return (i * 7919 + 13) % 4000; }

  Checkpoint checkpoint_;
};

// Products quantise nothing, so that it is nearer to float64 than the launches for each operation.
TEST_P(GpuDecodeLayers, AreNearFloat64) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 12; ++i) ids.push_back(id_of(i));
  const std::vector<double> expected = Float64Model(checkpoint_).logits(ids);
  OnGpu model(checkpoint_, GetParam(), false), by_operations(checkpoint_, GetParam(), true);
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

// Lengths around those at which a block, a warp or a page has one key more. Random weights choose
// other experts for a rounding; of sixteen tokens it is enough that one has the same everywhere.
TEST_P(GpuDecodeLayers, EqualTheOperationsAtAnyLength) {
  OnGpu model(checkpoint_, GetParam(), false), by_operations(checkpoint_, GetParam(), true);
  for (const int32_t position :
       {0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 1023, 1024, 1025, 2047, 3001, 4095}) {
    std::vector<double> found;
    for (int32_t i = 0; i < 16; ++i) {
      const std::vector<float> expected = by_operations.logits(id_of(i), position);
      found.push_back(cosine(model.logits(id_of(i), position), expected.data()));
    }
    const double likeness = *std::max_element(found.begin(), found.end());
    std::printf("%5d: %.6f\n", position, likeness);
    EXPECT_GE(likeness, 0.985) << position;
  }
  // A row of the cache and nothing else has been written, the first layer of experts' the same.
  const std::vector<std::byte> found = model.cache(), expected = by_operations.cache();
  size_t differing_rows = 0;
  const auto bytes = static_cast<size_t>(model.row().row_bytes());
  for (size_t at = 0; at < found.size(); at += bytes) {
    differing_rows += !std::equal(found.begin() + static_cast<std::ptrdiff_t>(at),
                                  found.begin() + static_cast<std::ptrdiff_t>(at + bytes),
                                  expected.begin() + static_cast<std::ptrdiff_t>(at));
  }
  EXPECT_LE(differing_rows, 16 * 3);  // positions, layers of experts
}

TEST_P(GpuDecodeLayers, GiveTheSameBitsAgain) {
  OnGpu model(checkpoint_, GetParam(), false);
  const std::vector<float> first = model.logits(17, 1500);
  for (int i = 0; i < 20; ++i) {
    model.logits(id_of(i), 1501 + 100 * i);
    model.logits(id_of(i), 1500);
    EXPECT_EQ(model.logits(17, 1500), first) << i;
  }
}

// For tools that make it slow.
TEST(GpuDecodeLayersShort, OneToken) {
  auto checkpoint = Checkpoint::open_dummy("tests/data/configs/v3_eighth_layers");
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  OnGpu model(*checkpoint, CacheFormat::kFp8Scaled, false);
  for (const float logit : model.logits(17, 200)) EXPECT_TRUE(std::isfinite(logit));
}

INSTANTIATE_TEST_SUITE_P(Formats, GpuDecodeLayers,
                         testing::Values(CacheFormat::kFp8Scaled, CacheFormat::kBF16,
                                         CacheFormat::kE4M3, CacheFormat::kE5M2));

}  // namespace
}  // namespace fathom
