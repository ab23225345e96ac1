#include "engine/sampling_params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace fathom {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Case {
  const char* says;  // substring of the expected error; null: accepted
  std::function<void(SamplingParams&)> change;
};

TEST(SamplingParams, EveryLimit) {
  const Case cases[] = {
      {nullptr, [](SamplingParams&) {}},
      {nullptr, [](SamplingParams& p) { p.temperature = 0; }},
      {nullptr, [](SamplingParams& p) { p.temperature = 2; }},
      {"temperature is 2.1, must be between 0 and 2",
       [](SamplingParams& p) { p.temperature = 2.1; }},
      {"temperature is -0.1", [](SamplingParams& p) { p.temperature = -0.1; }},
      {"temperature is nan", [](SamplingParams& p) { p.temperature = kNan; }},
      {"temperature is inf", [](SamplingParams& p) { p.temperature = kInf; }},
      {"top_p is 0, must be above 0 and at most 1", [](SamplingParams& p) { p.top_p = 0; }},
      {"top_p is 1.5", [](SamplingParams& p) { p.top_p = 1.5; }},
      {"top_p is nan", [](SamplingParams& p) { p.top_p = kNan; }},
      {"min_p is -1", [](SamplingParams& p) { p.min_p = -1; }},
      {"min_p is nan", [](SamplingParams& p) { p.min_p = kNan; }},
      {nullptr, [](SamplingParams& p) { p.top_k = -1; }},
      {nullptr, [](SamplingParams& p) { p.top_k = std::numeric_limits<int64_t>::max(); }},
      {"top_k is -2", [](SamplingParams& p) { p.top_k = -2; }},
      {"repetition_penalty is 0", [](SamplingParams& p) { p.repetition_penalty = 0; }},
      {"repetition_penalty is 5e-324", [](SamplingParams& p) { p.repetition_penalty = 5e-324; }},
      {"repetition_penalty is nan", [](SamplingParams& p) { p.repetition_penalty = kNan; }},
      {"presence_penalty is 2.5", [](SamplingParams& p) { p.presence_penalty = 2.5; }},
      {"frequency_penalty is -inf", [](SamplingParams& p) { p.frequency_penalty = -kInf; }},
      {nullptr,
       [](SamplingParams& p) {
         p.logit_bias = {{99, -100.0f}};
       }},
      {"logit_bias has the id 100, outside the vocabulary of 100",
       [](SamplingParams& p) {
         p.logit_bias = {{100, 1.0f}};
       }},
      {"logit_bias has the id -1",
       [](SamplingParams& p) {
         p.logit_bias = {{-1, 1.0f}};
       }},
      {"logit_bias of id 3 is 101",
       [](SamplingParams& p) {
         p.logit_bias = {{3, 101.0f}};
       }},
      {"logit_bias of id 3 is nan",
       [](SamplingParams& p) {
         p.logit_bias = {{3, std::nanf("")}};
       }},
      {"logit_bias has 1025 ids", [](SamplingParams& p) { p.logit_bias.resize(1025); }},
      {nullptr, [](SamplingParams& p) { p.max_tokens.reset(); }},
      {"max_tokens is 0", [](SamplingParams& p) { p.max_tokens = 0; }},
      {"min_tokens is -1", [](SamplingParams& p) { p.min_tokens = -1; }},
      {"min_tokens is 17, more than max_tokens, 16", [](SamplingParams& p) { p.min_tokens = 17; }},
      {"stop has 17 strings", [](SamplingParams& p) { p.stop.assign(17, "x"); }},
      {"stop[1] is empty",
       [](SamplingParams& p) {
         p.stop = {"x", ""};
       }},
      {"stop[0] has 257 bytes", [](SamplingParams& p) { p.stop = {std::string(257, 'x')}; }},
      {"stop[0] is not valid UTF-8", [](SamplingParams& p) { p.stop = {"\xC3"}; }},
      {"stop_token_ids has 17 ids", [](SamplingParams& p) { p.stop_token_ids.assign(17, 0); }},
      {"stop_token_ids has the id 100", [](SamplingParams& p) { p.stop_token_ids = {100}; }},
      {"n is 0", [](SamplingParams& p) { p.n = 0; }},
      {"n is 129, must be between 1 and 128", [](SamplingParams& p) { p.n = 129; }},
      {"logprobs is 21, must be between 0 and 20", [](SamplingParams& p) { p.logprobs = 21; }},
      {"logprobs is -2", [](SamplingParams& p) { p.logprobs = -2; }},
      {"prompt_logprobs is 21", [](SamplingParams& p) { p.prompt_logprobs = 21; }},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    c.change(params);
    const auto result = params.validate(100);
    if (c.says == nullptr) {
      EXPECT_TRUE(result) << result.error().message;
      continue;
    }
    ASSERT_FALSE(result) << c.says;
    EXPECT_EQ(result.error().code, Code::kInvalidArgument);
    EXPECT_NE(result.error().message.find(c.says), std::string::npos)
        << result.error().message << " does not say: " << c.says;
  }
}

}  // namespace
}  // namespace fathom
