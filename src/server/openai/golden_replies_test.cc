// Responses of every endpoint, streamed and complete, bitwise as in tests/data/wire and independent
// of how the engine splits the completion into events.
//
// FATHOM_UPDATE_WIRE_GOLDENS=1 rewrites the files.
#include <fmt/chrono.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>

#include "server/openai/model_bodies.h"
#include "server/openai/wire_test_support.h"

namespace fathom {
namespace {

constexpr std::string_view kTool =
    R"({"type":"function","function":{"name":"get_weather","description":"Weather of a city",)"
    R"("parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}})";
const std::string kCalls =
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": "
    "\"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": "
    "\"Kraków\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
const std::string kThought = "Add 2 and 2: \"four\".</think>It is 4.\n\té 你好";

struct Case {
  std::string name;
  GeneratingEndpoint endpoint;
  std::string fields;                   // of the body, except "stream"
  std::vector<ScriptedAnswer> answers;  // of all choices, prompt by prompt
};

std::string chat(std::string_view more) {
  return fmt::format(R"("model":"fathom-tiny","messages":[{{"role":"user","content":"Hi"}}]{})",
                     more);
}

std::vector<Case> cases() {
  using E = GeneratingEndpoint;
  const std::string tools = fmt::format(R"(,"tools":[{}])", kTool);
  const std::string anthropic_tools =
      R"(,"tools":[{"name":"get_weather","description":"Weather","input_schema":{"type":"object"}}])";
  const std::string responses_tools =
      R"(,"tools":[{"type":"function","name":"get_weather","parameters":{"type":"object"}}])";
  const ScriptedAnswer hello{.text = "Hello, \"world\"!\n"};
  const ScriptedAnswer cut{.text = "One two three", .finish = FinishReason::kLength};
  const ScriptedAnswer scored{.text = "Yes é", .top = 2};
  return {
      {"chat_plain", E::kChat, chat(""), {hello}},
      {"chat_thinking",
       E::kChat,
       chat(R"(,"thinking":{"type":"enabled"})"),
       {{.text = kThought, .cached_tokens = 1}}},
      {"chat_tools", E::kChat, chat(tools), {{.text = kCalls}}},
      {"chat_one_tool",
       E::kChat,
       chat(tools + R"(,"parallel_tool_calls":false)"),
       {{.text = kCalls}}},
      {"chat_choices_logprobs",
       E::kChat,
       chat(R"(,"n":2,"logprobs":true,"top_logprobs":2)"),
       {scored, cut}},
      {"chat_usage",
       E::kChat,
       chat(R"(,"stream_options":{"include_usage":true,"continuous_usage_stats":true})"),
       {cut}},
      {"chat_usage_at_end", E::kChat, chat(R"(,"stream_options":{"include_usage":true})"), {hello}},
      {"chat_token_ids", E::kChat, chat(R"(,"return_token_ids":true)"), {hello}},
      {"chat_stop", E::kChat, chat(R"(,"stop":"STOP")"), {{.text = "Before", .stop = "STOP"}}},
      {"completion_plain", E::kCompletions, R"("prompt":"Once upon")", {hello}},
      {"completion_prompts",
       E::kCompletions,
       R"("prompt":["A","B"],"n":2)",
       {hello, cut, cut, hello}},
      {"completion_logprobs", E::kCompletions, R"("prompt":"Once","logprobs":2)", {scored}},
      {"completion_ids",
       E::kCompletions,
       R"("prompt":[10,11,12],"echo":true,)"
       R"("return_token_ids":true,"stream_options":{"include_usage":true})",
       {hello}},
      {"messages_plain",
       E::kMessages,
       chat(R"(,"max_tokens":64)"),
       {{.text = "Hello, \"world\"!\n", .cached_tokens = 2}}},
      {"messages_thinking",
       E::kMessages,
       chat(R"(,"max_tokens":64,"thinking":{"type":"enabled","budget_tokens":1024})"),
       {{.text = kThought}}},
      {"messages_tools",
       E::kMessages,
       chat(R"(,"max_tokens":64)" + anthropic_tools),
       {{.text = kCalls}}},
      {"messages_stop",
       E::kMessages,
       chat(R"(,"max_tokens":64,"stop_sequences":["END"])"),
       {{.text = "Before", .stop = "END"}}},
      {"messages_cut", E::kMessages, chat(R"(,"max_tokens":4)"), {cut}},
      {"responses_plain", E::kResponses, R"("input":"Hi","instructions":"Be brief.")", {hello}},
      {"responses_reasoning",
       E::kResponses,
       R"("input":"Hi","reasoning":{"effort":"high"})",
       {{.text = kThought}}},
      {"responses_tools",
       E::kResponses,
       R"("input":[{"role":"user","content":"Hi"}],"metadata":{"a":"b"})" + responses_tools,
       {{.text = kCalls}}},
      {"responses_cut", E::kResponses, R"("input":"Hi","max_output_tokens":8)", {cut}},
      {"responses_logprobs", E::kResponses, R"("input":"Hi","top_logprobs":2)", {scored}},
      {"generate_text", E::kGenerate, R"("text":"Once")", {hello}},
      {"generate_ids",
       E::kGenerate,
       R"("input_ids":[[10,11],[12]],"return_logprob":true,"top_logprobs_num":2,)"
       R"("logprob_start_len":0,"rid":"mine")",
       {{.text = "Yes é", .top = 2, .prompt_top = 2}, {.text = "No", .top = 2, .prompt_top = 2}}},
  };
}

