// The ranks of one lane in this process: a model's part, a cache and CPU threads for each.
//
// The calling thread is the first rank's, always the same one; the others have threads of their
// own, which sleep between two steps. A team of one rank is a model alone, without any of this.
// Every rank has the whole cache: pages have the same numbers and contents everywhere.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "cache/latent_layout.h"
#include "comm/abort_word.h"
#include "comm/group.h"
#include "model/deepseek.h"

namespace fathom {

struct RankTeamOptions {
  Placement placement;  // dp 1; has passed check_placement()
  ModelOptions model;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t num_pages = 0;
  int num_threads = 0;  // of all ranks together, at least one each; 0: one a core
  LoadOptions load;
  GroupOptions group;  // of the lane
};

class RankTeam {
 public:
  static Result<std::unique_ptr<RankTeam>> load(const Checkpoint& checkpoint,
                                                const RankTeamOptions& options);
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  const ModelConfig& config() const { return ranks_.front().model->config(); }
  const LatentCache& cache(int rank) const { return ranks_[static_cast<size_t>(rank)].cache; }
  // The first rank's threads, for the calling thread between two steps.
  const Stream& stream() const { return ranks_.front().stream; }

  // DeepSeekModel::forward() on all ranks. An error means that a rank failed: it names the rank,
  // and all later calls fail too.
  Result<> forward(const ForwardBatch& batch, TensorView logits);
  bool has_failed() const { return abort_word_.aborted(); }

 private:
  struct Rank {
    explicit Rank(int num_threads) : pool(num_threads), stream(pool) {}
    ThreadPool pool;
    Stream stream;
    std::unique_ptr<Group> lane;
    std::unique_ptr<DeepSeekModel> model;
    LatentCache cache;
    std::thread thread;  // none for the first
  };
  // A step for the ranks that wait for it.
  struct Work {
    const ForwardBatch* batch = nullptr;
    TensorView logits;
  };

  RankTeam() = default;
  void serve(int rank);
  void run(int rank);
  uint64_t wait_for_work(uint64_t seen) const;

  AbortWord abort_word_;
  std::deque<Rank> ranks_;
  bool spins_ = false;  // each thread has a CPU
  Work work_;
  alignas(64) std::atomic<uint64_t> step_{0};  // its number; kStop: there is none any more
  alignas(64) std::atomic<int> running_{0};    // ranks with a thread of their own, in the step
};

}  // namespace fathom
