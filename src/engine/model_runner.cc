#include "engine/model_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>

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
  const Placement& placement = options.placement;
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
  for (int lane = 0; lane < placement.dp; ++lane) {
    std::vector<const LatentCache*> caches;
    for (int rank = 0; rank < placement.tp; ++rank) {
      caches.push_back(&runner->team_->cache(placement.rank_of(lane, rank)));
    }
    runner->page_transfers_.emplace_back(std::move(caches));
  }
  return runner;
}

void ModelRunner::copy_page(int from_lane, int32_t from, int to_lane, int32_t to) {
  const Placement& placement = team_->placement();
  const LatentCache& source = team_->cache(placement.rank_of(from_lane, 0));
  const auto bytes = static_cast<size_t>(source.num_layers() * source.layout().page_bytes());
  for (int rank = 0; rank < placement.tp; ++rank) {
    std::memcpy(team_->cache(placement.rank_of(to_lane, rank)).page(to), source.page(from), bytes);
  }
}

Result<ConstTensorView> ModelRunner::forward(std::span<const ForwardBatch> lanes) {
  int64_t rows = 0;
  for (const ForwardBatch& batch : lanes) rows += std::ssize(batch.logit_rows);
  const int64_t bytes = rows * vocab_size() * static_cast<int64_t>(sizeof(float));
  if (logits_.size() < bytes) {
    FATHOM_TRY(logits_, Buffer::allocate(bytes, "logits"));
  }
  const TensorView logits = logits_.view(DType::kF32, {rows, vocab_size()});
  FATHOM_RETURN_IF_ERROR(team_->forward(lanes, logits));
  return ConstTensorView(logits);
}

}  // namespace fathom