Generation prepared(const Case& one, bool stream) {
  const std::string body = fmt::format("{{{},\"stream\":{}}}", one.fields, stream);
  auto generation = prepare(one.endpoint, body, tiny_model(), RequestLimits(), kTestIdentity);
  EXPECT_TRUE(generation) << one.name << ": " << generation.error().message;
  return std::move(*generation);
}

struct Step {
  size_t prompt;
  Event event;
};

// Interleaves the choices' events. `cut`: merges each choice's events into two at this index.
std::vector<Step> steps_of(const Case& one, const Generation& generation,
                           std::optional<size_t> cut = {}) {
  std::vector<std::vector<Event>> choices;
  const auto n = one.answers.size() / generation.requests.size();
  for (size_t i = 0; i < one.answers.size(); ++i) {
    auto events = events_of(one.answers[i], generation.requests[i / n], static_cast<int>(i % n));
    choices.push_back(cut ? merged_at(events, *cut) : std::move(events));
  }
  std::vector<Step> steps;
  for (size_t round = 0, left = 1; left > 0; ++round) {
    left = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (round >= choices[i].size()) continue;
      steps.push_back({i / n, choices[i][round]});
      ++left;
    }
  }
  return steps;
}

std::string reply_of(const Case& one, bool stream, std::optional<size_t> cut = {}) {
  const Generation generation = prepared(one, stream);
  std::string out;
  for (const Step& step : steps_of(one, generation, cut)) {
    EXPECT_FALSE(generation.writer->ended()) << one.name;
    generation.writer->push(step.prompt, step.event, out);
  }
  EXPECT_TRUE(generation.writer->ended()) << one.name;
  EXPECT_FALSE(generation.writer->failure()) << one.name;
  return out;
}

void expect_golden(const std::string& name, const std::string& actual) {
  const std::string path = FATHOM_SOURCE_DIR "/tests/data/wire/" + name;
  if (std::getenv("FATHOM_UPDATE_WIRE_GOLDENS") != nullptr) {
    std::ofstream(path, std::ios::binary) << actual << '\n';
  }
  const auto expected = read_text_file(path, 1 << 20);
  ASSERT_TRUE(expected) << expected.error().message;
  EXPECT_EQ(actual + "\n", *expected) << name;
}

class GoldenReply : public testing::TestWithParam<Case> {};

