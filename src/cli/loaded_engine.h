// From flags to a running engine: what every command that runs a model begins with.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "chat/format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/memory_plan.h"
#include "cli/model_flags.h"
#include "engine/engine.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

// Limits of clients' requests; the fields are EngineOptions'.
struct QueueLimits {
  int64_t max_requests = 512;
  int64_t max_tokens = 0;
  std::chrono::nanoseconds max_queue_time = std::chrono::seconds(120);
  std::chrono::nanoseconds max_total_time = std::chrono::minutes(30);
};

// What a command needs where the flags do not say it.
struct EngineNeeds {
  int64_t num_seqs = 1;
  // Tokens of the cache on the CPU; 0: num_seqs sequences of full length, at most 64K tokens. On a
  // GPU it is all that fits.
  int64_t total_tokens = 0;
  bool prompt_logprobs = false;  // of many positions: steps may want more logit rows
  bool prefix_caching = true;    // false: what was asked before must not change times or results
  bool needs_tokenizer = true;   // false: goes without one when the checkpoint has none
  // How much may wait and for how long; none: everything, as long as it takes.
  std::optional<QueueLimits> queue;
};

// Destroy the engine first: members are in that order.
struct LoadedEngine {
  Checkpoint checkpoint;
  std::shared_ptr<const Tokenizer> tokenizer;
  Result<ChatFormat> chat_format =
      ChatFormat::kV3;  // an error only when a prompt has to be rendered
  DType compute = DType::kBF16;
  CacheFormat cache_format = CacheFormat::kBF16;
  int64_t max_model_len = 0;  // tokens, prompt and answer
  int64_t max_num_seqs = 0;
  LoadOptions load;
  int num_threads = 0;
  std::optional<int> gpu;  // none: on the CPU
  MemoryPlan memory;
  std::unique_ptr<Engine> engine;
};

// Checks the checkpoint and its tokenizer, prints the memory plan on stderr, reads the weights
// under a progress bar and starts the engine. Nothing is allocated before all checks are done.
Result<LoadedEngine> load_engine(const ModelFlags& flags, const EngineNeeds& needs);

}  // namespace fathom
