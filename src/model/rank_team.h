// The ranks of all lanes that are in this process: a model's part, a cache and CPU threads for
// each. They meet those of other processes through a World.
//
// The calling thread is the first rank's, always the same one; the others have threads of their
// own, which sleep between two steps. A team of one rank is a model alone, without any of this.
// Every rank of a lane has the lane's whole cache: pages have the same numbers and contents there.
// Weights that ranks hold alike, those of all lanes, are in memory once.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cache/latent_layout.h"
#include "comm/abort_word.h"
#include "comm/group.h"
#include "comm/world.h"
#include "model/deepseek.h"

namespace fathom {

struct RankTeamOptions {
  Placement placement;  // has passed check_placement()
  ModelOptions model;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t num_pages = 0;
  int num_threads = 0;     // of all ranks together, at least one each; 0: one a core
  int64_t mtp_layers = 0;  // make_spec()'s
  LoadOptions load;
  // Each lane's; their names get the lane's number. The group of all ranks is "world" and has the
  // rest of it.
  GroupOptions group;
  // The team has the ranks of its node, and ends before it; null: all ranks.
  World* world = nullptr;
  // Where the experts are, if placement.exchanges_tokens(); has passed check_expert_table().
  std::shared_ptr<const ExpertTable> expert_table = nullptr;
};

class RankTeam {
 public:
  static Result<std::unique_ptr<RankTeam>> load(const Checkpoint& checkpoint,
                                                const RankTeamOptions& options);
  // Several teams of one process that step apart, of the same model in the same types: what their
  // ranks hold alike is in memory once, too.
  static Result<std::vector<std::unique_ptr<RankTeam>>> load_several(
      const Checkpoint& checkpoint, std::span<const RankTeamOptions> options);
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  const Placement& placement() const { return placement_; }
  int size() const { return static_cast<int>(ranks_.size()); }  // ranks in this process
  // Whether a rank, in the world's numbers, is in this process.
  bool has_rank(int rank) const { return rank >= first_rank_ && rank < first_rank_ + size(); }
  const ModelConfig& config() const { return ranks_.front().model->config(); }
  // Cache of `rank`, a world rank in this process.
  const LatentCache& cache(int rank) const {
    return ranks_[static_cast<size_t>(rank - first_rank_)].cache;
  }
  // The first rank's threads, for the calling thread between two steps.
  const Stream& stream() const { return ranks_.front().stream; }

  // DeepSeekModel::forward() on all ranks: placement().dp batches, one a lane, some of which may
  // have no rows. `logits` [logit rows of all lanes whose first rank is in this process, in order,
  // vocab]. With tp > 1, the tokens of largest_only rows go to `tokens` [the same rows], whose
  // other entries stay, and these rows' logits are not written; without such rows it may be empty.
  // An error means that a rank failed: it names the rank and where a rank of this process waited
  // for it, and all later calls fail too.
  Result<> forward(std::span<const ForwardBatch> lanes, TensorView logits,
                   std::span<int32_t> tokens = {});
  // DeepSeekModel::draft() on all ranks: batches and `states` by lane, the rest as forward().
  Result<> draft(std::span<const ForwardBatch> lanes, std::span<const std::vector<int32_t>> states,
                 TensorView logits, std::span<int32_t> tokens = {});
  bool has_failed() const { return abort_word_->aborted(); }

  // Where tokens are exchanged, between two steps, on the calling thread:
  // From the next step on, experts are where `table` says, which has passed check_expert_table().
  // A rank shares the weights of its new experts with a rank of this process that has them; those
  // that only other processes have are read from the checkpoint, and an error means that they could
  // not be and that nothing has changed. No logits change.
  Result<> place_experts(std::shared_ptr<const ExpertTable> table);
  const std::shared_ptr<const ExpertTable>& expert_table() const { return expert_table_; }
  // Tokens that the i-th rank of this process routed to each expert in the last step: [the table's
  // layers, experts].
  std::span<const int32_t> expert_counts(int i) const {
    return ranks_[static_cast<size_t>(i)].model->expert_counts();
  }

 private:
  struct Rank {
    explicit Rank(int num_threads) : pool(num_threads), stream(pool) {}
    int lane_number = 0, tp_rank = 0;
    ThreadPool pool;
    Stream stream;
    std::unique_ptr<Group> lane, world;
    std::unique_ptr<DeepSeekModel> model;
    LatentCache cache;
    std::thread thread;  // none for the first
  };
  // A step for the ranks that wait for it.
  struct Work {
    std::span<const ForwardBatch> lanes;
    TensorView logits;
    std::span<int32_t> tokens;
    std::span<const std::vector<int32_t>> states = {};  // of a draft, by lane; empty: a step
  };

  // Where experts' weights are read from again, in one of several processes.
  struct ExpertSource {
    Checkpoint checkpoint;
    DType compute = DType::kBF16;
    LoadOptions load;
  };

  RankTeam() = default;
  static Result<std::unique_ptr<RankTeam>> create(const Checkpoint& checkpoint,
                                                  const RankTeamOptions& options,
                                                  std::span<const ModelSpec> specs,
                                                  std::span<ModelWeights> weights);
  using LayerSlots = std::vector<std::vector<MlpWeights>>;  // [ranks here][slots]
  Result<LayerSlots> slots_of_layer(const ExpertTable& table, std::span<const ModelSpec> specs,
                                    int64_t moe_layer) const;
  // `index`: of ranks_.
  Result<> do_work(const Work& work);
  void serve(size_t index);
  void run(size_t index);
  void compute(Rank& rank);
  void wait_for_ranks() const;
  uint64_t wait_for_work(uint64_t seen) const;
  void note_failure(const Status& why);
  Status failure();

  Placement placement_;
  AbortWord own_word_;
  AbortWord* abort_word_ = &own_word_;  // or the world's
  int first_rank_ = 0;                  // of this process, in the world's numbers
  std::deque<Rank> ranks_;
  std::mutex failure_mutex_;
  std::optional<Status> failure_;  // of the first rank here that waited for one that failed
  bool spins_ = false;             // each thread has a CPU
  std::shared_ptr<const ExpertTable> expert_table_;
  std::optional<ExpertSource> expert_source_;
  Work work_;
  alignas(64) std::atomic<uint64_t> step_{0};  // its number; kStop: there is none any more
  alignas(64) std::atomic<int> running_{0};    // ranks with a thread of their own, in the step
};

}  // namespace fathom