TEST_P(GoldenReply, Streamed) {
  expect_golden(GetParam().name + ".stream", reply_of(GetParam(), true));
}

TEST_P(GoldenReply, Whole) {
  const std::string body = reply_of(GetParam(), false);
  parse_payload(body);
  expect_golden(GetParam().name + ".json", body);
}

TEST_P(GoldenReply, WholeDoesNotDependOnTheCut) {
  const std::string expected = reply_of(GetParam(), false);
  for (size_t cut = 0; cut < 48; ++cut) EXPECT_EQ(reply_of(GetParam(), false, cut), expected);
}

// The parts of each choice that a client assembles from a stream, in a form comparable with the
// complete response.
struct Assembled {
  std::map<std::string, std::string> parts;

  void add(const std::string& key, const json::value* value) {
    if (value == nullptr || value->is_null()) return;
    parts[key] += value->is_string() ? std::string(value->get_string()) : json::serialize(*value);
  }
  bool operator==(const Assembled&) const = default;
};

const json::value* find(const json::value& value, std::string_view key) {
  return value.is_object() ? value.get_object().if_contains(key) : nullptr;
}

void add_openai(const json::value& reply, const char* message_key, Assembled& out) {
  for (const json::value& choice : reply.at("choices").as_array()) {
    const std::string index = json::serialize(choice.at("index"));
    out.add(index + ".text", find(choice, "text"));
    out.add(index + ".finish", find(choice, "finish_reason"));
    out.add(index + ".matched", find(choice, "matched_stop"));
    out.add(index + ".reason", find(choice, "stop_reason"));
    const json::value* message = find(choice, message_key);
    if (message == nullptr) continue;
    out.add(index + ".role", find(*message, "role"));
    out.add(index + ".content", find(*message, "content"));
    out.add(index + ".reasoning", find(*message, "reasoning_content"));
    const json::value* calls = find(*message, "tool_calls");
    if (calls == nullptr) continue;
    size_t number = 0;
    for (const json::value& call : calls->as_array()) {
      const json::value* at = find(call, "index");
      const std::string key =
          index + ".call" + (at == nullptr ? std::to_string(number++) : json::serialize(*at));
      out.add(key + ".id", find(call, "id"));
      out.add(key + ".name", find(call.at("function"), "name"));
      out.add(key + ".arguments", find(call.at("function"), "arguments"));
    }
  }
}

Assembled assembled_openai(const std::string& stream) {
  Assembled out;
  const auto payloads = sse_payloads(stream);
  EXPECT_EQ(payloads.back(), "[DONE]");
  for (size_t i = 0; i + 1 < payloads.size(); ++i) {
    add_openai(parse_payload(payloads[i]), "delta", out);
  }
  return out;
}

// Assembles the blocks of a message, complete or from the events of a stream.
Assembled assembled_messages(const std::string& stream) {
  Assembled out;
  for (const std::string& payload : sse_payloads(stream)) {
    const json::value event = parse_payload(payload);
    const std::string index =
        "block" +
        (find(event, "index") == nullptr ? std::string() : json::serialize(event.at("index")));
    if (const json::value* block = find(event, "content_block")) {
      for (const char* key : {"type", "id", "name"}) out.add(index + key, find(*block, key));
    }
    const json::value* delta = find(event, "delta");
    if (delta == nullptr) continue;
    for (const char* key : {"text", "thinking"}) out.add(index + key, find(*delta, key));
    out.add(index + "input", find(*delta, "partial_json"));
    out.add("stop_reason", find(*delta, "stop_reason"));
    out.add("stop_sequence", find(*delta, "stop_sequence"));
    if (find(*delta, "stop_reason") != nullptr) out.add("usage", find(event, "usage"));
  }
  for (auto& [key, text] : out.parts) {
    if (key.ends_with("input")) text = json::serialize(parse_payload(text));
  }
  return out;
}

