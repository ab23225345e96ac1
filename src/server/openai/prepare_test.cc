// From bodies to engine requests: prompts, sampling, lengths, grammars.
#include <algorithm>

#include "chat/stream_parser.h"
#include "server/openai/tool_grammar.h"
#include "server/openai/wire_test_support.h"

namespace fathom {
namespace {

using E = GeneratingEndpoint;

std::string chat(std::string_view more) {
  return fmt::format(R"({{"messages":[{{"role":"user","content":"Hi"}}]{}}})", more);
}

constexpr std::string_view kTools =
    R"(,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object",)"
    R"("properties":{"x":{"type":"integer"}}}}},{"type":"function","function":{"name":"g"}}])";

Generation accepted(E endpoint, std::string_view body, const ServedModel& served = tiny_model()) {
  auto generation = prepare(endpoint, body, served, RequestLimits(), kTestIdentity);
  EXPECT_TRUE(generation) << body << ": " << generation.error().message;
  return std::move(*generation);
}

ApiError refused(E endpoint, std::string_view body, const ServedModel& served = tiny_model()) {
  const auto generation = prepare(endpoint, body, served, RequestLimits(), kTestIdentity);
  EXPECT_FALSE(generation) << body;
  return generation ? ApiError() : generation.error();
}

std::string prompt_of(const Generation& generation) {
  return tiny_model().tokenizer->decode(generation.requests.at(0).prompt_ids);
}

std::string rendered(std::string_view conversation, ChatFormat format = ChatFormat::kFathomTiny) {
  const auto parsed = parse_conversation(json::parse(conversation), "test");
  EXPECT_TRUE(parsed) << parsed.error().message;
  return render(format, *parsed).value().text();
}

TEST(PrepareChat, FunctionsAreRefusedByName) {
  for (const auto& [fields, param, instead] :
       {std::tuple(R"(,"functions":[{"name":"f"}])", "functions", "use tools"),
        std::tuple(R"(,"function_call":"auto")", "function_call", "use tool_choice")}) {
    const ApiError error = refused(E::kChat, chat(fields));
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.param, param);
    EXPECT_EQ(error.code, "unsupported_parameter");
    EXPECT_NE(error.message.find(instead), std::string::npos) << error.message;
  }
  accepted(E::kChat, chat(R"(,"functions":null)"));
}

TEST(PrepareChat, SamplingFieldsReachTheEngine) {
  const Generation generation = accepted(
      E::kChat,
      chat(R"(,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"repetition_penalty":1.1,)"
           R"("presence_penalty":-1,"frequency_penalty":2,"logit_bias":{"12":-100,"7":1.5},)"
           R"("seed":-1,"min_tokens":2,"max_tokens":9,"stop":"END","stop_token_ids":[5],)"
           R"("ignore_eos":true,"include_stop_str_in_output":true,"skip_special_tokens":false,)"
           R"("n":3,"logprobs":true,"top_logprobs":4,"prompt_logprobs":2,"cache_salt":"s",)"
           R"("priority":-7)"));
  const SamplingParams& params = generation.requests.at(0).sampling;
  EXPECT_EQ(params.temperature, 0.5);
  EXPECT_EQ(params.top_p, 0.9);
  EXPECT_EQ(params.top_k, 40);
  EXPECT_EQ(params.min_p, 0.1);
  EXPECT_EQ(params.repetition_penalty, 1.1);
  EXPECT_EQ(params.presence_penalty, -1);
  EXPECT_EQ(params.frequency_penalty, 2);
  EXPECT_EQ(params.logit_bias, (std::vector<std::pair<int32_t, float>>{{12, -100}, {7, 1.5f}}));
  EXPECT_EQ(params.seed, static_cast<uint64_t>(-1));
  EXPECT_EQ(params.min_tokens, 2);
  EXPECT_EQ(params.max_tokens, 9);
  EXPECT_EQ(params.stop, std::vector<std::string>{"END"});
  EXPECT_EQ(params.stop_token_ids, std::vector<int32_t>{5});
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_TRUE(params.include_stop_in_output);
  EXPECT_FALSE(params.skip_special_tokens);
  EXPECT_EQ(params.n, 3);
  EXPECT_EQ(params.logprobs, 4);
  EXPECT_EQ(params.prompt_logprobs, 2);
  EXPECT_EQ(generation.cache_salt, "s");
  EXPECT_EQ(generation.priority, 0) << "limits do not allow it";
  EXPECT_EQ(generation.writer->spec().model, "fathom-tiny");
}

