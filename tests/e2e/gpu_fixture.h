// Shared by the tests of the bundled model on a GPU: a runner, an engine over it, requests and
// their completions. The tests run from the repository's root.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "engine/gpu_runner.h"

namespace fathom {

inline constexpr int64_t kGpuTestTokens = 1 << 15;  // KV cache tokens

const Checkpoint& bundled_checkpoint();
std::shared_ptr<const Tokenizer> bundled_tokenizer();

GpuRunnerOptions gpu_options();
// tp ranks a lane and dp lanes, one after the other on the GPUs that there are. Requires
// expect_gpu_ranks() before CUDA's first use: ranks that share a GPU can otherwise wait for one
// another until their limit.
GpuRunnerOptions ranks(int tp, int dp = 1, GpuRunnerOptions options = gpu_options());
// The bundled model by default.
std::unique_ptr<Runner> on_gpu(const GpuRunnerOptions& options,
                               const Checkpoint& checkpoint = bundled_checkpoint());
// Over another checkpoint, which has the bundled model's vocabulary.
std::unique_ptr<Engine> make_engine(GpuRunnerOptions options, EngineOptions engine,
                                    const Checkpoint& checkpoint = bundled_checkpoint());

// Everything that the events of one choice reported.
struct Answer {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<TokenLogprob> logprobs;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  std::optional<FinishReason> finish;
};

// The choices of each request in turn; requests are submitted all together or one at a time.
std::vector<Answer> answers(Engine& engine, const std::vector<Request>& requests, bool together);

// A prompt of the kind that the model was trained for: a sum, after a prefix shared with other
// prompts.
std::vector<int32_t> random_prompt(std::mt19937& random);
// Requests with such prompts, all greedy, with log-probabilities.
std::vector<Request> random_requests(std::mt19937& random, int count);

}  // namespace fathom
