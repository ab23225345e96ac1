#include "e2e/gpu_fixture.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <future>

#include "chat/format.h"
#include "chat/prompt_ids.h"
#include "device/cuda/error.h"

namespace fathom {

const Checkpoint& bundled_checkpoint() {
  static const Checkpoint opened = [] {
    auto result = Checkpoint::open("models/fathom-tiny");
    FATHOM_CHECK(result.has_value(), "{}", result.error().message);
    return std::move(*result);
  }();
  return opened;
}

std::shared_ptr<const Tokenizer> bundled_tokenizer() {
  static const std::shared_ptr<const Tokenizer> loaded = [] {
    auto result = Tokenizer::load("models/fathom-tiny");
    FATHOM_CHECK(result.has_value(), "{}", result.error().message);
    return std::move(*result);
  }();
  return loaded;
}

GpuRunnerOptions gpu_options() {
  GpuRunnerOptions options;
  options.max_batched_tokens = 2048;
  options.max_num_seqs = 64;
  options.max_prompt_logit_rows = 2048;
  options.max_total_tokens = kGpuTestTokens;
  options.step_timeout = std::chrono::minutes(10);  // sanitizers slow a step a thousandfold
  options.load.show_progress = false;
  return options;
}

GpuRunnerOptions ranks(int tp, int dp, GpuRunnerOptions options) {
  FATHOM_CHECK(tp * dp == 1 || std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") != nullptr,
               "{} ranks without expect_gpu_ranks(), which comes before CUDA's first use", tp * dp);
  options.placement = {.tp = tp, .dp = dp};
  int gpus = 0;
  cuda::check(cudaGetDeviceCount(&gpus), "counting GPUs");
  options.devices.clear();
  for (int rank = 0; rank < tp * dp; ++rank) options.devices.push_back(rank % gpus);
  return options;
}

std::unique_ptr<Runner> on_gpu(const GpuRunnerOptions& options, const Checkpoint& checkpoint) {
  auto runner = create_gpu_runner(checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  return std::move(*runner);
}

std::unique_ptr<Engine> make_engine(GpuRunnerOptions options, EngineOptions engine,
                                    const Checkpoint& checkpoint) {
  engine.max_num_seqs = options.max_num_seqs;
  engine.max_batched_tokens = options.max_batched_tokens;
  engine.max_queued_tokens = 1 << 24;
  engine.max_queued_requests = 1 << 12;
  engine.eos_ids = {1};
  options.max_prompt_logit_rows = engine.max_prompt_logit_rows;
  auto created = Engine::create(engine, on_gpu(options, checkpoint), bundled_tokenizer());
  FATHOM_CHECK(created.has_value(), "{}", created.error().message);
  return std::move(*created);
}

std::vector<Answer> answers(Engine& engine, const std::vector<Request>& requests, bool together) {
  std::vector<size_t> first = {0};  // index of each request's first choice
  for (const Request& request : requests) {
    first.push_back(first.back() + static_cast<size_t>(request.sampling.n));
  }
  std::vector<Answer> all(first.back());
  std::vector<std::future<void>> ends;
  for (size_t r = 0; r < requests.size(); ++r) {
    auto done = std::make_shared<std::promise<void>>();
    ends.push_back(done->get_future());
    const auto sink = [&all, begin = first[r], done](const Event& event) {
      Answer& answer = all[begin + static_cast<size_t>(event.index)];
      answer.ids.insert(answer.ids.end(), event.ids.begin(), event.ids.end());
      answer.text += event.text;
      answer.logprobs.insert(answer.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
      answer.prompt_logprobs.insert(answer.prompt_logprobs.end(), event.prompt_logprobs.begin(),
                                    event.prompt_logprobs.end());
      if (event.finish) {
        answer.finish = event.finish;
        EXPECT_NE(*event.finish, FinishReason::kError) << event.error.message;
      }
      if (event.last) done->set_value();
    };
    const auto submitted = engine.submit(requests[r], sink);
    FATHOM_CHECK(submitted.has_value(), "{}", submitted.error().message);
    if (!together) ends.back().wait();
  }
  for (const auto& end : ends) end.wait();
  return all;
}

std::vector<int32_t> random_prompt(std::mt19937& random) {
  std::string text;
  for (size_t k = random() % 4 * (random() % 6); k > 0; --k) {
    text += "The quick brown fox jumps over the lazy dog, and the river runs to the sea. ";
  }
  text +=
      fmt::format("Compute {} {} {}.", random() % 1000, random() % 2 ? "+" : "-", random() % 1000);
  Conversation conversation;
  conversation.messages.push_back(plain_message(Role::kUser, text));
  const auto prompt = render(ChatFormat::kV3, conversation);
  FATHOM_CHECK(prompt.has_value(), "{}", prompt.error().message);
  return encode_prompt(*bundled_tokenizer(), *prompt);
}

std::vector<Request> random_requests(std::mt19937& random, int count) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    Request request;
    request.prompt_ids = random_prompt(random);
    // Greedy in more than one way: a draw would depend on the last bit of a probability.
    request.sampling.temperature = i % 3 == 0 ? 0.0 : 1.0;
    request.sampling.top_k = i % 3 == 0 ? 0 : 1;
    if (i % 7 == 0) request.sampling.frequency_penalty = 0.1;
    if (i % 5 == 0) request.sampling.logit_bias = {{200, 0.5f}};
    request.sampling.logprobs = 5;
    request.sampling.seed = random();
    request.sampling.max_tokens = 1 + static_cast<int64_t>(random() % 60);
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace fathom