TEST(PrepareChat, DefaultsAreTheModels) {
  ServedModel served = tiny_model();
  served.temperature = 0.3;
  served.top_k = 11;
  const Generation generation = accepted(E::kChat, chat(R"(,"seed":null,"n":null)"), served);
  const SamplingParams& params = generation.requests.at(0).sampling;
  EXPECT_EQ(params.temperature, 0.3);
  EXPECT_EQ(params.top_p, 1);
  EXPECT_EQ(params.top_k, 11);
  EXPECT_EQ(params.max_tokens, std::nullopt);
  EXPECT_EQ(params.seed, std::nullopt);
  EXPECT_EQ(params.logprobs, -1);
}

TEST(PrepareChat, MaxCompletionTokensGoesBeforeMaxTokens) {
  const Generation generation =
      accepted(E::kChat, chat(R"(,"max_tokens":3,"max_completion_tokens":5)"));
  EXPECT_EQ(generation.requests.at(0).sampling.max_tokens, 5);
}

TEST(PrepareChat, ThePromptIsTheChatFormats) {
  const std::string body =
      R"({"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":[)"
      R"({"type":"text","text":"Hi <｜User｜>"},{"type":"text","text":"!"}]}]})";
  const Generation generation = accepted(E::kChat, body);
  const std::string expected = rendered(body);
  EXPECT_EQ(prompt_of(generation), expected);
  // The user's text stays ordinary text: the role token's id occurs once.
  const auto& ids = generation.requests.at(0).prompt_ids;
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *tiny_model().tokenizer->token_id("<｜User｜>")), 1);
}

TEST(PrepareChat, TheLastMessageIsContinuedWhereTheRequestSaysSo) {
  const auto body = [](std::string_view last, std::string_view more) {
    return fmt::format(R"({{"messages":[{{"role":"user","content":"Hi"}},{}]{}}})", last, more);
  };
  const std::string ended = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Ten";
  const std::string plain = R"({"role":"assistant","content":"Ten"})";
  const auto prompt = [&](std::string_view last, std::string_view more) {
    return prompt_of(accepted(E::kChat, body(last, more)));
  };
  EXPECT_EQ(prompt(R"({"role":"assistant","content":"Ten","prefix":true})", ""), ended);
  EXPECT_EQ(prompt(plain, R"(,"continue_final_message":true,"add_generation_prompt":false)"),
            ended);
  EXPECT_EQ(prompt(plain, R"(,"continue_final_message":true)"), ended);
  EXPECT_EQ(prompt(plain, ""), ended + "<｜end▁of▁sentence｜>");
  EXPECT_EQ(prompt_of(accepted(E::kMessages, body(plain, R"(,"max_tokens":5)"))), ended);
  const Generation thinking = accepted(
      E::kChat,
      body(R"({"role":"assistant","content":"","reasoning_content":"So","prefix":true})", ""));
  EXPECT_TRUE(thinking.writer->spec().prompts.at(0).opens_reasoning);
  EXPECT_TRUE(thinking.writer->spec().prompts.at(0).continues_answer);
  EXPECT_EQ(refused(E::kChat, body(plain, R"(,"continue_final_message":true,)"
                                          R"("add_generation_prompt":true)"))
                .param,
            "continue_final_message");
  const ApiError error = refused(
      E::kChat, body(R"({"role":"user","content":"x"})", R"(,"continue_final_message":true)"));
  EXPECT_EQ(error.param, "messages[1].role");
}

TEST(PrepareChat, ThinkingComesFromAnyOfItsFields) {
  const auto thinks = [](std::string_view more) {
    return accepted(E::kChat, chat(more)).writer->spec().prompts.at(0).opens_reasoning;
  };
  EXPECT_FALSE(thinks(""));
  EXPECT_TRUE(thinks(R"(,"thinking":true)"));
  EXPECT_TRUE(thinks(R"(,"thinking":{"type":"enabled","budget_tokens":10})"));
  EXPECT_FALSE(thinks(R"(,"thinking":{"type":"disabled"})"));
  EXPECT_TRUE(thinks(R"(,"chat_template_kwargs":{"thinking":true})"));
  EXPECT_TRUE(thinks(R"(,"chat_template_kwargs":{"enable_thinking":true})"));
  EXPECT_FALSE(thinks(R"(,"chat_template_kwargs":{"thinking":false},"thinking":true)"));
  EXPECT_TRUE(thinks(R"(,"reasoning_effort":"low")"));
  EXPECT_FALSE(thinks(R"(,"reasoning_effort":"none")"));
  EXPECT_FALSE(thinks(R"(,"reasoning_effort":"minimal")"));
}

