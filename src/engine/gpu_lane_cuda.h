// A lane of ranks on GPUs: they compute the same steps, each with the whole cache, and the first
// one samples.
//
// With expert parallelism the ranks of all lanes meet in each step, in which a lane may have no
// rows; the runner owns the group that they meet in.
//
// A step begins in two halves: begin_step() on the engine's thread, then begin_rank() on each
// rank's thread. Device failures are thrown.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/cuda/event.h"
#include "device/cuda/peer_group.h"
#include "engine/gpu_page_transfer_cuda.h"
#include "engine/gpu_rank_cuda.h"
#include "engine/gpu_sampler_cuda.h"

namespace fathom {

// How long a rank waits for another one.
std::chrono::nanoseconds peer_limit(const GpuRunnerOptions& options);

class GpuLane {
 public:
  // devices: of its ranks, in order.
  GpuLane(const ModelConfig& config, const GpuRunnerOptions& options, std::span<const int> devices);

  // models: of its ranks, in order; their plans have refused what a lane can't have.
  // `world`: the group of all lanes' ranks, which outlives the lane; null without expert
  // parallelism.
  Result<> prepare(std::span<std::unique_ptr<cuda::DeepSeekModel>> models, cuda::PeerGroup* world,
                   bool graphs);

  int size() const { return static_cast<int>(ranks_.size()); }
  GpuRank& rank(int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  PageTransfer* page_transfer() { return &*page_transfer_; }

  // Sets what begin_rank() will do; the batch stays valid until then. `first_row`: the first sample
  // row's number among those of all lanes. `all`: the step's rows over all lanes. The batch may
  // have no rows with expert parallelism.
  void begin_step(const ForwardBatch& batch, std::span<const SampleRow> rows, int64_t first_row,
                  const cuda::WorldRows& all);
  // The same for a draft step, which ends as any other. `states`: see StepPlanner::plan_draft();
  // valid until begin_rank().
  void begin_draft(const ForwardBatch& batch, std::span<const int32_t> states,
                   std::span<const SampleRow> rows, int64_t first_row, const cuda::WorldRows& all);
  // Enqueues a rank's part of the step, on its thread.
  void begin_rank(int rank);
  // The event after a rank's newest step; null before the first.
  cudaEvent_t ended(int rank) const { return newest_[static_cast<size_t>(rank)]; }
  // The kernels of the step that began last whose CTAs wait for one another.
  const std::string& waiting_kernels() const { return kernels_; }
  // The step that begin_step() was about has begun.
  void count_step() {
    ++begun_;
    newest_first_row_ = first_row_;
  }

  // Waits for the oldest step and appends its tokens to `tokens` from `at` on, which grows where it
  // has to; returns how many. Throws where a rank failed or was not there.
  size_t finish_step(std::vector<SampledToken>& tokens, size_t at);

  // Ends all waits of its ranks for one another, and for other lanes'. Any thread.
  void stop();
  // Whether ranks may have parted: no step can succeed any more.
  bool stopped() const {
    return (peers_ && peers_->stopped()) || (world_ != nullptr && world_->stopped());
  }
  // Why: the rank that was waited for too long; empty if none was.
  std::string late_rank() const;
  // Waits for what was enqueued. The first error, or cudaSuccess.
  cudaError_t synchronize();

 private:
  int slot(int64_t step) const { return static_cast<int>(step % kGpuStepsInFlight); }
  void end_rank(int rank, int slot);
  void wait(int64_t step);
  std::string name_of(int rank) const;

  const int64_t hidden_;
  const std::chrono::nanoseconds peer_limit_;
  cuda::PeerGroup* world_ = nullptr;
  std::vector<std::unique_ptr<GpuRank>> ranks_;
  std::optional<cuda::PeerGroup> peers_;  // with several ranks, once prepared
  GpuSampler sampler_;
  std::optional<GpuPageTransfer> page_transfer_;

  // The step that is about to begin.
  const ForwardBatch* batch_ = nullptr;
  ForwardBatch renumbered_;  // where batch_ names tokens by other numbers than the sampler
  cuda::WorldRows all_;
  bool is_draft_ = false;
  std::span<const int32_t> states_;               // of a draft step
  int64_t first_row_ = 0, newest_first_row_ = 0;  // of that step, and of the one before
  std::vector<SampleRow> rows_;
  std::string kernels_;

  std::vector<cuda::Event> ended_[kGpuStepsInFlight];  // [ranks]
  std::vector<cudaEvent_t> newest_;                    // [ranks], of ended_
  int64_t begun_ = 0, finished_ = 0;
};

}  // namespace fathom
