#include "engine/model_runner.h"

#include <algorithm>

#include "base/math.h"

namespace fathom {

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(const Checkpoint& checkpoint,
                                                         const ModelRunnerOptions& options) {
  const ModelConfig& config = checkpoint.config();
  if (options.max_model_len > config.max_position) {
    return invalid("--max-model-len is {}, the model's positions end at {}", options.max_model_len,
                   config.max_position);
  }
  std::unique_ptr<ModelRunner> runner(new ModelRunner(options.num_threads));
  const int64_t cache_tokens = round_up(options.max_total_tokens, kPageSize);
  runner->max_model_len_ = std::min(
      options.max_model_len > 0 ? options.max_model_len : config.max_position, cache_tokens);
  ModelOptions model_options;
  model_options.compute = options.compute;
  model_options.max_rows = options.max_batched_tokens;
  model_options.attention = options.attention;
  FATHOM_TRY(runner->model_,
             DeepSeekModel::load(checkpoint, model_options, options.load, runner->stream_));
  FATHOM_TRY(runner->cache_,
             LatentCache::allocate({options.cache_format, config.kv_lora_rank, config.qk_rope_dim},
                                   config.num_layers, cache_tokens / kPageSize));
  return runner;
}

Result<ConstTensorView> ModelRunner::forward(const ForwardBatch& batch) {
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  const int64_t bytes = rows * vocab_size() * static_cast<int64_t>(sizeof(float));
  if (logits_.size() < bytes) {
    FATHOM_TRY(logits_, Buffer::allocate(bytes, "logits"));
  }
  const TensorView logits = logits_.view(DType::kF32, {rows, vocab_size()});
  model_->forward(batch, cache_, logits);
  return ConstTensorView(logits);
}

}  // namespace fathom
