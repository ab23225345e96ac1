// The model on this machine's CPU, as the engine drives it: weights, workspace and cache pages.
#pragma once

#include <memory>

#include "cache/latent_layout.h"
#include "device/stream.h"
#include "engine/logits_runner.h"
#include "model/deepseek.h"
#include "model/token_work.h"

namespace fathom {

struct ModelRunnerOptions {
  DType compute = DType::kBF16;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t max_model_len = 0;  // 0: the model's own
  int64_t max_batched_tokens = 2048;
  int64_t max_total_tokens = 65536;  // capacity of the cache in tokens
  int num_threads = 0;               // 0: one per core
  AttentionPolicy attention = cpu_attention_policy();
  LoadOptions load;
};

class ModelRunner : public LogitsRunner {
 public:
  static Result<std::unique_ptr<ModelRunner>> create(const Checkpoint& checkpoint,
                                                     const ModelRunnerOptions& options);

  int64_t vocab_size() const override { return model_->config().vocab_size; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t num_pages() const override { return cache_.num_pages(); }
  int64_t keys_worth_a_row() const override {
    return fathom::keys_worth_a_row(model_->config(), absorbed_key_macs(model_->config()));
  }
  Result<ConstTensorView> forward(const ForwardBatch& batch) override;
  PageTransfer* page_transfer() override { return &page_transfer_; }
  const Stream* host_stream() const override { return &stream_; }

  const DeepSeekModel& model() const { return *model_; }
  const LatentCache& cache() const { return cache_; }

 private:
  explicit ModelRunner(int num_threads) : pool_(num_threads), stream_(pool_) {}

  ThreadPool pool_;
  Stream stream_;
  std::unique_ptr<DeepSeekModel> model_;
  LatentCache cache_;
  LatentPageTransfer page_transfer_{cache_};
  int64_t max_model_len_ = 0;
  Buffer logits_;  // grows to the largest number of logit rows
};

}  // namespace fathom
