#include "engine/model_runner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/math.h"

namespace fathom {
namespace {

// How long a rank waits for another. One without columns of a layer waits as long as the others
// compute it; one that fails ends the wait at once.
constexpr auto kRankLimit = std::chrono::minutes(5);

// Where the experts are at first; null where tokens are not exchanged.
Result<std::shared_ptr<const ExpertTable>> first_table(const ModelRunnerOptions& options,
                                                       const ModelConfig& config) {
  const Placement& placement = options.placement;
  if (!placement.exchanges_tokens()) return nullptr;
  if (options.expert_table != nullptr) {
    FATHOM_RETURN_IF_ERROR(check_expert_table(*options.expert_table, config, placement, false));
    return options.expert_table;
  }
  return std::make_shared<const ExpertTable>(ExpertTable::contiguous(config, placement));
}

// The options of the runner's ranks. Errors are those of options that do not fit the model.
Result<RankTeamOptions> team_options(const ModelConfig& config, const ModelRunnerOptions& options) {
  if (options.max_model_len > config.max_position) {
    return invalid("--max-model-len is {}, the model's positions end at {}", options.max_model_len,
                   config.max_position);
  }
  const Placement& placement = options.placement;
  FATHOM_RETURN_IF_ERROR(check_placement(placement, config));
  FATHOM_CHECK(
      options.max_drafts == 0 || (options.max_drafts <= kMaxDrafts && config.num_mtp_layers > 0),
      "{} drafts", options.max_drafts);
  FATHOM_TRY(const std::shared_ptr<const ExpertTable> expert_table, first_table(options, config));
  return RankTeamOptions{
      .placement = placement,
      .model = {.compute = options.compute,
                .max_rows = options.max_batched_tokens,
                .attention = options.attention},
      .cache_format = options.cache_format,
      .num_pages = ceil_div(options.max_total_tokens, kPageSize),
      .num_threads = options.num_threads,
      .mtp_layers = num_drafting_layers(config, options.max_drafts),
      .load = options.load,
      .group = {.name = "tp", .limit = kRankLimit, .at_meeting = options.at_meeting},
      .world = options.world,
      .expert_table = expert_table};
}

}  // namespace

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(const Checkpoint& checkpoint,
                                                         const ModelRunnerOptions& options) {
  FATHOM_TRY(auto runners, create_several(checkpoint, {&options, 1}));
  return std::move(runners.front());
}

Result<std::vector<std::unique_ptr<ModelRunner>>> ModelRunner::create_several(
    const Checkpoint& checkpoint, std::span<const ModelRunnerOptions> options) {
  std::vector<RankTeamOptions> of_teams;
  for (const ModelRunnerOptions& one : options) {
    FATHOM_TRY(of_teams.emplace_back(), team_options(checkpoint.config(), one));
  }
  FATHOM_TRY(auto teams, RankTeam::load_several(checkpoint, of_teams));
  std::vector<std::unique_ptr<ModelRunner>> runners;
  for (size_t i = 0; i < options.size(); ++i) {
    std::unique_ptr<ModelRunner> runner(new ModelRunner);
    runner->take_team(std::move(teams[i]), options[i]);
    runners.push_back(std::move(runner));
  }
  return runners;
}

void ModelRunner::take_team(std::unique_ptr<RankTeam> team, const ModelRunnerOptions& options) {
  team_ = std::move(team);
  const int64_t cache_tokens = round_up(options.max_total_tokens, kPageSize);
  max_model_len_ =
      std::min(options.max_model_len > 0 ? options.max_model_len : team_->config().max_position,
               cache_tokens);
  num_pages_ = cache_tokens / kPageSize;
  max_drafts_ = options.max_drafts;
  const Placement& placement = options.placement;
  if (team_->size() < placement.world()) return;
  if (exchanges_tokens()) {
    balancer_ = std::make_unique<ExpertBalancer>(team_->expert_table(), placement.redundant_experts,
                                                 options.balancer);
  }
  for (int lane = 0; lane < placement.dp; ++lane) {
    std::vector<const LatentCache*> caches;
    caches.reserve(static_cast<size_t>(placement.tp));
    for (int rank = 0; rank < placement.tp; ++rank) {
      caches.push_back(&team_->cache(placement.rank_of(lane, rank)));
    }
    page_transfers_.emplace_back(std::move(caches));
  }
}

bool ModelRunner::can_copy_pages(int from_lane, int to_lane) const {
  const Placement& placement = team_->placement();
  for (int rank = 0; rank < placement.tp; ++rank) {
    if (team_->has_rank(placement.rank_of(from_lane, rank)) !=
        team_->has_rank(placement.rank_of(to_lane, rank))) {
      return false;
    }
  }
  return true;
}

void ModelRunner::copy_page(int from_lane, int32_t from, int to_lane, int32_t to) {
  const Placement& placement = team_->placement();
  for (int rank = 0; rank < placement.tp; ++rank) {
    if (!team_->has_rank(placement.rank_of(from_lane, rank))) continue;
    const LatentCache& source = team_->cache(placement.rank_of(from_lane, rank));
    const auto bytes = static_cast<size_t>(source.page_bytes());
    std::memcpy(team_->cache(placement.rank_of(to_lane, rank)).page(to), source.page(from), bytes);
  }
}

Result<TensorView> ModelRunner::make_logits(std::span<const ForwardBatch> lanes) {
  int64_t rows = 0;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    if (team_->has_rank(team_->placement().rank_of(static_cast<int>(lane), 0))) {
      rows += std::ssize(lanes[lane].logit_rows);
    }
  }
  const int64_t bytes = rows * vocab_size() * static_cast<int64_t>(sizeof(float));
  if (logits_.size() < bytes) {
    FATHOM_TRY(logits_, Buffer::allocate(bytes, "logits"));
  }
  found_.assign(team_->placement().tp > 1 ? static_cast<size_t>(rows) : 0, kFromLogits);
  return logits_.view(DType::kF32, {rows, vocab_size()});
}

