// Outputs in all formats, well-formed and malformed, parsed with every cut.
#include "chat/stream_test_case.h"

namespace fathom {
namespace {

std::vector<Case> reasoning_cases() {
  using enum ChatFormat;
  return {
      {"V2 plain", kV2, false, " Hello</think> <｜tool▁calls▁begin｜>", "",
       " Hello</think> <｜tool▁calls▁begin｜>"},
      {"V3.1 chat keeps </think>", kV31, false, "a </think> b", "", "a </think> b"},
      {"V3.1 thinking, nothing trimmed", kV31, true, "\n héllo \n</think>\n\nWörld \n",
       "\n héllo \n", "\n\nWörld \n"},
      {"V3.1 unterminated", kV31, true, "你好</thin", "你好</thin", ""},
      {"V3.1 second </think> is content", kV31, true, "a</think>b</think>c", "a", "b</think>c"},
      {"V3.1 nearly a marker", kV31, true, "a</</think</thinx></think>b", "a</</think</thinx>",
       "b"},
      {"V3.1 does not drop <think>", kV31, true, "<think>a</think>b", "<think>a", "b"},
      {"V3.1 empty reasoning", kV31, true, "</think>b", "", "b"},
      {"V3.1 empty", kV31, true, "", "", ""},
      {"R1 trims", kR1, true, "\n a\n b \n\n</think>\n\nHi\n", "a\n b", "Hi\n"},
      {"R1 opening tag repeated", kR1, true, "\n<think>\na</think>b", "a", "b"},
      {"R1 unterminated", kR1, true, "a \n\n", "a", ""},
      {"R1 nearly an opening tag", kR1, true, "<thin king</think>x", "<thin king", "x"},
      {"R1-0528 writes <think>", kV30324, false, "<think>\nso\n</think>\nHi", "so", "Hi"},
      {"V3-0324 does not", kV30324, false, "\n Hi <think>a</think>", "", "\n Hi <think>a</think>"},
      {"V3-0324 nearly", kV30324, false, " \n<think", "", " \n<think"},
      {"R1 after results", kR1, false, "Sunny.", "", "Sunny."},
      {"R1 space only", kR1, true, " \n ", "", ""},
      {"Kimi thinking", kKimiK2Thinking, false, "<think> a </think> b ", " a ", " b "},
      {"Kimi thinking inside", kKimiK2Thinking, true, " \na </think>b", " \na ", "b"},
      {"Kimi instruct", kKimiK2, false, "<think>a</think>b", "", "<think>a</think>b"},
      {"V3.2 thinking", kV32, true, "a</think>b\n\n", "a", "b\n\n"},
      {"ill-formed bytes stay", kV31, true, "\xE4\xBD</think>\xF0\x9F\xFF", "\xE4\xBD",
       "\xF0\x9F\xFF"},
  };
}

std::vector<Case> v31_cases() {
  using enum ChatFormat;
  const std::string one = v31_call("get_time", R"({"place": "Paris"})");
  const std::string two = v31_call("get_time", R"({"place": "日本 🙂"})");
  return {
      {"one call",
       kV31,
       false,
       kBlock + one + kBlockEnd,
       "",
       "",
       {{"get_time", R"({"place": "Paris"})"}}},
      {"bundled model, content, two calls",
       kFathomTiny,
       false,
       "Let me see.\n" + kBlock + one + two + kBlockEnd,
       "",
       "Let me see.\n",
       {{"get_time", R"({"place": "Paris"})"}, {"get_time", R"({"place": "日本 🙂"})"}}},
      {"white space between markers",
       kV31,
       false,
       kBlock + "\n" + one + "\n " + two + "\n" + kBlockEnd + " done",
       "",
       " done",
       {{"get_time", R"({"place": "Paris"})"}, {"get_time", R"({"place": "日本 🙂"})"}}},
      {"call inside reasoning is reasoning",
       kV31,
       true,
       "a" + kBlock + one + "</think>" + kBlock + two + kBlockEnd,
       "a" + kBlock + one,
       "",
       {{"get_time", R"({"place": "日本 🙂"})"}}},
      {"arguments verbatim",
       kV31,
       false,
       kBlock + v31_call(" f ", "\n{not json} ``` \n") + kBlockEnd,
       "",
       "",
       {{"f", "\n{not json} ``` \n"}}},
      {"no arguments", kV31, false, kBlock + v31_call("f", "") + kBlockEnd, "", "", {{"f", "{}"}}},
      {"cut off in arguments",
       kV31,
       false,
       kBlock + kCall + "f" + kSep + "{\"a\": 1<｜tool▁call",
       "",
       "",
       {{"f", "{\"a\": 1<｜tool▁call"}}},
      {"cut off after the separator",
       kV31,
       false,
       kBlock + kCall + "f" + kSep,
       "",
       "",
       {{"f", ""}}},
      {"cut off in the name", kV31, false, "x" + kBlock + "\n" + kCall + "get_ti", "",
       "x" + kBlock + "\n" + kCall + "get_ti"},
      {"block end ends a call",
       kV31,
       false,
       kBlock + kCall + "f" + kSep + "{}" + kBlockEnd + "x",
       "",
       "x",
       {{"f", "{}"}}},
      {"no separator", kV31, false, kBlock + kCall + "f {}" + kCallEnd + kBlockEnd, "",
       kBlock + kCall + "f {}" + kCallEnd + kBlockEnd},
      {"empty name", kV31, false, kBlock + v31_call("", "{}") + kBlockEnd, "",
       kBlock + v31_call("", "{}") + kBlockEnd},
      {"a bad call, then a good one",
       kV31,
       false,
       kBlock + kCall + "?" + kCallEnd + one + kBlockEnd,
       "",
       kBlock + kCall + "?" + kCallEnd,
       {{"get_time", R"({"place": "Paris"})"}}},
      {"stray text after a call",
       kV31,
       false,
       kBlock + one + " and so \n" + two + kBlockEnd,
       "",
       " and so",
       {{"get_time", R"({"place": "Paris"})"}, {"get_time", R"({"place": "日本 🙂"})"}}},
      {"empty block", kV31, false, "a" + kBlock + " " + kBlockEnd + "b", "",
       "a" + kBlock + " " + kBlockEnd + "b"},
      {"call begin outside a block", kV31, false, one, "", one},
      {"name too long", kV31, false, kBlock + v31_call(std::string(257, 'n'), "{}") + kBlockEnd, "",
       kBlock + v31_call(std::string(257, 'n'), "{}") + kBlockEnd},
      {"name as long as allowed",
       kV31,
       false,
       kBlock + v31_call(std::string(256, 'n'), "{}") + kBlockEnd,
       "",
       "",
       {{std::string(256, 'n'), "{}"}}},
      {"two blocks",
       kV31,
       false,
       kBlock + one + kBlockEnd + "x" + kBlock + two + kBlockEnd,
       "",
       "x",
       {{"get_time", R"({"place": "Paris"})"}, {"get_time", R"({"place": "日本 🙂"})"}}},
  };
}

std::vector<Case> v3_cases() {
  using enum ChatFormat;
  const std::string one = v3_call("get_weather", R"({"city": "Paris"})");
  const std::string header = kCall + "function" + kSep;
  const std::vector<Call> paris = {{"get_weather", R"({"city": "Paris"})"}};
  return {
      {"one call", kV3, false, kBlock + one + kBlockEnd, "", "", paris},
      {"R1 with reasoning, block not closed", kR1, true, "Hm.\n</think>\n\n" + kBlock + one, "Hm.",
       "", paris},
      {"two calls",
       kV25,
       false,
       "Ok" + kBlock + one + "\n" + v3_call("g", "{}") + kBlockEnd,
       "",
       "Ok",
       {{"get_weather", R"({"city": "Paris"})"}, {"g", "{}"}}},
      {"several lines",
       kV3,
       false,
       kBlock + v3_call("f", "{\n  \"é\": 1\n}") + kBlockEnd,
       "",
       "",
       {{"f", "{\n  \"é\": 1\n}"}}},
      {"no closing newline",
       kV3,
       false,
       kBlock + header + "f\n```json\n{}```" + kCallEnd + kBlockEnd,
       "",
       "",
       {{"f", "{}"}}},
      {"no fence",
       kV3,
       false,
       kBlock + header + "f\n{\"a\": 1}" + kCallEnd + kBlockEnd + "x",
       "",
       "x",
       {{"f", "{\"a\": 1}"}}},
      {"no newline, no fence",
       kV3,
       false,
       kBlock + header + "f{\"a\": 1}" + kCallEnd,
       "",
       "",
       {{"f", "{\"a\": 1}"}}},
      {"no newline before the fence",
       kV3,
       false,
       kBlock + header + "f```\n{\"a\": 1}\n```\n" + kCallEnd,
       "",
       "",
       {{"f", "{\"a\": 1}"}}},
      {"fence inside a string",
       kV3,
       false,
       kBlock + v3_call("f", R"({"code": "```py\n```"})"),
       "",
       "",
       {{"f", R"({"code": "```py\n```"})"}}},
      {"no call end",
       kV3,
       false,
       kBlock + header + "f\n```json\n{}\n```" + kBlockEnd + "x",
       "",
       "x",
       {{"f", "{}"}}},
      {"fence closed by the block end",
       kV3,
       false,
       kBlock + header + "f\n```json\n{}```" + kBlockEnd,
       "",
       "",
       {{"f", "{}"}}},
      {"empty arguments",
       kV3,
       false,
       kBlock + header + "f\n```json\n```" + kCallEnd,
       "",
       "",
       {{"f", "{}"}}},
      {"only a name",
       kV3,
       false,
       kBlock + header + "f" + kCallEnd + kBlockEnd,
       "",
       "",
       {{"f", "{}"}}},
      {"cut off in the fence", kV3, false, kBlock + header + "f\n``", "", "", {{"f", "``"}}},
      {"cut off in arguments",
       kV3,
       false,
       kBlock + header + "f\n```json\n{\"a\"\n``",
       "",
       "",
       {{"f", "{\"a\"\n``"}}},
      {"cut off in the name", kV3, false, kBlock + header + "get", "", kBlock + header + "get"},
      {"no name", kV3, false, kBlock + header + "\n{}" + kCallEnd, "",
       kBlock + header + "\n{}" + kCallEnd},
      {"after the fence",
       kV3,
       false,
       kBlock + header + "f\n```json\n{}\n```x" + kCallEnd,
       "",
       "x",
       {{"f", "{}"}}},
  };
}

std::vector<Case> v32_cases() {
  using enum ChatFormat;
  const std::string call = dsml_open("f") + dsml_value("a", "true", "x \"y\"\nz") +
                           dsml_value("n", "false", "3") + kInvokeEnd;
  const Call expected = {"f", R"({"a": "x \"y\"\nz", "n": 3})"};
  return {
      {"thinking, content, call",
       kV32,
       true,
       "R.</think>Let me look.\n\n" + kDsml + "\n" + call + kDsmlEnd,
       "R.",
       "Let me look.",
       {expected}},
      {"newlines before the block",
       kV32,
       false,
       "a\n\n\n" + kDsml + "\n" + call + kDsmlEnd,
       "",
       "a\n",
       {expected}},
      {"two calls, text after",
       kV32,
       false,
       kDsml + call + call + kDsmlEnd + "\n\nok",
       "",
       "\n\nok",
       {expected, expected}},
      {"no parameters",
       kV32,
       false,
       "\n" + kDsml + "\n" + dsml_open("g") + "\n" + kInvokeEnd + kDsmlEnd,
       "",
       "",
       {{"g", "{}"}}},
      {"all types",
       kV32,
       false,
       kDsml + dsml_open("f") + dsml_value("é", "true", "\t🙂\\") +
           dsml_value("l", "false", "[1, \"é\"]") + dsml_value("o", "false", "{\"k\": null}") +
           dsml_value("b", "false", "true") + kInvokeEnd + kDsmlEnd,
       "",
       "",
       {{"f", R"({"é": "\t🙂\\", "l": [1, "é"], "o": {"k": null}, "b": true})"}}},
      {"not JSON becomes a string",
       kV32,
       false,
       kDsml + dsml_open("f") + dsml_value("a", "false", "Paris \"x\"") +
           dsml_value("b", "maybe", "1") + kInvokeEnd + kDsmlEnd,
       "",
       "",
       {{"f", R"({"a": "Paris \"x\"", "b": 1})"}}},
      {"empty values",
       kV32,
       false,
       kDsml + dsml_open("f") + dsml_value("a", "true", "") + dsml_value("b", "false", "") +
           kInvokeEnd + kDsmlEnd,
       "",
       "",
       {{"f", R"({"a": "", "b": ""})"}}},
      {"end tags missing",
       kV32,
       false,
       kDsml + dsml_open("f") + dsml_value("a", "true", "x") + dsml_open("g") +
           dsml_value("n", "false", "1") + kDsmlEnd + "y",
       "",
       "y",
       {{"f", R"({"a": "x"})"}, {"g", R"({"n": 1})"}}},
      {"cut off in a string",
       kV32,
       false,
       kDsml + dsml_open("f") + "<｜DSML｜parameter name=\"a\" string=\"true\">x\n</｜DSML",
       "",
       "",
       {{"f", "{\"a\": \"x\\n</｜DSML"}}},
      {"cut off in a number",
       kV32,
       false,
       kDsml + dsml_open("f") + "<｜DSML｜parameter name=\"a\" string=\"false\">12",
       "",
       "",
       {{"f", "{\"a\": 12"}}},
      {"cut off in a parameter tag",
       kV32,
       false,
       kDsml + dsml_open("f") + "<｜DSML｜parameter name=\"a",
       "",
       "\n<｜DSML｜parameter name=\"a",
       {{"f", ""}}},
      {"cut off in the invoke tag", kV32, false, "x\n\n" + kDsml + "\n<｜DSML｜invoke name=\"ge",
       "", "x\n\n" + kDsml + "\n<｜DSML｜invoke name=\"ge"},
      {"cut off before a call", kV32, false, "x\n\n" + kDsml + "\n", "", "x\n\n" + kDsml + "\n"},
      {"nearly a block", kV32, false, "x\n\n<｜DSML｜function", "", "x\n\n<｜DSML｜function"},
      {"empty block", kV32, false, kDsml + "\n" + kDsmlEnd, "", kDsml + "\n" + kDsmlEnd},
      {"text inside a call",
       kV32,
       false,
       kDsml + dsml_open("f") + " hm " + dsml_value("a", "false", "1") + kInvokeEnd + kDsmlEnd,
       "",
       "\n hm",
       {{"f", "{\"a\": 1}"}}},
      {"bad invoke tag", kV32, false, kDsml + "<｜DSML｜invoke name=\"\">" + kInvokeEnd + kDsmlEnd,
       "", kDsml + "<｜DSML｜invoke name=\"\">" + kInvokeEnd + kDsmlEnd},
      {"call inside reasoning", kV32, true, "a" + kDsml + call, "a" + kDsml + call, ""},
  };
}

std::vector<Case> kimi_cases() {
  using enum ChatFormat;
  const std::string one = kimi_call("functions.get_weather:0", R"({"city": "Paris"})");
  return {
      {"two calls",
       kKimiK2,
       false,
       "I'll look." + kSection + one + kimi_call("functions.g:1", "{}") + kSectionEnd,
       "",
       "I'll look.",
       {{"get_weather", R"({"city": "Paris"})", "functions.get_weather:0"},
        {"g", "{}", "functions.g:1"}}},
      {"thinking",
       kKimiK2Thinking,
       false,
       "<think>hm</think>" + kSection + one + kSectionEnd,
       "hm",
       "",
       {{"get_weather", R"({"city": "Paris"})", "functions.get_weather:0"}}},
      {"K2.5: the prompt has opened the reasoning",
       kKimiK25,
       true,
       "hm</think>So." + kSection + one + kSectionEnd,
       "hm",
       "So.",
       {{"get_weather", R"({"city": "Paris"})", "functions.get_weather:0"}}},
      {"K2.5: without reasoning its tags are text", kKimiK25, false, "a <think>b", "",
       "a <think>b"},
      {"id without prefix",
       kKimiK2,
       false,
       kSection + kimi_call(" a.b:c ", "1") + kSectionEnd,
       "",
       "",
       {{"a.b:c", "1", "a.b:c"}}},
      {"malformed", kKimiK2, false, kSection + kimi_call("functions.:0", "{}") + kSectionEnd, "",
       kSection + kimi_call("functions.:0", "{}") + kSectionEnd},
  };
}

std::string json_call(const std::string& name, const std::string& arguments) {
  return R"({"name": ")" + name + R"(", "arguments": )" + arguments + "}";
}

std::vector<Case> gigachat_cases() {
  using enum ChatFormat;
  const std::string arguments = R"({"city": "a\"}b", "at": [1, {"x": "]"}]})";
  const std::string one = json_call("get_weather", arguments);
  const std::string inside = "<|function_call|>", end = "<|message_sep|>";
  const std::string behind = end + "\n\nfunction call<|role_sep|>\n";
  const Call call{"get_weather", arguments};
  return {
      {"a call inside", kGigachat31, false, "Hm." + inside + one + end, "", "Hm.", {call}},
      {"a call inside, alone", kGigachat31, false, inside + one, "", "", {call}},
      {"a call behind", kGigachat3, false, "Hm." + behind + one + end + "\n\n", "", "Hm.", {call}},
      {"a call behind nothing", kGigachat3, false, behind + one, "", "", {call}},
      {"a call's role first",
       kGigachat3,
       false,
       "function call<|role_sep|>\n" + one,
       "",
       "",
       {call}},
      {"white space, a name with a dot, a number",
       kGigachat31,
       false,
       inside + "\n{ \"name\" : \"a.b\" ,\"arguments\":  12}" + end,
       "",
       "",
       {{"a.b", "12"}}},
      {"a string",
       kGigachat31,
       false,
       inside + json_call("f", R"("x}")"),
       "",
       "",
       {{"f", R"("x}")"}}},
      {"the end is the end", kGigachat3, false, "a" + end + "\n\nuser<|role_sep|>\nb", "", "a"},
      {"words of it are text", kGigachat3, false, "a function call <|role", "",
       "a function call <|role"},
      {"no name", kGigachat31, false, "a" + inside + R"({"id": 1})", "",
       "a" + inside + R"({"id": 1})"},
  };
}

