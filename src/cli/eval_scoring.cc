#include "cli/eval_scoring.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "chat/stream_parser.h"

namespace fathom {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The integers in a text, with commas removed first: "1,234" is 1234. A minus sign belongs to the
// number unless it follows a digit ("12-5" is 12 and 5).
std::vector<std::string> integers_in(std::string_view text) {
  std::string plain;
  std::copy_if(text.begin(), text.end(), std::back_inserter(plain),
               [](char c) { return c != ','; });
  std::vector<std::string> integers;
  for (size_t i = 0; i < plain.size();) {
    if (!is_digit(plain[i])) {
      ++i;
      continue;
    }
    size_t begin = i;
    while (i < plain.size() && is_digit(plain[i])) ++i;
    const bool negative =
        begin > 0 && plain[begin - 1] == '-' && (begin < 2 || !is_digit(plain[begin - 2]));
    if (negative) --begin;
    integers.push_back(plain.substr(begin, i - begin));
  }
  return integers;
}

std::string integer_text(const json::value& expected) {
  if (expected.is_string()) return std::string(expected.get_string());
  return json::serialize(expected);
}

size_t count_of(std::string_view text, std::string_view word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    ++count;
  }
  return count;
}

// The number of tool call blocks that begin in the text, in any format's markup.
size_t call_blocks(std::string_view text) {
  size_t count = 0;
  for (const std::string_view begin :
       {"<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<｜DSML｜function_calls>"}) {
    count += count_of(text, begin);
  }
  return count;
}

bool same_calls(const json::value& expected, ChatFormat format, std::string_view text) {
  const ParsedAnswer answer = parse_answer(format, false, true, text);
  const json::array& calls = expected.as_array();
  if (!answer.content.empty() || !answer.reasoning.empty()) return false;
  if (call_blocks(text) != 1 || answer.tool_calls.size() != calls.size()) return false;
  for (size_t i = 0; i < calls.size(); ++i) {
    const json::object& call = calls[i].as_object();
    const auto arguments = parse_json(answer.tool_calls[i].arguments, "arguments");
    if (answer.tool_calls[i].name != call.at("name").as_string() || !arguments ||
        !same_json(*arguments, call.at("arguments"))) {
      return false;
    }
  }
  return true;
}

bool same_number(const json::value& a, const json::value& b) {
  if (a.is_double() || b.is_double()) return a.to_number<double>() == b.to_number<double>();
  return a == b;  // Boost compares int64 and uint64 by value
}

}  // namespace

Result<EvalCheck> parse_eval_check(std::string_view name) {
  if (name == "number") return EvalCheck::kNumber;
  if (name == "contains") return EvalCheck::kContains;
  if (name == "json") return EvalCheck::kJson;
  if (name == "tool") return EvalCheck::kTool;
  return invalid("check is \"{}\", allowed are number, contains, json, tool", name);
}

Result<> validate_expected(EvalCheck check, const json::value& expected) {
  switch (check) {
    case EvalCheck::kNumber:
    case EvalCheck::kContains: {
      const std::string text = integer_text(expected);
      if (integers_in(text) == std::vector<std::string>{text}) return {};
      return invalid("expected is {}, this check needs an integer", brief(expected));
    }
    case EvalCheck::kJson:
      return {};
    case EvalCheck::kTool:
      break;
  }
  constexpr const char* kCalls = "a list of {\"name\", \"arguments\"}";
  if (!expected.is_array())
    return invalid("expected is {}, this check needs {}", brief(expected), kCalls);
  for (const json::value& call : expected.get_array()) {
    const json::object* object = call.if_object();
    if (object == nullptr || !object->contains("arguments") || !object->contains("name") ||
        !object->at("name").is_string()) {
      return invalid("expected has {}, this check needs {}", brief(call), kCalls);
    }
  }
  return {};
}

int64_t max_answer_tokens(EvalCheck check, bool thinking) {
  switch (check) {
    case EvalCheck::kNumber:
      return thinking ? 260 : 48;
    case EvalCheck::kContains:
      return 40;
    case EvalCheck::kJson:
      return 120;
    case EvalCheck::kTool:
      return 90;
  }
  return 0;
}

bool is_right(EvalCheck check, const json::value& expected, ChatFormat format,
              std::string_view text) {
  constexpr std::string_view kThinkEnd = "</think>";
  if (const size_t end = text.rfind(kThinkEnd); end != std::string_view::npos) {
    text.remove_prefix(end + kThinkEnd.size());
  }
  switch (check) {
    case EvalCheck::kNumber: {
      const auto integers = integers_in(text);
      return !integers.empty() && integers.back() == integer_text(expected);
    }
    case EvalCheck::kContains: {
      const auto integers = integers_in(text);
      return std::find(integers.begin(), integers.end(), integer_text(expected)) != integers.end();
    }
    case EvalCheck::kJson: {
      const auto parsed = parse_json(text, "answer");
      return parsed && same_json(*parsed, expected);
    }
    case EvalCheck::kTool:
      return same_calls(expected, format, text);
  }
  return false;
}

bool same_json(const json::value& a, const json::value& b) {
  if (a.is_number() && b.is_number()) return same_number(a, b);
  if (a.is_array() && b.is_array()) {
    return std::equal(a.get_array().begin(), a.get_array().end(), b.get_array().begin(),
                      b.get_array().end(), same_json);
  }
  if (!a.is_object() || !b.is_object()) return a == b;
  const json::object &x = a.get_object(), &y = b.get_object();
  return x.size() == y.size() && std::all_of(x.begin(), x.end(), [&y](const auto& field) {
           const json::value* other = y.if_contains(field.key());
           return other != nullptr && same_json(field.value(), *other);
         });
}

}  // namespace fathom