TEST(PrepareChat, PromptAndAnswerMustFitTheContext) {
  ServedModel served = tiny_model();
  served.max_model_len = 20;
  const std::string body = chat(R"(,"max_tokens":16)");
  const auto prompt = std::ssize(accepted(E::kChat, chat(""), served).requests.at(0).prompt_ids);
  const ApiError error = refused(E::kChat, body, served);
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.code, "context_length_exceeded");
  EXPECT_EQ(error.param, "messages");
  EXPECT_EQ(error.message,
            fmt::format("the prompt has {} tokens and 16 more are asked for, together more than "
                        "the context of 20 tokens",
                        prompt));
  accepted(E::kChat, chat(fmt::format(R"(,"max_tokens":{})", 20 - prompt)), served);
  served.max_model_len = prompt;
  EXPECT_EQ(refused(E::kChat, chat(""), served).message,
            fmt::format("the prompt has {} tokens, which leaves no room to answer: the context "
                        "has {}",
                        prompt, prompt));
}

TEST(PrepareChat, PromptsOfTooManyBytesAreNotTokenized) {
  const std::string body = fmt::format(R"({{"messages":[{{"role":"user","content":"{}"}}]}})",
                                       std::string(2048 * 8 + 1, 'a'));
  const ApiError error = refused(E::kChat, body);
  EXPECT_EQ(error.code, "context_length_exceeded");
  EXPECT_NE(
      error.message.find("bytes, more than the context of 2048 tokens can hold (16384 bytes)"),
      std::string::npos)
      << error.message;
  EXPECT_EQ(
      refused(E::kCompletions, fmt::format(R"({{"prompt":"{}"}})", std::string(2048 * 8 + 1, 'a')))
          .param,
      "prompt");
}

TEST(PrepareChat, RefusesWhatDoesNotGoTogether) {
  EXPECT_EQ(refused(E::kChat, chat(R"(,"top_logprobs":2)")).param, "top_logprobs");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"stream":true,"prompt_logprobs":1)")).param,
            "prompt_logprobs");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"max_tokens":2,"min_tokens":3)")).param, "min_tokens");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"min_tokens":2048)")).param, "min_tokens");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"tool_choice":"required")")).param, "tool_choice");
  EXPECT_EQ(refused(E::kChat, chat(std::string(kTools) +
                                   R"(,"tool_choice":{"type":"function","function":{"name":"h"}})"))
                .message,
            "tool_choice names the tool \"h\", which tools does not declare");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"guided_regex":"a","guided_choice":["b"])")).message,
            "guided_choice and guided_regex both say what the answer looks like, only one may");
  ServedModel served = tiny_model();
  served.chat_format = invalid("no template");
  EXPECT_EQ(refused(E::kChat, chat(""), served).status, 400);
}