Assembled assembled_message(const json::value& message) {
  Assembled out;
  size_t number = 0;
  for (const json::value& block : message.at("content").as_array()) {
    const std::string index = "block" + std::to_string(number++);
    for (const char* key : {"type", "id", "name", "text", "thinking", "input"}) {
      out.add(index + key, find(block, key));
    }
  }
  for (const char* key : {"stop_reason", "stop_sequence", "usage"})
    out.add(key, find(message, key));
  return out;
}

void expect_same(const Case& one, const std::string& stream, const std::string& body) {
  const json::value whole = parse_payload(body);
  switch (one.endpoint) {
    case GeneratingEndpoint::kChat: {
      Assembled expected;
      add_openai(whole, "message", expected);
      // The first chunk's content is empty; a complete response with calls only has null.
      Assembled actual = assembled_openai(stream);
      for (Assembled* side : {&expected, &actual}) {
        std::erase_if(side->parts, [](const auto& part) { return part.second.empty(); });
      }
      EXPECT_EQ(actual.parts, expected.parts) << one.name;
      break;
    }
    case GeneratingEndpoint::kCompletions: {
      Assembled expected;
      add_openai(whole, "message", expected);
      EXPECT_EQ(assembled_openai(stream).parts, expected.parts) << one.name;
      break;
    }
    case GeneratingEndpoint::kMessages:
      EXPECT_EQ(assembled_messages(stream).parts, assembled_message(whole).parts) << one.name;
      break;
    case GeneratingEndpoint::kResponses: {
      const json::value last = parse_payload(sse_payloads(stream).back());
      EXPECT_EQ(last.at("response"), whole) << one.name;
      break;
    }
    case GeneratingEndpoint::kGenerate: {
      const auto payloads = sse_payloads(stream);
      EXPECT_EQ(payloads.back(), "[DONE]");
      // Each event repeats its choice so far, so the last event of a choice is complete.
      std::map<std::string, json::value> last;
      for (size_t i = 0; i + 1 < payloads.size(); ++i) {
        json::value event = parse_payload(payloads[i]);
        const json::value* index = find(event, "index");
        last[index == nullptr ? "" : json::serialize(*index)] = std::move(event);
      }
      json::array list;
      for (auto& [index, event] : last) list.push_back(std::move(event));
      EXPECT_EQ(whole.is_array() ? json::value(list) : list.front(), whole) << one.name;
      break;
    }
  }
}