std::string glm_arg(const std::string& key, const std::string& value) {
  return "<arg_key>" + key + "</arg_key><arg_value>" + value + "</arg_value>";
}
std::string glm_call(const std::string& name, const std::string& arguments) {
  return "<tool_call>" + name + arguments + "</tool_call>";
}

std::vector<Case> glm_cases() {
  using enum ChatFormat;
  const std::string one = glm_call("get_time", glm_arg("place", "Paris") + glm_arg("n", "3"));
  return {
      {"one call", kGlm47, false, one, "", "", {{"get_time", R"({"place": "Paris", "n": 3})"}}},
      {"reasoning, content, two calls",
       kGlm5,
       true,
       "so</think>Let me see.\n" + one + "\n" + glm_call("f", ""),
       "so",
       "Let me see.",
       {{"get_time", R"({"place": "Paris", "n": 3})"}, {"f", "{}"}}},
      {"with newlines between tags",
       kGlm47,
       false,
       "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1.5</arg_value>\n</tool_call>\n",
       "",
       "",
       {{"f", R"({"a": 1.5})"}}},
      {"values of every kind",
       kGlm52,
       false,
       glm_call("f", glm_arg("a", "[1, \"x\"]") + glm_arg("b", "{\"k\": null}") +
                         glm_arg("c", "true") + glm_arg("d", " \"quo\nted ") + glm_arg("e", "")),
       "",
       "",
       {{"f", R"({"a": [1, "x"], "b": {"k": null}, "c": true, "d": " \"quo\nted ", "e": ""})"}}},
      {"text behind a call",
       kGlm47,
       false,
       glm_call("f", "") + " done",
       "",
       " done",
       {{"f", "{}"}}},
      {"a call inside reasoning is reasoning", kGlm47, true, "a" + one + "</think>b", "a" + one,
       "b"},
      {"a tag without a name is text", kGlm47, false, "a\n<tool_call></tool_call>b", "",
       "a\n<tool_call></tool_call>b"},
      {"a tag that nothing ends is text", kGlm47, false, "a\n<tool_call>f", "", "a\n<tool_call>f"},
      {"an end tag is missing",
       kGlm47,
       false,
       "<tool_call>f" + glm_arg("a", "1") + glm_call("g", ""),
       "",
       "",
       {{"f", R"({"a": 1})"}, {"g", "{}"}}},
      {"cut inside a value",
       kGlm47,
       false,
       "<tool_call>f<arg_key>a</arg_key><arg_value>Par",
       "",
       "",
       {{"f", R"({"a": "Par")"}}},
      {"Moonlight has no calls", kMoonlight, false, one, "", one},
  };
}

class EveryCut : public testing::TestWithParam<Case> {};

TEST_P(EveryCut, GivesTheSame) {
  const Case& item = GetParam();
  ParsedAnswer wanted{item.reasoning, item.content, {}};
  for (const Call& call : item.calls) {
    wanted.tool_calls.push_back({call.id, call.name, call.arguments});
  }
  const std::string expected = shown(wanted);
  ASSERT_EQ(shown(parse_answer(item.format, item.opens_reasoning, true, item.text)), expected);
  const size_t size = item.text.size();
  for (size_t first = 0; first <= size; ++first) {
    ASSERT_EQ(shown(parsed_in_pieces(item, {first})), expected) << "cut at " << first;
  }
  // Three pieces: all pairs of cuts for short texts, a sample for long ones.
  const size_t stride = size <= 160 ? 1 : size / 40;
  for (size_t first = 0; first <= size; first += stride) {
    for (size_t second = first; second <= size; second += stride) {
      ASSERT_EQ(shown(parsed_in_pieces(item, {first, second})), expected)
          << "cuts at " << first << " and " << second;
    }
  }
  std::vector<size_t> bytes;
  for (size_t i = 1; i < size; ++i) bytes.push_back(i);
  ASSERT_EQ(shown(parsed_in_pieces(item, bytes)), expected) << "byte by byte";
}
INSTANTIATE_TEST_SUITE_P(Reasoning, EveryCut, testing::ValuesIn(reasoning_cases()));
INSTANTIATE_TEST_SUITE_P(V31, EveryCut, testing::ValuesIn(v31_cases()));
INSTANTIATE_TEST_SUITE_P(V3, EveryCut, testing::ValuesIn(v3_cases()));
INSTANTIATE_TEST_SUITE_P(V32, EveryCut, testing::ValuesIn(v32_cases()));
INSTANTIATE_TEST_SUITE_P(Glm, EveryCut, testing::ValuesIn(glm_cases()));
INSTANTIATE_TEST_SUITE_P(Kimi, EveryCut, testing::ValuesIn(kimi_cases()));
INSTANTIATE_TEST_SUITE_P(Gigachat, EveryCut, testing::ValuesIn(gigachat_cases()));

}  // namespace
}  // namespace fathom
