// One rank on a GPU: its model, its cache, and the captured graphs of its decode steps.
//
// Owns its stream and what it allocates on its device. Used by one thread at a time, which makes
// the device current (use_device()). Device failures are thrown.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/cuda/event.h"
#include "device/cuda/graph.h"
#include "device/cuda/pinned_array.h"
#include "engine/gpu_runner.h"
#include "model/deepseek_cuda.h"

namespace fathom {

// How many steps may be between their begin and their end.
inline constexpr int kGpuStepsInFlight = 2;

int64_t gpu_model_len(const ModelConfig& config, const GpuRunnerOptions& options);
AttentionPolicy gpu_policy(const GpuRunnerOptions& options);
cuda::ModelOptions gpu_model_options(const ModelConfig& config, const GpuRunnerOptions& options);

class GpuRank {
 public:
  GpuRank(const ModelConfig& config, const GpuRunnerOptions& options, int device);
  ~GpuRank();
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  // Allocates the cache, and a step's arrays with `further_bytes` for what others append to them.
  Result<> prepare(std::unique_ptr<cuda::DeepSeekModel> model, int64_t further_bytes);
  // Captures decode steps. `sampled`: where the step before has its tokens, also for enqueue().
  void capture(const int32_t* sampled);

  cuda::DeviceContext& device() const { return device_; }
  void use_device() const { device_.make_current(); }
  cudaStream_t stream() const { return stream_; }
  cuda::GpuStream gpu_stream() const { return {device_, stream_}; }
  cuda::DeepSeekModel& model() const { return *model_; }
  int64_t num_pages() const { return cache_.num_pages; }
  std::byte* pages() const { return cache_memory_.data(); }
  int64_t page_bytes() const { return cache_.page_bytes(); }

  // Plans a step, whose rows are some of `all`. Others may append arrays to the layout until
  // enqueue(), which they find at arrays() on the device.
  cuda::StepLayout& plan(const ForwardBatch& batch, const cuda::WorldRows& all);
  // Plans a draft step, see StepPlanner::plan_draft(); enqueue() runs it likewise.
  cuda::StepLayout& plan_draft(const ForwardBatch& batch, std::span<const int32_t> states,
                               const cuda::WorldRows& all);
  const std::byte* arrays() const { return arrays_.data(); }
  // Copies the step's arrays and enqueues the model, up to the logits. `slot`: of
  // kGpuStepsInFlight, whose last step has ended. Returns the names of the kernels whose CTAs wait
  // for one another.
  std::string enqueue(int slot, const int32_t* sampled);
  // A step, perhaps a draft step, in which the rank's lane has no rows, with expert parallelism:
  // enqueues what the rank computes for the others. Returns as enqueue().
  std::string enqueue_for_others(const cuda::WorldRows& all, bool is_draft);

 private:
  struct CapturedGraph {
    int64_t rows = 0;
    cuda::Graph graph;
    std::string kernels;  // names of the kernels whose CTAs wait for one another
  };

  using Graphs = std::vector<CapturedGraph>;  // by rows, ascending

  void enqueue_model(const int32_t* sampled) {
    if (is_draft_) {
      return model_->draft(layout_, arrays_.data(), sampled, cache_, gpu_stream(), all_);
    }
    model_->forward(layout_, arrays_.data(), sampled, cache_, gpu_stream(), all_);
  }
  bool is_one_exchange(const cuda::WorldRows& all) const;
  cuda::WorldRows likely_rows(int64_t rows) const;
  std::vector<int64_t> graph_sizes() const;
  void capture_drafts(const int32_t* sampled);
  CapturedGraph capture_model(const int32_t* sampled);
  static const CapturedGraph* find(const Graphs& graphs, int64_t rows);

  const ModelConfig config_;
  const GpuRunnerOptions options_;
  cuda::DeviceContext& device_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<cuda::DeepSeekModel> model_;
  cuda::DeviceArray<std::byte> cache_memory_;
  cuda::CacheMemory cache_;
  std::map<int, Graphs> graphs_;  // of steps, by the tile rows of their latent decode, 0: none
  std::vector<int> tiles_;  // [1 + max_drafts]: of steps whose sequences have up to 1, 2, … rows
  Graphs draft_graphs_;
  // With sparse attention: of steps whose rows have any length, however many of a sequence; the
  // others are short ones, whose rows see all of their keys.
  Graphs long_graphs_, long_draft_graphs_;
  // The graphs of few rows for longer contexts, where they differ from the first.
  std::map<int, Graphs> graphs_of_many_keys_;  // by tile rows

  // The step that is about to begin.
  std::optional<cuda::StepPlanner> planner_, draft_planner_;
  bool is_draft_ = false;
  cuda::StepLayout layout_;
  cuda::WorldRows all_;
  const CapturedGraph* graph_ = nullptr;  // that runs it; null: none does

  cuda::DeviceArray<std::byte> arrays_;                            // of the step, see StepLayout
  cuda::PinnedArray<std::byte> staged_arrays_[kGpuStepsInFlight];  // read by copies in flight
};

}  // namespace fathom
