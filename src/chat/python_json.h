// Writes JSON like Python's json.dumps(value, ensure_ascii=False). Chat templates print tool
// declarations with it (Jinja's tojson in transformers), and models are trained on exactly that
// spacing.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace fathom {

// What stands between elements, and behind a key: ", " and ": ", or "," and ":".
enum class PythonSpacing { kDefault, kCompact };

// Serializes with these separators, keys in their order, and floats like Python's repr.
// Integers beyond 64 bits were parsed as doubles and are printed as such; Python would keep their
// digits.
std::string to_python_json(const json::value& value,
                           PythonSpacing spacing = PythonSpacing::kDefault);

// Python's str() of a value. That of arrays and objects is their JSON: no format prints one so.
std::string python_str(const json::value& value);

// Appends `text` with the escapes of a JSON string's content. Works piecewise: the results for the
// parts of a text concatenate to the result for the whole.
void append_json_escaped(std::string& out, std::string_view text);

// Formats like Python's repr(float): the shortest digits that round-trip, with an exponent from
// 1e16 and below 1e-4.
std::string python_float(double number);

}  // namespace fathom