TEST(PrepareChat, StructuredOutputBecomesAGrammarSpec) {
  using Kind = GrammarSpec::Kind;
  const auto grammar = [](std::string_view more) { return accepted(E::kChat, chat(more)).grammar; };
  EXPECT_EQ(grammar(R"(,"response_format":{"type":"text"})"), std::nullopt);
  EXPECT_EQ(grammar(R"(,"response_format":{"type":"json_object"})"),
            GrammarSpec{Kind::kJsonObject});
  EXPECT_EQ(grammar(R"(,"response_format":{"type":"json_schema","json_schema":{"name":"n",)"
                    R"("schema":{"type":"array"},"strict":true}})"),
            (GrammarSpec{Kind::kJsonSchema, R"({"type":"array"})"}));
  EXPECT_EQ(grammar(R"(,"guided_json":{"type":"string"})"),
            (GrammarSpec{Kind::kJsonSchema, R"({"type":"string"})"}));
  EXPECT_EQ(grammar(R"(,"guided_json":"{\"type\": \"string\"}")"),
            (GrammarSpec{Kind::kJsonSchema, R"({"type":"string"})"}));
  EXPECT_EQ(grammar(R"(,"guided_choice":["a","b"])"), (GrammarSpec{Kind::kChoice, "", {"a", "b"}}));
  EXPECT_EQ(grammar(R"(,"structured_outputs":{"regex":"[ab]+"})"),
            (GrammarSpec{Kind::kRegex, "[ab]+"}));
  EXPECT_EQ(grammar(R"(,"guided_grammar":"root ::= \"a\"")"),
            (GrammarSpec{Kind::kEbnf, "root ::= \"a\""}));
  EXPECT_EQ(grammar(R"(,"structured_outputs":{"json_object":true},"thinking":true)"),
            (GrammarSpec{Kind::kJsonObject, "", {}, true}));
}

TEST(PrepareChat, TheFieldThatAsksForAGrammarIsKnown) {
  const auto param = [](std::string_view more) {
    return accepted(E::kChat, chat(more)).grammar_param;
  };
  EXPECT_EQ(param(""), "");
  EXPECT_EQ(param(R"(,"response_format":{"type":"json_object"})"), "response_format");
  EXPECT_EQ(param(R"(,"structured_outputs":{"regex":"[ab]+"})"), "structured_outputs.regex");
  EXPECT_EQ(param(std::string(kTools) + R"(,"tool_choice":"required")"), "tools");
  EXPECT_EQ(accepted(E::kResponses, R"({"input":"a","text":{"format":{"type":"json_object"}}})")
                .grammar_param,
            "text.format");
  EXPECT_EQ(accepted(E::kCompletions, R"({"prompt":"a","guided_choice":["b"]})").grammar_param,
            "guided_choice");
}

TEST(PrepareChat, SchemasHaveALimit) {
  const std::string big = fmt::format(
      R"(,"response_format":{{"type":"json_schema","json_schema":{{"name":"n","schema":{{"title":"{}"}}}}}})",
      std::string(kMaxGrammarBytes, 'x'));
  const ApiError error = refused(E::kChat, chat(big));
  EXPECT_EQ(error.param, "response_format");
  EXPECT_NE(error.message.find("at most 65536 are allowed"), std::string::npos);
  EXPECT_EQ(refused(E::kChat, chat(R"(,"guided_json":"{")")).param, "guided_json");
}

std::string tool_format(std::string_view more) {
  const auto grammar = accepted(E::kChat, chat(std::string(kTools) + std::string(more))).grammar;
  if (!grammar) return "none";
  EXPECT_EQ(grammar->kind, GrammarSpec::Kind::kStructuralTag);
  return json::serialize(parse_json(grammar->text, "tag", 100).value().at("format"));
}

TEST(ToolGrammar, FollowsTheChoice) {
  EXPECT_EQ(tool_format(""), "none");
  EXPECT_EQ(tool_format(R"(,"tool_choice":"none")"), "none");
  const std::string f =
      R"({"type":"tag","begin":"<｜tool▁call▁begin｜>f<｜tool▁sep｜>","content":{"type":"json_schema",)"
      R"("json_schema":{"type":"object","properties":{"x":{"type":"integer"}}}},)"
      R"("end":"<｜tool▁call▁end｜>"})";
  const std::string g =
      R"({"type":"tag","begin":"<｜tool▁call▁begin｜>g<｜tool▁sep｜>","content":{"type":"json_schema",)"
      R"("json_schema":{"type":"object","properties":{}}},"end":"<｜tool▁call▁end｜>"})";
  const auto calls = [](const std::string& tags, const char* one) {
    return R"({"type":"sequence","elements":[{"type":"const_string","value":"<｜tool▁calls▁begin｜>"},)"
           R"({"type":"tags_with_separator","tags":[)" +
           tags + R"(],"separator":"","at_least_one":true,"stop_after_first":)" + one +
           R"(},{"type":"const_string","value":"<｜tool▁calls▁end｜>"}]})";
  };
  EXPECT_EQ(tool_format(R"(,"tool_choice":"required")"), calls(f + "," + g, "false"));
  EXPECT_EQ(tool_format(R"(,"tool_choice":"required","parallel_tool_calls":false)"),
            calls(f + "," + g, "true"));
  EXPECT_EQ(tool_format(R"(,"tool_choice":{"type":"function","function":{"name":"g"}})"),
            calls(g, "true"));
  EXPECT_EQ(tool_format(R"(,"response_format":{"type":"json_object"})"),
            R"({"type":"or","elements":[)" + calls(f + "," + g, "false") +
                R"(,{"type":"json_schema","json_schema":{"type":"object"}}]})");
}

TEST(ToolGrammar, TakesSchemasAsDeepAsABodyMayBe) {
  std::string schema = "{}";
  for (int i = 0; i < 59; ++i) schema = R"({"items":)" + schema + "}";
  const std::string format =
      R"(,"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":)" + schema +
      "}}";
  EXPECT_NE(tool_format(format).find(schema), std::string::npos);
  EXPECT_NE(tool_format(R"(,"guided_json":)" + json::serialize(json::value(schema))).find(schema),
            std::string::npos);
}

TEST(ToolGrammar, EveryFormatHasItsOwnMarkers) {
  const std::vector<Tool> tools = {make_tool("f", "", std::nullopt)};
  const ToolChoice required{ToolChoice::Mode::kRequired};
  EXPECT_EQ(tool_grammar(ChatFormat::kV2, tools, required, true, std::nullopt), std::nullopt);
  const auto text = [&](ChatFormat format) {
    return tool_grammar(format, tools, required, true, std::nullopt).value().text;
  };
  EXPECT_NE(text(ChatFormat::kV3)
                .find(R"("begin":"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n")"),
            std::string::npos);
  EXPECT_NE(text(ChatFormat::kKimiK2).find(R"("pattern":"[0-9]{1,4}")"), std::string::npos);
  EXPECT_NE(text(ChatFormat::kV32).find(R"("content":{"type":"any_text"})"), std::string::npos);
}

// GLM's arguments are a tag each, strings as they are, the rest as JSON.
TEST(ToolGrammar, GlmHasAKeyAndAValueAnArgument) {
  const auto schema = parse_json(R"({"type": "object", "required": ["q"], "properties":
      {"q": {"type": "string"}, "n": {"type": "integer"}}})",
                                 "test");
  const auto grammar = tool_grammar(ChatFormat::kGlm47, {make_tool("f", "", *schema)},
                                    {ToolChoice::Mode::kRequired}, true, std::nullopt);
  const json::value format = json::parse(grammar.value().text).at("format");
  const json::value call = format.at("tags").at(0);
  EXPECT_EQ(call.at("begin").as_string(), "<tool_call>f");
  EXPECT_EQ(call.at("end").as_string(), "</tool_call>");
  const json::value arguments = call.at("content");
  EXPECT_TRUE(arguments.at("at_least_one").as_bool());
  const json::value q = arguments.at("tags").at(0), n = arguments.at("tags").at(1);
  EXPECT_EQ(q.at("begin").as_string(), "<arg_key>q</arg_key><arg_value>");
  EXPECT_EQ(q.at("content").at("type").as_string(), "any_text");
  EXPECT_EQ(n.at("content").at("json_schema").at("type").as_string(), "integer");
  EXPECT_EQ(n.at("end").as_string(), "</arg_value>");
}

