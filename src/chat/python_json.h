// JSON written as Python's json.dumps(value, ensure_ascii=False) writes it. Chat templates print
// tool declarations through it (Jinja's tojson in transformers), and a prompt that differs in one
// space is not the one a model was trained on.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace fathom {

// ", " and ": " between, keys in their order, floats as Python's repr. Integers beyond 64 bits have
// become doubles in parse_json and are printed as such; Python would keep their digits.
std::string to_python_json(const json::value& value);

// Appends text with the escapes that go between a JSON string's quotes. The result for a text is
// that of its parts put together, so that it can be called as a stream arrives.
void append_json_escaped(std::string& out, std::string_view text);

// As Python's repr(float): the shortest digits that read back, exponent form from 1e16 and below
// 1e-4.
std::string python_float(double number);

}  // namespace fathom
