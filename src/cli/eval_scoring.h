// When an answer counts as right. The rules are those of the evaluation sets (docs/numerics.md):
//
//   number    the last integer in the answer (commas removed) equals `expected`
//   contains  `expected` is among the integers in the answer
//   json      the answer parses as JSON and equals `expected`
//   tool      the answer is exactly one block of tool calls whose names and parsed arguments equal
//             `expected`, in order
//
// The answer is what follows the last </think>.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/json.h"
#include "chat/format.h"

namespace fathom {

enum class EvalCheck { kNumber, kContains, kJson, kTool };

Result<EvalCheck> parse_eval_check(std::string_view name);

// Whether `expected` is what the check can compare with: digits, any JSON, a list of calls.
Result<> validate_expected(EvalCheck check, const json::value& expected);

// Longest answer in tokens that the sets allow.
int64_t max_answer_tokens(EvalCheck check, bool thinking);

// `text` is the answer with its special tokens, without the end-of-sequence token.
bool is_right(EvalCheck check, const json::value& expected, ChatFormat format,
              std::string_view text);

// Equal as values: 1 and 1.0 are the same number, keys have no order, true is not 1.
bool same_json(const json::value& a, const json::value& b);

}  // namespace fathom