// GigaChat's messages hold one call, however many a client would take.
TEST(ToolGrammar, GigachatHasOneCallAMessage) {
  for (const ChatFormat format : {ChatFormat::kGigachat3, ChatFormat::kGigachat31}) {
    const auto grammar = tool_grammar(format, {make_tool("look_up", "", std::nullopt)},
                                      {ToolChoice::Mode::kRequired}, true, std::nullopt);
    const json::value list = json::parse(grammar.value().text).at("format");
    EXPECT_TRUE(list.at("stop_after_first").as_bool());
    const json::value& tag = list.at("tags").at(0);
    const std::string call = std::string(tag.at("begin").as_string()) + R"({"q": 1})" +
                             std::string(tag.at("end").as_string());
    const ParsedAnswer answer = parse_answer(format, false, true, call);
    ASSERT_EQ(answer.tool_calls.size(), 1u) << call;
    EXPECT_EQ(answer.tool_calls[0].name, "look_up");
    EXPECT_EQ(answer.tool_calls[0].arguments, R"({"q": 1})");
    EXPECT_EQ(answer.content, "");
  }
}

// The format's parser reads a call that follows the grammar.
TEST(ToolGrammar, ItsCallsAreParsed) {
  for (const ChatFormat format : {ChatFormat::kV25, ChatFormat::kV3, ChatFormat::kR1,
                                  ChatFormat::kV31, ChatFormat::kKimiK2, ChatFormat::kFathomTiny}) {
    const auto grammar = tool_grammar(format, {make_tool("look_up", "", std::nullopt)},
                                      {ToolChoice::Mode::kRequired}, true, std::nullopt);
    const json::value elements = json::parse(grammar.value().text).at("format").at("elements");
    const json::value& list = elements.at(1);
    const json::value& tag = list.at("tags").at(0);
    const std::string number = format == ChatFormat::kKimiK2 ? "0<|tool_call_argument_begin|>" : "";
    const std::string call = std::string(tag.at("begin").as_string()) + number + R"({"q": 1})" +
                             std::string(tag.at("end").as_string());
    const std::string text = std::string(elements.at(0).at("value").as_string()) + call +
                             std::string(list.at("separator").as_string()) + call +
                             std::string(elements.at(2).at("value").as_string());
    const ParsedAnswer answer = parse_answer(format, false, true, text);
    ASSERT_EQ(answer.tool_calls.size(), 2u) << chat_format_name(format) << ": " << text;
    EXPECT_EQ(answer.tool_calls[1].name, "look_up");
    EXPECT_EQ(answer.tool_calls[1].arguments, R"({"q": 1})") << chat_format_name(format);
    EXPECT_EQ(answer.content, "");
  }
}

