#include "cli/answer.h"

#include <gtest/gtest.h>

#include "cli/batch_run.h"
#include "cli/script_runner.h"

namespace fathom {
namespace {

constexpr int64_t kVocab = 16;
constexpr int32_t kEos = 15;

// The script 3 -> 4 -> 5 -> end.
std::unique_ptr<ScriptRunner> script() {
  return std::make_unique<ScriptRunner>(kVocab, std::map<int32_t, int32_t>{{3, 4}, {4, 5}}, kEos);
}

std::unique_ptr<Engine> engine() {
  EngineOptions options;
  options.eos_ids = {kEos};
  return *Engine::create(options, script(), nullptr);
}

Request greedy(std::vector<int32_t> prompt) {
  Request request;
  request.prompt_ids = std::move(prompt);
  request.sampling.temperature = 0;
  return request;
}

TEST(Generate, CollectsEveryTokenAndCallsForEachEvent) {
  const auto running = engine();
  std::vector<int32_t> seen;
  const auto answers = generate(*running, greedy({1, 3}), [&](const Event& event) {
    seen.insert(seen.end(), event.ids.begin(), event.ids.end());
  });
  ASSERT_TRUE(answers.has_value()) << answers.error().message;
  ASSERT_EQ(answers->size(), 1u);
  const Answer& answer = answers->front();
  EXPECT_EQ(answer.ids, (std::vector<int32_t>{4, 5, kEos}));
  EXPECT_EQ(seen, answer.ids);
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  EXPECT_EQ(answer.usage.prompt_tokens, 2);
  EXPECT_EQ(answer.usage.completion_tokens, 3);
}

TEST(Generate, RefusalIsAnErrorAndCallsNothing) {
  const auto running = engine();
  int events = 0;
  const auto answers = generate(*running, greedy({1, kVocab}), [&](const Event&) { ++events; });
  ASSERT_FALSE(answers.has_value());
  EXPECT_EQ(answers.error().code, Code::kInvalidArgument);
  EXPECT_EQ(events, 0);
}

TEST(AnswersJson, HasTheFieldsInOrderAndTheLogprobs) {
  const auto running = engine();
  Request request = greedy({1, 3});
  request.sampling.logprobs = 2;
  request.sampling.prompt_logprobs = 1;
  const SamplingParams sampling = request.sampling;
  const auto answers = generate(*running, request, [](const Event&) {});
  ASSERT_TRUE(answers.has_value());
  const json::object object = answers_json({1, 3}, *answers, sampling);
  std::vector<std::string> keys;
  for (const auto& field : object) keys.emplace_back(field.key());
  EXPECT_EQ(keys,
            (std::vector<std::string>{"prompt_ids", "ids", "text", "logprobs", "prompt_logprobs",
                                      "finish_reason", "usage", "timings"}));
  EXPECT_EQ(json::serialize(object.at("prompt_ids")), "[1,3]");
  EXPECT_EQ(json::serialize(object.at("ids")), "[4,5,15]");
  EXPECT_EQ(object.at("finish_reason").as_string(), "stop");

  const ScriptRunner truth = *script();
  const json::array& logprobs = object.at("logprobs").as_array();
  ASSERT_EQ(logprobs.size(), 3u);
  EXPECT_EQ(logprobs[0].at("id").as_int64(), 4);
  EXPECT_NEAR(logprobs[0].at("logprob").as_double(), truth.likely(), 1e-6);
  ASSERT_EQ(logprobs[0].at("top").as_array().size(), 2u);
  EXPECT_EQ(logprobs[0].at("top").at(0).at("id").as_int64(), 4);
  EXPECT_NEAR(logprobs[0].at("top").at(1).at("logprob").as_double(), truth.unlikely(), 1e-5);

  const json::array& prompt = object.at("prompt_logprobs").as_array();
  ASSERT_EQ(prompt.size(), 2u);
  EXPECT_TRUE(prompt[0].is_null());
  EXPECT_EQ(prompt[1].at("id").as_int64(), 3);
  EXPECT_NEAR(prompt[1].at("logprob").as_double(), truth.unlikely(), 1e-5);
  EXPECT_EQ(prompt[1].at("top").at(0).at("id").as_int64(), kEos);

  EXPECT_EQ(object.at("usage").at("total_tokens").as_int64(), 5);
  EXPECT_GE(object.at("timings").at("ttft_ms").to_number<double>(), 0);
}

TEST(AnswersJson, WithoutLogprobsTheyAreNull) {
  const auto running = engine();
  const Request request = greedy({3});
  const auto answers = generate(*running, request, [](const Event&) {});
  ASSERT_TRUE(answers.has_value());
  const json::object object = answers_json({3}, *answers, request.sampling);
  EXPECT_TRUE(object.at("logprobs").is_null());
  EXPECT_TRUE(object.at("prompt_logprobs").is_null());
  EXPECT_EQ(object.if_contains("choices"), nullptr);
}

TEST(AnswersJson, SeveralChoicesAreListed) {
  const auto running = engine();
  Request request = greedy({3});
  request.sampling.n = 3;
  request.sampling.max_tokens = 2;
  const auto answers = generate(*running, request, [](const Event&) {});
  ASSERT_TRUE(answers.has_value());
  ASSERT_EQ(answers->size(), 3u);
  const json::object object = answers_json({3}, *answers, request.sampling);
  const json::array& choices = object.at("choices").as_array();
  ASSERT_EQ(choices.size(), 3u);
  EXPECT_EQ(choices[2].at("index").to_number<int>(), 2);
  EXPECT_EQ(json::serialize(choices[2].at("ids")), "[4,5]");
  EXPECT_EQ(choices[2].at("finish_reason").as_string(), "length");
  EXPECT_EQ(object.at("usage").at("completion_tokens").as_int64(), 6);
  EXPECT_EQ(object.at("usage").at("total_tokens").as_int64(), 7);
}

TEST(AnswersJson, FloatsAreTheShortestThatReadBack) {
  Answer answer;
  answer.ids = {1};
  answer.logprobs = {{1, -0.1f, {{1, -0.1f}, {2, -INFINITY}}}};
  SamplingParams sampling;
  sampling.logprobs = 2;
  const json::object object = answers_json({}, {answer}, sampling);
  const json::value& token = object.at("logprobs").at(0);
  EXPECT_EQ(token.at("logprob").as_double(), -0.1);
  EXPECT_TRUE(token.at("top").at(1).at("logprob").is_null());
}

TEST(RunBatch, KeepsTheOrderAndTheLimit) {
  const auto running = engine();
  std::vector<Request> requests;
  for (int i = 0; i < 20; ++i) requests.push_back(greedy({i % 2 == 0 ? 3 : 4}));
  std::atomic<int> finished = 0;
  const auto run = run_batch(*running, requests, 3, [&](size_t) { ++finished; });
  ASSERT_TRUE(run.has_value()) << run.error().message;
  EXPECT_EQ(finished, 20);
  EXPECT_LE(run->peak_concurrency, 3);
  for (int i = 0; i < 20; ++i) {
    const auto& answer = run->answers[static_cast<size_t>(i)];
    EXPECT_EQ(answer.answer.ids.size(), i % 2 == 0 ? 3u : 2u);
    EXPECT_EQ(answer.token_times.size(), answer.answer.ids.size());
    EXPECT_GE(answer.token_times.front(), answer.submitted);
  }
}

TEST(RunBatch, ARefusedRequestEndsTheRunAndIsNamed) {
  const auto running = engine();
  const auto run = run_batch(*running, {greedy({3}), greedy({99}), greedy({3})}, 0, [](size_t) {});
  ASSERT_FALSE(run.has_value());
  EXPECT_TRUE(run.error().message.starts_with("request 2: ")) << run.error().message;
}

}  // namespace
}  // namespace fathom
