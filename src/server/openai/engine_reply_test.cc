// The wire formats on a running engine: bodies in, responses out, streamed and complete.
#include <map>

#include "engine/engine.h"
#include "engine/event_queue.h"
#include "engine/fake_runner.h"
#include "server/openai/wire_test_support.h"

namespace fathom {
namespace {

class EngineReply : public testing::Test {
 protected:
  EngineReply() {
    served_.names = {"fake"};
    served_.tokenizer = fake_tokenizer();
    served_.chat_format = ChatFormat::kV31;
    served_.vocab_size = FakeModel().vocab_size;
    served_.max_model_len = FakeModel().max_model_len;
    engine_ = std::move(*Engine::create(
        {.eos_ids = {kFakeEos}}, std::make_unique<FakeRunner>(FakeModel()), served_.tokenizer));
  }

  // Returns the whole response to a body. Prompts run one after the other.
  std::string reply_to(GeneratingEndpoint endpoint, const std::string& body) {
    auto generation = prepare(endpoint, body, served_, RequestLimits(), kTestIdentity);
    EXPECT_TRUE(generation) << generation.error().message;
    std::string out;
    for (size_t prompt = 0; prompt < generation->requests.size(); ++prompt) {
      EventQueue events;
      const auto submitted =
          engine_->submit(std::move(generation->requests[prompt]), events.sink());
      EXPECT_TRUE(submitted) << submitted.error().message;
      while (const auto event = events.next()) generation->writer->push(prompt, *event, out);
    }
    EXPECT_TRUE(generation->writer->ended());
    return out;
  }

  ServedModel served_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineReply, StreamsSayWhatTheWholeReplySays) {
  const std::string head =
      R"({"messages":[{"role":"user","content":"abc"}],"n":2,"seed":7,"max_tokens":40,)"
      R"("stop":["STOP"],"logprobs":true,"top_logprobs":2,"stream":)";
  const json::value whole = parse_payload(reply_to(GeneratingEndpoint::kChat, head + "false}"));
  std::map<int64_t, std::string> content;
  std::map<int64_t, size_t> logprobs;
  for (const std::string& payload :
       sse_payloads(reply_to(GeneratingEndpoint::kChat, head + "true}"))) {
    if (payload == "[DONE]") continue;
    const json::value chunk = parse_payload(payload);
    const json::value& choice = chunk.at("choices").at(0);
    const int64_t index = choice.at("index").as_int64();
    if (const auto* text = choice.at("delta").as_object().if_contains("content")) {
      content[index] += text->as_string();
    }
    if (choice.at("logprobs").is_object()) {
      logprobs[index] += choice.at("logprobs").at("content").as_array().size();
    }
  }
  ASSERT_EQ(whole.at("choices").as_array().size(), 2u);
  int64_t tokens = 0;
  for (const json::value& choice : whole.at("choices").as_array()) {
    const int64_t index = choice.at("index").as_int64();
    EXPECT_EQ(std::string(choice.at("message").at("content").as_string()), content[index]);
    EXPECT_EQ(choice.at("logprobs").at("content").as_array().size(), logprobs[index]);
    tokens += static_cast<int64_t>(logprobs[index]);
  }
  EXPECT_NE(content[0], content[1]);
  EXPECT_EQ(whole.at("usage").at("completion_tokens").as_int64(), tokens);
}

// Choices of a prompt share it: its tokens and its cached tokens count once.
TEST_F(EngineReply, UsageCountsAPromptOnceForAllItsChoices) {
  const std::vector<int32_t> prompt(200, 'a');
  const std::string body =
      fmt::format(R"({{"prompt":[[{0}],[{0}]],"n":3,"seed":3,"max_tokens":2,"ignore_eos":true}})",
                  fmt::join(prompt, ","));
  reply_to(GeneratingEndpoint::kCompletions, body);
  const json::value again = parse_payload(reply_to(GeneratingEndpoint::kCompletions, body));
  const json::value& usage = again.at("usage");
  EXPECT_EQ(usage.at("prompt_tokens").as_int64(), 2 * 200);
  EXPECT_EQ(usage.at("completion_tokens").as_int64(), 2 * 3 * 2);
  EXPECT_EQ(usage.at("prompt_tokens_details").at("cached_tokens").as_int64(), 2 * 192);
}

TEST_F(EngineReply, ListsOfPromptsAndTheirLogprobs) {
  const json::value body = parse_payload(reply_to(
      GeneratingEndpoint::kCompletions,
      R"({"prompt":["abc","ST"],"n":2,"seed":3,"max_tokens":4,"echo":true,"logprobs":1})"));
  ASSERT_EQ(body.at("choices").as_array().size(), 4u);
  for (const json::value& choice : body.at("choices").as_array()) {
    const bool first = choice.at("index").as_int64() < 2;
    const std::string_view text = choice.at("text").as_string();
    EXPECT_TRUE(text.starts_with(first ? "abc" : "ST")) << text;
    const json::array& numbers = choice.at("logprobs").at("token_logprobs").as_array();
    EXPECT_TRUE(numbers.at(0).is_null());
    for (size_t i = 1; i < numbers.size(); ++i) EXPECT_TRUE(numbers[i].is_number());
    EXPECT_EQ(numbers.size(), choice.at("logprobs").at("tokens").as_array().size());
  }
}

TEST_F(EngineReply, EveryEndpointIsAnswered) {
  const auto check = [&](GeneratingEndpoint endpoint, const char* fields) {
    parse_payload(reply_to(endpoint, fmt::format("{{{},\"stream\":false}}", fields)));
    const auto payloads =
        sse_payloads(reply_to(endpoint, fmt::format("{{{},\"stream\":true}}", fields)));
    EXPECT_GE(payloads.size(), 2u);
  };
  check(GeneratingEndpoint::kMessages,
        R"("max_tokens":9,"messages":[{"role":"user","content":"ab"}])");
  check(GeneratingEndpoint::kResponses, R"("input":"ab","max_output_tokens":9)");
  check(GeneratingEndpoint::kGenerate,
        R"("input_ids":[97,98],"return_logprob":true,"logprob_start_len":0)");
}

TEST_F(EngineReply, AFailedStepEndsTheStreamWithItsError) {
  auto runner = std::make_unique<FakeRunner>(FakeModel());
  runner->before_step = [steps = 0](const ForwardBatch&) mutable -> Result<> {
    if (++steps == 4) return error(Code::kInternal, "the device is gone");
    return {};
  };
  engine_ =
      std::move(*Engine::create({.eos_ids = {kFakeEos}}, std::move(runner), served_.tokenizer));
  const std::string out =
      reply_to(GeneratingEndpoint::kCompletions,
               R"({"prompt":"abc","max_tokens":1000,"ignore_eos":true,"stream":true})");
  EXPECT_EQ(out.find("[DONE]"), std::string::npos);
  const json::value last = parse_payload(sse_payloads(out).back());
  const std::string_view message = last.at("error").at("message").as_string();
  EXPECT_NE(message.find("the device is gone"), std::string_view::npos) << message;
  EXPECT_EQ(last.at("error").at("type"), "server_error");
}

}  // namespace
}  // namespace fathom