TEST(PrepareChat, ToolsAreDeclaredUnlessNoneMayBeCalled) {
  const Generation with = accepted(E::kChat, chat(kTools));
  EXPECT_NE(prompt_of(with).find("### f"), std::string::npos);
  EXPECT_TRUE(with.writer->spec().expect_tools);
  const Generation without =
      accepted(E::kChat, chat(std::string(kTools) + R"(,"tool_choice":"none")"));
  EXPECT_EQ(prompt_of(without), prompt_of(accepted(E::kChat, chat(""))));
  EXPECT_FALSE(without.writer->spec().expect_tools);
}

// The three dialects of one conversation give the same prompt.
TEST(Conversations, AreTheSameInEveryDialect) {
  const std::string openai =
      R"({"messages":[{"role":"system","content":"S"},{"role":"user","content":"Q"},)"
      R"({"role":"assistant","content":"Looking.","tool_calls":[)"
      R"({"id":"c1","type":"function","function":{"name":"f","arguments":"{\"x\": 1}"}},)"
      R"({"id":"c2","type":"function","function":{"name":"f","arguments":"{\"x\": 2}"}}]},)"
      R"({"role":"tool","tool_call_id":"c2","content":"two"},)"
      R"({"role":"tool","tool_call_id":"c1","content":"one"}],)"
      R"("tools":[{"type":"function","function":{"name":"f","description":"D","parameters":)"
      R"({"type":"object","properties":{"x":{"type":"integer"}}}}}]})";
  const std::string anthropic =
      R"({"max_tokens":9,"system":[{"type":"text","text":"S"}],"messages":[)"
      R"({"role":"user","content":"Q"},{"role":"assistant","content":[)"
      R"({"type":"text","text":"Looking."},{"type":"tool_use","id":"c1","name":"f","input":{"x":1}},)"
      R"({"type":"tool_use","id":"c2","name":"f","input":{"x":2}}]},{"role":"user","content":[)"
      R"({"type":"tool_result","tool_use_id":"c2","content":[{"type":"text","text":"two"}]},)"
      R"({"type":"tool_result","tool_use_id":"c1","content":"one"}]}],)"
      R"("tools":[{"name":"f","description":"D","input_schema":)"
      R"({"type":"object","properties":{"x":{"type":"integer"}}}}]})";
  const std::string responses =
      R"({"instructions":"S","input":[{"role":"user","content":"Q"},{"type":"message",)"
      R"("role":"assistant","content":[{"type":"output_text","text":"Looking."}]},)"
      R"({"type":"function_call","call_id":"c1","name":"f","arguments":"{\"x\": 1}"},)"
      R"({"type":"function_call","call_id":"c2","name":"f","arguments":"{\"x\": 2}"},)"
      R"({"type":"function_call_output","call_id":"c2","output":"two"},)"
      R"({"type":"function_call_output","call_id":"c1","output":"one"}],)"
      R"("tools":[{"type":"function","name":"f","description":"D","parameters":)"
      R"({"type":"object","properties":{"x":{"type":"integer"}}}}]})";
  const std::string expected = rendered(openai);
  EXPECT_EQ(prompt_of(accepted(E::kChat, openai)), expected);
  EXPECT_EQ(prompt_of(accepted(E::kMessages, anthropic)), expected);
  EXPECT_EQ(prompt_of(accepted(E::kResponses, responses)), expected);
}

TEST(PrepareResponses, RefusesWhatWouldNeedAStore) {
  EXPECT_EQ(refused(E::kResponses, R"({"input":"a","previous_response_id":"resp_1"})").code,
            "unsupported_parameter");
  EXPECT_EQ(refused(E::kResponses, R"({"input":"a","background":true})").param, "background");
  EXPECT_FALSE(
      accepted(E::kResponses, R"({"input":"a","text":{"format":{"type":"text"}}})").grammar);
  EXPECT_EQ(accepted(E::kResponses, R"({"input":"a","text":{"format":{"type":"json_schema",)"
                                    R"("name":"n","schema":{"type":"number"}}}})")
                .grammar,
            (GrammarSpec{GrammarSpec::Kind::kJsonSchema, R"({"type":"number"})"}));
}

