#include "engine/model_runner.h"

#include <algorithm>
#include <chrono>

#include "base/math.h"

namespace fathom {
namespace {

// How long a rank waits for another. One without columns of a layer waits as long as the others
// compute it; one that fails ends the wait at once.
constexpr auto kRankLimit = std::chrono::minutes(5);

}  // namespace

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(const Checkpoint& checkpoint,
                                                         const ModelRunnerOptions& options) {
  const ModelConfig& config = checkpoint.config();
  if (options.max_model_len > config.max_position) {
    return invalid("--max-model-len is {}, the model's positions end at {}", options.max_model_len,
                   config.max_position);
  }
  const Placement placement{.tp = options.tp};
  FATHOM_RETURN_IF_ERROR(check_placement(placement, config));
  std::unique_ptr<ModelRunner> runner(new ModelRunner);
  const int64_t cache_tokens = round_up(options.max_total_tokens, kPageSize);
  runner->max_model_len_ = std::min(
      options.max_model_len > 0 ? options.max_model_len : config.max_position, cache_tokens);
  FATHOM_TRY(runner->team_,
             RankTeam::load(checkpoint, {.placement = placement,
                                         .model = {.compute = options.compute,
                                                   .max_rows = options.max_batched_tokens,
                                                   .attention = options.attention},
                                         .cache_format = options.cache_format,
                                         .num_pages = cache_tokens / kPageSize,
                                         .num_threads = options.num_threads,
                                         .load = options.load,
                                         .group = {.name = "tp", .limit = kRankLimit}}));
  std::vector<const LatentCache*> caches;
  caches.reserve(static_cast<size_t>(options.tp));
  for (int rank = 0; rank < options.tp; ++rank) caches.push_back(&runner->team_->cache(rank));
  runner->page_transfer_.emplace(std::move(caches));
  return runner;
}

Result<ConstTensorView> ModelRunner::forward(const ForwardBatch& batch) {
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  const int64_t bytes = rows * vocab_size() * static_cast<int64_t>(sizeof(float));
  if (logits_.size() < bytes) {
    FATHOM_TRY(logits_, Buffer::allocate(bytes, "logits"));
  }
  const TensorView logits = logits_.view(DType::kF32, {rows, vocab_size()});
  FATHOM_RETURN_IF_ERROR(team_->forward(batch, logits));
  return ConstTensorView(logits);
}

}  // namespace fathom
