// The model on a GPU, as the engine drives it. This header is free of CUDA: a build without CUDA
// has the same functions, which return an error.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/cache_format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "engine/runner.h"
#include "model/attention_plan.h"
#include "model/weight_forms.h"
#include "placement/expert_table.h"
#include "placement/placement.h"

namespace fathom {

struct GpuRunnerOptions {
  Placement placement;
  // With expert parallelism: where the experts are; null: consecutive ones by rank.
  std::shared_ptr<const ExpertTable> expert_table;
  std::vector<int> devices = {0};  // of the ranks, in order; several may share one
  int64_t max_model_len = 0;       // 0: the model's own
  int64_t max_batched_tokens = 8192;
  int64_t max_num_seqs = 256;
  int64_t max_prompt_logit_rows = 0;
  int64_t max_total_tokens = 65536;  // capacity of each lane's cache in tokens
  // Drafts of a sequence in a step, 0 to kMaxDrafts. With some, the MTP layer is loaded; the
  // placement is without expert parallelism.
  int64_t max_drafts = 0;
  CacheFormat cache_format = CacheFormat::kBF16;
  int num_threads = 0;  // of the host's work; 0: one per core
  bool graphs = true;
  AttentionForm attention = AttentionForm::kAuto;
  // --dsa-dense-threshold (AttentionPolicy); none: the model's index_topk.
  std::optional<int64_t> dense_keys = {};
  // Keys expanded at a time for multi-head attention; 0: as many as fit into 1 GiB.
  int64_t expanded_keys = 0;
  // Batch-invariant: a request's logits are bitwise identical alone and in any batch, however its
  // prompt is chunked and whatever part of it is cached. Attention is then multi-head for the whole
  // prompt and absorbed for the whole completion (or absorbed for both, if `attention` says so).
  bool deterministic = false;
  StoredFp8 stored_fp8 = StoredFp8::kKept;
  // With placement.expert_parallel: steps of more than max_batched_tokens rows of all lanes
  // exchange one part of them beside the experts' GEMMs of another. Changes no bit.
  bool overlap_exchange = false;
  // Capacity, in tokens, of the device buffer for the tokens that penalties count; at least one
  // row's. Rows that do not fit together are sampled in groups.
  int64_t penalty_room = 1 << 20;
  // A step that the device does not end within this time ends the process with status 3
  // (step_watchdog.h). 0: no limit. Loading and graph capture have a limit of one hour.
  // A rank waits half as long for another.
  std::chrono::nanoseconds step_timeout = std::chrono::seconds(30);
  // For tests: called on each rank's thread, with its number, before it enqueues its part of a
  // step.
  std::function<void(int rank)> at_rank = {};
  LoadOptions load;
};

// Sets what the driver needs to know when several ranks are to run in this process, before its
// first use here: each of its variables is set unless the environment has it. A rank's kernels wait
// for another rank's, so that nothing may wait for the device to become idle in between: kernels
// are loaded at the start (CUDA_MODULE_LOADING, which takes some seconds), and each stream has a
// hardware queue (CUDA_DEVICE_MAX_CONNECTIONS).
void expect_gpu_ranks();

// The number of devices this program can use: 0 without CUDA in the build, without a driver, or
// without a device of compute capability 9.0.
int num_gpus();

// One sentence that says why num_gpus() is 0 on a machine with a GPU or driver; empty if the
// machine shows neither. `root` is the root of the file system to look at.
std::string why_no_gpu(const std::string& root = "/");

// A device's memory in bytes: free and total, and what its ranks take besides their caches.
struct GpuMemory {
  int device = 0;
  int ranks = 0;
  int64_t free = 0, total = 0;
  int64_t weights = 0, working_space = 0;

  int64_t left_for_each_rank() const { return (free - weights - working_space) / ranks; }
};
// Memory of the device that has the least left for each rank's cache.
Result<GpuMemory> gpu_memory(const Checkpoint& checkpoint, const GpuRunnerOptions& options);

// Rates of the device, measured by this call in 2.5 GiB of its free memory: copy bandwidth in bytes
// read and written per second, bf16 matrix operations per second.
struct GpuRates {
  double copy_bandwidth = 0, matrix_flops = 0;
};
Result<GpuRates> measure_gpu(int device);

// For example "NVIDIA H200, driver for CUDA 13.0".
std::string gpu_name(int device);

// The version of cuBLASLt that bf16 GEMMs use, for example "13.1.0"; empty if it is not installed.
std::string cublas_lt_version();

Result<std::unique_ptr<Runner>> create_gpu_runner(const Checkpoint& checkpoint,
                                                  const GpuRunnerOptions& options);

}  // namespace fathom
