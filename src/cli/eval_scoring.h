// Scoring of completions, by the rules of the evaluation sets (docs/numerics.md):
//
//   number    the last integer in the completion (commas removed) equals `expected`
//   contains  `expected` is among the integers in the completion
//   json      the completion parses as JSON and equals `expected`
//   tool      the completion is exactly one block of tool calls whose names and parsed arguments
//             equal `expected`, in order
//
// Only the text after the last </think> is scored.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/json.h"
#include "chat/format.h"

namespace fathom {

enum class EvalCheck { kNumber, kContains, kJson, kTool };

Result<EvalCheck> parse_eval_check(std::string_view name);

// Checks that `expected` suits the check: digits, any JSON, a list of calls.
Result<> validate_expected(EvalCheck check, const json::value& expected);

// The maximal length of a completion in tokens.
int64_t max_answer_tokens(EvalCheck check, bool thinking);

// `text` is the completion with its special tokens, without the end-of-sequence token.
bool is_right(EvalCheck check, const json::value& expected, ChatFormat format,
              std::string_view text);

// Equality of values: 1 equals 1.0, key order does not matter, true does not equal 1.
bool same_json(const json::value& a, const json::value& b);

}  // namespace fathom
