// Compares two implementations of one definition: float64_model.h and the CPU's float32.
#include "e2e/float64_model.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "base/math.h"
#include "device/cpu/thread_pool.h"
#include "model/deepseek.h"

namespace fathom {
namespace {

// Folders with a config.json: V3's form and V2-Lite's.
class Float64ModelTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Float64ModelTest,
                         testing::Values("models/fathom-tiny", "tests/goldens/v2lite"));

TEST_P(Float64ModelTest, IsTheCpusInFloat32) {
  const auto checkpoint =
      Checkpoint::open_dummy(std::string(FATHOM_SOURCE_DIR "/") + GetParam(), int64_t{2});
  ASSERT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
  const ModelConfig& config = checkpoint->config();
  constexpr int32_t kTokens = 70;
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < kTokens; ++i)
    ids.push_back((i * 7919 + 13) % static_cast<int32_t>(config.vocab_size));
  const std::vector<double> expected = Float64Model(*checkpoint).logits(ids);

  ThreadPool pool(2);
  const Stream stream(pool);
  const auto model = DeepSeekModel::load(*checkpoint, {.compute = DType::kF32, .attention = {}},
                                         {.show_progress = false}, stream);
  ASSERT_TRUE(model.has_value()) << model.error().message;
  ForwardBatch batch;
  batch.token_ids = ids;
  batch.positions.resize(ids.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.logit_rows = batch.positions;
  batch.query_start = {0, kTokens};
  batch.context_lens = {0};
  batch.max_pages = 2;
  batch.block_tables = {1, 0};
  auto cache = LatentCache::allocate({CacheFormat::kF32, config.kv_lora_rank, config.qk_rope_dim},
                                     config.num_layers, 2);
  ASSERT_TRUE(cache.has_value());
  std::vector<float> logits(expected.size());
  (*model)->forward(batch, *cache, TensorView(logits.data(), {kTokens, config.vocab_size}));
  double difference = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (logits[i] - expected[i]) * (logits[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  EXPECT_LT(std::sqrt(difference / size), 1e-5);
}

}  // namespace
}  // namespace fathom
