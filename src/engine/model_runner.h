// The model on this machine's CPU, as the engine drives it: one rank, or the ranks of all lanes as
// threads (model/rank_team.h). One of several processes has a part of the ranks: it computes the
// lanes that it has ranks of, and samples those whose first rank it has.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/latent_layout.h"
#include "engine/logits_runner.h"
#include "model/rank_team.h"
#include "model/token_work.h"
#include "placement/expert_balancer.h"

namespace fathom {

struct ModelRunnerOptions {
  DType compute = DType::kBF16;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t max_model_len = 0;  // 0: the model's own
  int64_t max_batched_tokens = 2048;
  int64_t max_total_tokens = 65536;  // capacity in tokens of each lane's cache
  Placement placement;               // each rank of a lane holds all of the lane's cache
  int num_threads = 0;               // of all ranks together; 0: one per core
  AttentionPolicy attention = cpu_attention_policy();
  LoadOptions load;
  // Drafts of a sequence in a step, 0 to kMaxDrafts. With some, the MTP layer is loaded.
  int64_t max_drafts = 0;
  // The runner has the ranks of its node, and ends before it; null: all ranks.
  World* world = nullptr;
  MeetingHook at_meeting = {};  // for tests
  // With placement.expert_parallel: where the experts are at first (null: consecutive ones by
  // rank), and whether they move. One of several processes does not move them by itself.
  std::shared_ptr<const ExpertTable> expert_table;
  ExpertBalancerOptions balancer;
};

class ModelRunner : public LogitsRunner, public ExpertRanks {
 public:
  static Result<std::unique_ptr<ModelRunner>> create(const Checkpoint& checkpoint,
                                                     const ModelRunnerOptions& options);
  // Runners that step apart, of the same model in the same types: weights that ranks hold alike are
  // in memory once.
  static Result<std::vector<std::unique_ptr<ModelRunner>>> create_several(
      const Checkpoint& checkpoint, std::span<const ModelRunnerOptions> options);

  int64_t vocab_size() const override { return team_->config().vocab_size; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t num_pages() const override { return num_pages_; }
  int num_lanes() const override { return team_->placement().dp; }
  int64_t keys_worth_a_row() const override {
    return fathom::keys_worth_a_row(team_->config(), absorbed_key_macs(team_->config()));
  }
  Result<ConstTensorView> forward(std::span<const ForwardBatch> lanes) override;
  int64_t max_drafts() const override { return max_drafts_; }
  Result<ConstTensorView> draft_logits(std::span<const ForwardBatch> lanes,
                                       std::span<const std::vector<int32_t>> states) override;
  std::span<const int32_t> found_tokens() const override { return found_; }
  // Null if some ranks are in other processes.
  PageTransfer* page_transfer(int lane) override {
    return page_transfers_.empty() ? nullptr : &page_transfers_[static_cast<size_t>(lane)];
  }
  // Whether each rank of one lane that is here has its counterpart of the other here.
  bool can_copy_pages(int from_lane, int to_lane) const override;
  void copy_page(int from_lane, int32_t from, int to_lane, int32_t to) override;
  const Stream* host_stream() const override { return &team_->stream(); }
  // A rank that has failed does not come back.
  bool is_lost() override { return team_->has_failed(); }
  std::optional<ExpertStats> expert_stats() const override;

  ExpertRanks* expert_ranks() override { return exchanges_tokens() ? this : nullptr; }
  const std::shared_ptr<const ExpertTable>& expert_table() const override {
    return team_->expert_table();
  }
  std::span<const int32_t> expert_counts() override;
  Result<> place_experts(std::shared_ptr<const ExpertTable> table) override;

 private:
  ModelRunner() = default;
  void take_team(std::unique_ptr<RankTeam> team, const ModelRunnerOptions& options);

  bool exchanges_tokens() const { return team_->placement().exchanges_tokens(); }

  std::unique_ptr<RankTeam> team_;
  std::unique_ptr<ExpertBalancer> balancer_;  // null where tokens are not exchanged, or elsewhere
  std::vector<int32_t> expert_counts_;        // of all ranks here
  std::vector<LatentPageTransfer> page_transfers_;  // [lanes]
  // Makes room for the logits of the lanes' rows whose first rank is here.
  Result<TensorView> make_logits(std::span<const ForwardBatch> lanes);

  int64_t max_model_len_ = 0, num_pages_ = 0, max_drafts_ = 0;
  Buffer logits_;               // grows to the largest number of logit rows
  std::vector<int32_t> found_;  // of the last step; empty unless ranks divide the vocabulary
};

}  // namespace fathom