TEST(PrepareCompletion, TakesEveryFormOfPrompt) {
  const auto sizes = [](std::string_view prompt) {
    std::vector<size_t> result;
    const Generation generation =
        accepted(E::kCompletions, fmt::format(R"({{"prompt":{},"max_tokens":5}})", prompt));
    for (const Request& request : generation.requests) result.push_back(request.prompt_ids.size());
    return result;
  };
  EXPECT_EQ(sizes("[7,8,9]"), std::vector<size_t>{3});
  EXPECT_EQ(sizes("[[7,8,9],[7]]"), (std::vector<size_t>{3, 1}));
  EXPECT_EQ(sizes(R"("a")"), sizes(R"(["a"])"));
  EXPECT_EQ(sizes(R"(["a","a a a"])").size(), 2u);
}

TEST(PrepareCompletion, IdsEndWithTheVocabulary) {
  const int64_t size = tiny_model().vocab_size;
  const auto body = [](int64_t id) { return fmt::format(R"({{"prompt":[7,{}]}})", id); };
  EXPECT_EQ(accepted(E::kCompletions, body(size - 1)).requests[0].prompt_ids.back(), size - 1);
  EXPECT_EQ(accepted(E::kCompletions, body(0)).requests[0].prompt_ids.back(), 0);
  EXPECT_EQ(refused(E::kCompletions, body(size)).param, "prompt[1]");
  EXPECT_EQ(refused(E::kCompletions, body(-1)).param, "prompt[1]");
}

TEST(PrepareCompletion, FillsInBetweenPromptAndSuffix) {
  const Tokenizer& tokenizer = *tiny_model().tokenizer;
  const Generation generation =
      accepted(E::kCompletions, R"({"prompt":"a <｜fim▁end｜>","suffix":"b"})");
  const auto& ids = generation.requests.at(0).prompt_ids;
  EXPECT_EQ(tokenizer.decode(ids),
            "<｜fim▁begin｜>a <｜fim▁end｜>"
            "<｜fim▁hole｜>b<｜fim▁end｜>");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), *tokenizer.token_id("<｜fim▁end｜>")), 1)
      << "what the client types stays text";
  EXPECT_EQ(refused(E::kCompletions, R"({"prompt":[1,2],"suffix":"b"})").param, "suffix");
}

TEST(PrepareCompletion, WithoutMaxTokensTheContextsRoomIsEnough) {
  ServedModel served = tiny_model();
  const auto length = [&](GeneratingEndpoint endpoint, const std::string& body) {
    const Request request = accepted(endpoint, body, served).requests.at(0);
    return std::pair(std::ssize(request.prompt_ids), request.sampling.max_tokens.value());
  };
  const std::string text = R"({"prompt":"one two three"})";
  const auto prompt = length(E::kCompletions, text).first;
  EXPECT_EQ(length(E::kCompletions, text).second, 16);
  EXPECT_EQ(length(E::kCompletions, R"({"prompt":"one two three","min_tokens":20})").second, 20);
  served.max_model_len = prompt + 5;
  EXPECT_EQ(length(E::kCompletions, text).second, 5);
  EXPECT_EQ(length(E::kGenerate, R"({"text":"one two three"})").second, 5);
  EXPECT_EQ(refused(E::kCompletions, R"({"prompt":"one two three","max_tokens":6})", served).code,
            "context_length_exceeded");
}

TEST(PrepareChat, LimitsAreThePeers) {
  const auto strings = [](int count) {
    std::string list;
    for (int i = 0; i < count; ++i) list += fmt::format("{}\"s{}\"", i > 0 ? "," : "", i);
    return chat(fmt::format(R"(,"stop":[{}])", list));
  };
  accepted(E::kChat, strings(16));
  EXPECT_EQ(refused(E::kChat, strings(17)).param, "stop");
  accepted(E::kCompletions, R"({"prompt":"a","logprobs":20})");
  EXPECT_EQ(refused(E::kCompletions, R"({"prompt":"a","logprobs":21})").param, "logprobs");
  accepted(E::kChat, chat(R"(,"n":32)"));
  EXPECT_EQ(refused(E::kChat, chat(R"(,"n":33)")).message,
            "n is 33, expected an integer from 1 to 32");
}