TEST_P(GoldenReply, StreamsPutTogetherAreTheWholeReplyHoweverCut) {
  const std::string whole = reply_of(GetParam(), false);
  expect_same(GetParam(), reply_of(GetParam(), true), whole);
  for (size_t cut = 0; cut < 48; ++cut) {
    expect_same(GetParam(), reply_of(GetParam(), true, cut), whole);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenReply, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

Event failed_event(Code code, const char* why) {
  Event event;
  event.finish = FinishReason::kError;
  event.error = {code, why};
  return event;
}

TEST(FailedReply, StreamsEndWithAnErrorAndWithoutDone) {
  for (const char* name :
       {"chat_plain", "completion_plain", "messages_plain", "responses_plain", "generate_text"}) {
    const auto all = cases();
    const Case& one =
        *std::find_if(all.begin(), all.end(), [&](const Case& each) { return each.name == name; });
    const Generation generation = prepared(one, true);
    const auto steps = steps_of(one, generation);
    std::string out;
    generation.writer->push(0, steps[0].event, out);
    generation.writer->push(0, failed_event(Code::kInternal, "the model \"broke\""), out);
    EXPECT_TRUE(generation.writer->ended());
    ASSERT_TRUE(generation.writer->failure());
    EXPECT_EQ(generation.writer->failure()->status, 500);
    EXPECT_EQ(out.find("[DONE]"), std::string::npos);
    expect_golden(std::string(name) + ".failed", out);
    const std::string before = out;
    generation.writer->push(0, steps[1].event, out);
    EXPECT_EQ(out, before) << "something follows the end";
  }
}

TEST(FailedReply, WholeRepliesHaveNoBodyAndAStatus) {
  const Generation generation = prepared(cases().front(), false);
  std::string out;
  generation.writer->push(0, failed_event(Code::kUnavailable, "the engine was stopped"), out);
  EXPECT_EQ(out, "");
  ASSERT_TRUE(generation.writer->failure());
  EXPECT_EQ(generation.writer->failure()->status, 503);
  EXPECT_EQ(generation.writer->failure()->to_json(),
            R"({"error":{"message":"the engine was stopped","type":"unavailable_error",)"
            R"("param":null,"code":"unavailable"}})");
}

// Clients return results by the ids of the calls.
TEST(ChatReply, CallsHaveIdsOfTheirOwnInAllChoices) {
  const Case one{"ids",
                 GeneratingEndpoint::kChat,
                 chat(fmt::format(R"(,"n":3,"tools":[{}])", kTool)),
                 {{.text = kCalls}, {.text = kCalls}, {.text = kCalls}}};
  std::set<std::string> whole, streamed;
  const auto collect = [](const json::value& choice, const char* message_key,
                          std::set<std::string>& ids) {
    const json::value* calls = find(choice.at(message_key), "tool_calls");
    if (calls == nullptr) return;
    for (const json::value& call : calls->as_array()) {
      if (const json::value* id = find(call, "id")) ids.emplace(id->as_string());
    }
  };
  const json::value body = parse_payload(reply_of(one, false));
  for (const json::value& choice : body.at("choices").as_array()) collect(choice, "message", whole);
  for (const std::string& payload : sse_payloads(reply_of(one, true))) {
    if (payload == "[DONE]") continue;
    const json::value chunk = parse_payload(payload);
    for (const json::value& choice : chunk.at("choices").as_array()) {
      collect(choice, "delta", streamed);
    }
  }
  EXPECT_EQ(whole.size(), 3 * 2u);
  EXPECT_EQ(streamed, whole);
}

// An answer that ends by itself amid what might become a marker: what was held back is its text.
TEST(ChatReply, TextThatWasHeldBackComesWithTheEnd) {
  const auto message = [](std::string_view fields, const char* text, const char* field) {
    const Case one{"held", GeneratingEndpoint::kChat, chat(fields), {{.text = text}}};
    const json::value whole = parse_payload(reply_of(one, false));
    std::string streamed;
    for (const std::string& payload : sse_payloads(reply_of(one, true))) {
      if (payload == "[DONE]") continue;
      const json::value chunk = parse_payload(payload);
      const json::value* part = find(chunk.at("choices").at(0).at("delta"), field);
      if (part != nullptr && part->is_string()) streamed += part->as_string();
    }
    EXPECT_EQ(whole.at("choices").at(0).at("message").at(field), json::value(text));
    EXPECT_EQ(streamed, text);
  };
  message(fmt::format(R"(,"tools":[{}])", kTool), "Look: <｜tool▁calls", "content");
  message(R"(,"thinking":{"type":"enabled"})", "Add them. </thi", "reasoning_content");
}

// An answer that is cut within a call, by its length or a stop string: none of its markup is text.
TEST(ChatReply, ACallThatIsCutIsNoText) {
  const std::string text = kCalls.substr(0, kCalls.find("weather<"));
  for (const ScriptedAnswer& answer :
       {ScriptedAnswer{.text = text, .finish = FinishReason::kLength},
        ScriptedAnswer{.text = text, .stop = "weather"}}) {
    const Case one{
        "cut", GeneratingEndpoint::kChat, chat(fmt::format(R"(,"tools":[{}])", kTool)), {answer}};
    const json::value whole = parse_payload(reply_of(one, false));
    EXPECT_EQ(whole.at("choices").at(0).at("message").at("content"), json::value("Let me look."));
    expect_same(one, reply_of(one, true), json::serialize(whole));
  }
}

TEST(CompletionReply, MaxTokensZeroScoresThePromptAlone) {
  const Case one{"score",
                 GeneratingEndpoint::kCompletions,
                 R"("prompt":"Once upon","max_tokens":0,"echo":true,"logprobs":1)",
                 {{.text = "x", .finish = FinishReason::kLength, .top = 1, .prompt_top = 1}}};
  expect_golden("completion_score.json", reply_of(one, false));
}

TEST(Bodies, AreGolden) {
  const ServedModel& served = tiny_model();
  expect_golden("models.json", models_body(served));
  expect_golden("model.json", model_body(served, "tiny").value());
  EXPECT_EQ(model_body(served, "tiny", ErrorShape::kAnthropic).value(),
            fmt::format(R"({{"type":"model","id":"tiny","display_name":"tiny","created_at":"{}",)"
                        R"("lifecycle":"active","max_input_tokens":{}}})",
                        fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(served.created)),
                        served.max_model_len));
  const auto models = parse_json(models_body(served, ErrorShape::kAnthropic), "models").value();
  EXPECT_EQ(models.at("data").as_array().size(), served.names.size());
  EXPECT_EQ(models.at("first_id"), json::value(served.names.front()));
  EXPECT_EQ(models.at("has_more"), json::value(false));
  const auto applied = apply_template_body(
      R"({"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ten",)"
      R"("prefix":true}]})",
      served, RequestLimits());
  EXPECT_EQ(applied.value(),
            R"({"prompt":"<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Ten"})");
  EXPECT_EQ(apply_template_body("{}", served, RequestLimits()).error().param, "messages");
  expect_golden("version.json", version_body(served));
  expect_golden("get_model_info.json", get_model_info_body(served));
  expect_golden("server_info.json", server_info_body(served, {{"flags", {{"port", 8000}}}}));
  const auto tokenized =
      tokenize_body(R"({"prompt":"Hi é你","return_token_strs":true})", served, RequestLimits());
  ASSERT_TRUE(tokenized) << tokenized.error().message;
  expect_golden("tokenize.json", *tokenized);
  const auto chat_ids =
      tokenize_body(R"({"messages":[{"role":"user","content":"Hi"}]})", served, RequestLimits());
  ASSERT_TRUE(chat_ids) << chat_ids.error().message;
  expect_golden("tokenize_chat.json", *chat_ids);
  const auto text = detokenize_body(R"({"tokens":[300,301]})", served, RequestLimits());
  ASSERT_TRUE(text) << text.error().message;
  expect_golden("detokenize.json", *text);
  const auto count = count_tokens_body(
      R"({"model":"m","messages":[{"role":"user","content":"Hi"}]})", served, RequestLimits());
  ASSERT_TRUE(count) << count.error().message;
  expect_golden("count_tokens.json", *count);
}

TEST(Bodies, AnUnknownModelIs404) {
  const auto missing = model_body(tiny_model(), "gpt-\"4\"");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().status, 404);
  EXPECT_EQ(missing.error().to_json(),
            R"({"error":{"message":"the model \"gpt-\\\"4\\\"\" is not served here, but )"
            R"(\"fathom-tiny\" is","type":"not_found_error","param":"model",)"
            R"("code":"model_not_found"}})");
}

TEST(Bodies, DetokenizeNamesTheIdOutsideTheVocabulary) {
  const auto text = detokenize_body(R"({"tokens":[1,99999999]})", tiny_model(), RequestLimits());
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().param, "tokens[1]");
  const auto ends_with = [](int64_t id) {
    return detokenize_body(fmt::format(R"({{"tokens":[{}]}})", id), tiny_model(), RequestLimits());
  };
  EXPECT_TRUE(ends_with(tiny_model().vocab_size - 1));
  EXPECT_FALSE(ends_with(tiny_model().vocab_size));
}

}  // namespace
}  // namespace fathom