Result<ConstTensorView> ModelRunner::draft_logits(std::span<const ForwardBatch> lanes,
                                                  std::span<const std::vector<int32_t>> states) {
  FATHOM_TRY(const TensorView logits, make_logits(lanes));
  FATHOM_RETURN_IF_ERROR(team_->draft(lanes, states, logits, found_));
  return ConstTensorView(logits);
}

Result<ConstTensorView> ModelRunner::forward(std::span<const ForwardBatch> lanes) {
  FATHOM_TRY(const TensorView logits, make_logits(lanes));
  FATHOM_RETURN_IF_ERROR(team_->forward(lanes, logits, found_));
  if (balancer_ != nullptr) {
    balancer_->count(expert_counts());
    if (auto table = balancer_->end_step()) {
      FATHOM_RETURN_IF_ERROR(team_->place_experts(std::move(table)));
    }
  }
  return ConstTensorView(logits);
}

std::span<const int32_t> ModelRunner::expert_counts() {
  const std::span<const int32_t> first = team_->expert_counts(0);
  expert_counts_.assign(first.begin(), first.end());
  for (int rank = 1; rank < team_->size(); ++rank) {
    const std::span<const int32_t> counts = team_->expert_counts(rank);
    for (size_t i = 0; i < counts.size(); ++i) expert_counts_[i] += counts[i];
  }
  return expert_counts_;
}

Result<> ModelRunner::place_experts(std::shared_ptr<const ExpertTable> table) {
  FATHOM_RETURN_IF_ERROR(check_expert_table(*table, team_->config(), team_->placement(), false));
  return team_->place_experts(std::move(table));
}

std::optional<ExpertStats> ModelRunner::expert_stats() const {
  if (balancer_ == nullptr) return std::nullopt;
  return balancer_->stats();
}

}  // namespace fathom
