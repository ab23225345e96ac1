// Samples a lane's logits on its first rank: from the rows' options to tokens on the host.
//
// Owns the device's and the host's buffers. Used by the first rank's thread, with its device
// current; take_tokens() by any thread, after the step.
#pragma once

#include <span>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/pinned_array.h"
#include "engine/gpu_rank_cuda.h"
#include "engine/runner.h"
#include "ops/sampling/sample_batch.h"

namespace fathom {

class GpuSampler {
 public:
  GpuSampler(const ModelConfig& config, const GpuRunnerOptions& options);

  // Upper bound of the bytes that plan() appends to a step's arrays.
  int64_t array_bytes() const;
  void allocate();

  // The newest step's tokens [logit rows], where the rows of the next step find theirs.
  const int32_t* tokens() const { return ids_.data(); }

  // `slot`: of kGpuStepsInFlight. Places a step's arrays after the model's.
  void plan(std::span<const SampleRow> rows, int slot, cuda::StepLayout& layout);
  // A step without rows.
  void plan_nothing(int slot) { steps_[slot].rows.clear(); }
  // Before the model's launches.
  void copy_seen(int slot, const GpuRank& rank);
  // After them.
  void enqueue(int slot, const GpuRank& rank);

  int64_t num_rows(int slot) const { return std::ssize(steps_[slot].rows); }
  // The tokens of a step that has ended: num_rows() of them, into tokens that keep their memory.
  void take_tokens(int slot, std::span<SampledToken> tokens) const;

 private:
  // Host buffers of a step in flight, which the device reads and writes meanwhile.
  struct Step {
    cuda::PinnedArray<int32_t> ids, top_ids;  // see cuda::SampleArguments
    cuda::PinnedArray<float> logprobs, top_logprobs;
    cuda::PinnedArray<SeenToken> seen;  // for the first group of rows, see SampleBatch::Group
    std::vector<SampleRow> rows;
  };

  void copy_seen(const SeenToken* from, int64_t count, cudaStream_t stream);
  void enqueue_group(const SampleBatch::Group& group, const GpuRank& rank);
  void copy_back(Step& step, cudaStream_t stream);

  const int64_t vocab_, max_rows_, seen_room_;
  SampleBatch samples_;
  SampleBatch::Group first_;  // of the step that is about to begin
  int64_t rows_at_ = 0, bias_ids_at_ = 0, bias_values_at_ = 0, masked_at_ = 0, allowed_at_ = 0;

  cuda::DeviceArray<SeenToken> seen_;  // tokens that the penalties of a group of rows count
  cuda::DeviceArray<int32_t> ids_, top_ids_;
  cuda::DeviceArray<float> logprobs_, top_logprobs_;
  Step steps_[kGpuStepsInFlight];
};

}  // namespace fathom
