// The model on a GPU, as the engine drives it. Free of CUDA: a build without it has the same
// functions, which then say so.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "cache/cache_format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "engine/runner.h"
#include "model/attention_plan.h"
#include "model/weight_forms.h"

namespace fathom {

struct GpuRunnerOptions {
  int device = 0;
  int64_t max_model_len = 0;  // 0: the model's own
  int64_t max_batched_tokens = 8192;
  int64_t max_num_seqs = 256;
  int64_t max_prompt_logit_rows = 0;
  int64_t max_total_tokens = 65536;  // tokens that the cache holds
  CacheFormat cache_format = CacheFormat::kBF16;
  int num_threads = 0;  // for what the host does; 0: one a core
  bool graphs = true;
  AttentionForm attention = AttentionForm::kAuto;
  int64_t expanded_keys = 0;  // at a time, for multi-head attention; 0: as many as 1 GiB holds
  // A request's logits have the same bits alone and among any others, however its prompt is cut
  // into chunks and whatever of it is found in the cache. Attention is multi-head for all of its
  // prompt then, and absorbed for all of its answer (or absorbed for both, if `attention` says so).
  bool deterministic = false;
  StoredFp8 stored_fp8 = StoredFp8::kKept;
  // Seen tokens that a step's penalties have room for on the device, at least those of one row;
  // rows with more are sampled in groups.
  int64_t penalty_room = 1 << 20;
  // A step that the device does not end in time ends the process with status 3 (step_watchdog.h).
  // 0: never. Loading and capturing graphs may take an hour.
  std::chrono::nanoseconds step_timeout = std::chrono::seconds(30);
  LoadOptions load;
};

// Devices that this program can compute on: 0 without CUDA in the build, without a driver, or
// without a device of compute capability 9.0.
int num_gpus();

// Why num_gpus() is 0 on a machine that shows a GPU or its driver, in one sentence; empty where
// nothing shows one. `root`: of the file system that is looked at.
std::string why_no_gpu(const std::string& root = "/");

// What model and options take of the device's memory besides the cache, and what it has.
struct GpuMemory {
  int64_t free = 0, total = 0;
  int64_t weights = 0, working_space = 0;
};
Result<GpuMemory> gpu_memory(const Checkpoint& checkpoint, const GpuRunnerOptions& options);

// What the device copies (bytes read and written) and multiplies (bf16) a second, measured now in
// 2.5 GiB of its free memory. For holding other measurements against.
struct GpuRates {
  double copy_bandwidth = 0, matrix_flops = 0;
};
Result<GpuRates> measure_gpu(int device);

// "NVIDIA H200, driver for CUDA 13.0"
std::string gpu_name(int device);

// "13.1.0", of the cuBLASLt that products in bf16 are lent; empty: they do without.
std::string cublas_lt_version();

Result<std::unique_ptr<Runner>> create_gpu_runner(const Checkpoint& checkpoint,
                                                  const GpuRunnerOptions& options);

}  // namespace fathom
