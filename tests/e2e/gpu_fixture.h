// What the tests of the bundled model on a GPU share: a runner, an engine over it, requests and
// their answers. They are run from the repository's root.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "engine/gpu_runner.h"

namespace fathom {

inline constexpr int64_t kGpuTestTokens = 1 << 15;  // of cache

const Checkpoint& bundled_checkpoint();
std::shared_ptr<const Tokenizer> bundled_tokenizer();

GpuRunnerOptions gpu_options();
// The bundled model, or another.
std::unique_ptr<Runner> on_gpu(const GpuRunnerOptions& options,
                               const Checkpoint& checkpoint = bundled_checkpoint());
std::unique_ptr<Engine> make_engine(GpuRunnerOptions options, EngineOptions engine);

// All that the events of one choice said.
struct Answer {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<TokenLogprob> logprobs;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  std::optional<FinishReason> finish;
};

// Of each request the choices, one after the other: of all submitted together, or one at a time.
std::vector<Answer> answers(Engine& engine, const std::vector<Request>& requests, bool together);

// A prompt as the model was trained for: a sum, behind a text that others begin with too.
std::vector<int32_t> random_prompt(std::mt19937& random);

}  // namespace fathom