TEST(PrepareChat, WhatIsNoTextIsRefusedWithACode) {
  const auto part = [](const char* type) {
    return fmt::format(
        R"({{"messages":[{{"role":"user","content":[{{"type":"{0}","{0}":{{}}}}]}}]}})", type);
  };
  const ApiError image = refused(E::kChat, part("image_url"));
  EXPECT_EQ(image.status, 400);
  EXPECT_EQ(image.code, "not_supported");
  EXPECT_EQ(image.param, "messages[0].content[0].type");
  EXPECT_EQ(image.message,
            "messages[0].content[0].type is \"image_url\": images are not supported, the model "
            "reads text only");
  EXPECT_EQ(refused(E::kChat, part("input_audio")).code, "not_supported");
  EXPECT_EQ(refused(E::kChat, part("nonsense")).code, std::nullopt);
  EXPECT_EQ(refused(E::kMessages, R"({"max_tokens":1,"messages":[{"role":"user","content":[)"
                                  R"({"type":"image","source":{}}]}]})")
                .code,
            "not_supported");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"audio":{"voice":"a"})")).code, "not_supported");
  EXPECT_EQ(refused(E::kChat, chat(R"(,"modalities":["text","audio"])")).param, "modalities");
  accepted(E::kChat, chat(R"(,"modalities":["text"])"));
  EXPECT_EQ(refused(E::kGenerate, R"({"text":"a","lora_path":"x"})").code, "not_supported");
}

TEST(PrepareCompletion, RefusesOtherBestOf) {
  EXPECT_EQ(refused(E::kCompletions, R"({"prompt":"a","best_of":2})").param, "best_of");
  EXPECT_EQ(
      refused(E::kCompletions, R"({"prompt":"a","echo":true,"logprobs":1,"stream":true})").param,
      "echo");
  EXPECT_EQ(accepted(E::kCompletions, R"({"prompt":"a"})").requests[0].sampling.max_tokens, 16);
}

TEST(PrepareGenerate, NamesItsNestedFields) {
  EXPECT_EQ(refused(E::kGenerate, R"({"text":"a","input_ids":[1]})").param, "text");
  EXPECT_EQ(refused(E::kGenerate, R"({})").param, "text");
  EXPECT_EQ(refused(E::kGenerate, R"({"text":"a","sampling_params":{"temperature":-1}})").param,
            "sampling_params.temperature");
  EXPECT_EQ(
      refused(E::kGenerate, R"({"text":"a","sampling_params":{"stop_token_ids":[999999]}})").param,
      "sampling_params.stop_token_ids");
  const Generation generation = accepted(
      E::kGenerate, R"({"input_ids":[5,6],"return_logprob":true,"logprob_start_len":1,)"
                    R"("top_logprobs_num":3,"sampling_params":{"max_new_tokens":4,"regex":"a+"}})");
  EXPECT_EQ(generation.requests[0].sampling.max_tokens, 4);
  EXPECT_EQ(generation.requests[0].sampling.logprobs, 3);
  EXPECT_EQ(generation.requests[0].sampling.prompt_logprobs, 3);
  EXPECT_EQ(generation.grammar, (GrammarSpec{GrammarSpec::Kind::kRegex, "a+"}));
  EXPECT_EQ(generation.grammar_param, "sampling_params.regex");
  const auto grammar_param = [](std::string_view body) {
    return accepted(E::kGenerate, body).grammar_param;
  };
  EXPECT_EQ(grammar_param(R"({"text":"a","sampling_params":{"ebnf":"root ::= \"a\""}})"),
            "sampling_params.ebnf");
  EXPECT_EQ(grammar_param(R"({"text":"a","sampling_params":{"json_schema":"{}"}})"),
            "sampling_params.json_schema");
  EXPECT_EQ(
      refused(E::kGenerate, R"({"text":"a","sampling_params":{"regex":"a","ebnf":"b"}})").param,
      "sampling_params.ebnf");
  EXPECT_EQ(refused(E::kGenerate, R"({"text":"a","sampling_params":{"json_schema":"{"}})").param,
            "sampling_params.json_schema");
}

TEST(Errors, HaveBothShapes) {
  const ApiError error(400, "n is \"x\"", "n", "bad");
  EXPECT_EQ(
      error.to_json(),
      R"({"error":{"message":"n is \"x\"","type":"invalid_request_error","param":"n","code":"bad"}})");
  EXPECT_EQ(error.to_json(ErrorShape::kAnthropic),
            R"({"type":"error","error":{"type":"invalid_request_error","message":"n is \"x\""}})");
  const ApiError full(Status{Code::kResourceExhausted, "the queue is full"});
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.type, "rate_limit_error");
  EXPECT_EQ(full.code, "queue_full");
  EXPECT_EQ(error_shape_of(E::kMessages), ErrorShape::kAnthropic);
}

}  // namespace
}  // namespace fathom
