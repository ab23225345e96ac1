// Starts an engine from the command line's flags, for all commands that run a model.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chat/format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/memory_plan.h"
#include "cli/model_flags.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

// Limits of client requests; the fields are those of EngineOptions.
struct QueueLimits {
  int64_t max_requests = 512;
  int64_t max_tokens = 0;
  std::chrono::nanoseconds max_queue_time = std::chrono::seconds(120);
  std::chrono::nanoseconds max_total_time = std::chrono::minutes(30);
};

struct LoadedEngine;

// A command's defaults where the flags do not specify a value.
struct EngineNeeds {
  int64_t num_seqs = 1;
  // Capacity of the cache on the CPU in tokens; 0: num_seqs sequences of full length, at most 64K
  // tokens. On a GPU the cache takes all free memory.
  int64_t total_tokens = 0;
  bool prompt_logprobs = false;  // requested for many positions: steps may need more logit rows
  bool prefix_caching = true;    // false: earlier requests must not affect times or results
  bool needs_tokenizer = true;   // false: runs without one if the checkpoint has none
  // Limits of the queue; none: unlimited.
  std::optional<QueueLimits> queue;
  // Where another process computes the prompts; null: they are computed here. Called when the model
  // is loaded, before its engine is there.
  std::function<Result<PrefillOptions>(const LoadedEngine& loaded)> prefill = {};
  // As EngineOptions has them.
  std::vector<std::shared_ptr<CacheObserver>> cache_observers = {};
  // The engine has two sites (Engine::create_separated); none: all lanes are of one.
  std::optional<SitesOptions> sites = {};
};

// Members are ordered so that the engine is destroyed first.
struct LoadedEngine {
  // The first rank's GPU; none: runs on the CPU.
  std::optional<int> gpu() const { return gpus.empty() ? std::nullopt : std::optional(gpus[0]); }

  Checkpoint checkpoint;
  std::shared_ptr<const Tokenizer> tokenizer;
  Result<ChatFormat> chat_format =
      ChatFormat::kV3;  // an error only when a prompt has to be rendered
  DType compute = DType::kBF16;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t max_model_len = 0;  // tokens of prompt and completion
  int64_t max_num_seqs = 0;
  int64_t max_drafts = 0;             // of a sequence in a step
  std::optional<int64_t> dense_keys;  // AttentionPolicy's
  LoadOptions load;
  int num_threads = 0;
  std::vector<int> gpus;  // of the ranks, in order; none: runs on the CPU
  // Before anything was loaded; other processes of this engine may count the same memory.
  AvailableMemory available;
  MemoryPlan memory;
  int64_t page_bytes = 0;  // of a page of the cache; 0: the device cannot send or take any
  std::unique_ptr<Engine> engine;
};

// Everything of load_engine() that needs no memory: the checkpoint, its tokenizer and all checks of
// the flags. Without an engine and a memory plan.
Result<LoadedEngine> open_model(const ModelFlags& flags, const EngineNeeds& needs);

// Where the experts are at first; null where tokens are not exchanged.
Result<std::shared_ptr<const ExpertTable>> expert_table_of(const ModelConfig& config,
                                                           const ModelFlags& flags);

// Plans the memory of the CPU ranks in this process (`world` null: all ranks), shows the plan, and
// returns the options to load them with.
Result<ModelRunnerOptions> plan_ranks(LoadedEngine& loaded, const ModelFlags& flags,
                                      const EngineNeeds& needs, World* world);

// Checks the checkpoint and its tokenizer, prints the memory plan on stderr, reads the weights with
// a progress bar and starts the engine. Allocates nothing before all checks are done.
Result<LoadedEngine> load_engine(const ModelFlags& flags, const EngineNeeds& needs);

}  // namespace fathom
