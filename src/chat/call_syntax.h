// The literal pieces in which a chat format writes tool calls, for building a grammar that allows
// only well-formed calls. The parsers (chat/tool_calls.h) read the same text, but are more lenient.
#pragma once

#include <optional>
#include <string_view>

#include "chat/format.h"

namespace fathom {

// A block is block_begin, calls separated by `between`, block_end. A call is before_name, the
// function's name, after_name, the arguments, call_end.
struct CallSyntax {
  std::string_view block_begin;
  std::string_view before_name;
  std::string_view after_name;
  std::string_view call_end;
  std::string_view between;
  std::string_view block_end;
  bool numbered = false;       // the name is followed by ":" and the call's number (Kimi)
  bool single = false;         // a message has one call at most (GigaChat)
  bool json_arguments = true;  // false: a tag for each parameter (V3.2, GLM)
  // Syntax of tags with only a key and a value (GLM): key_begin, the parameter's name, key_end, its
  // value, value_end. Empty for others.
  std::string_view key_begin = {};
  std::string_view key_end = {};
  std::string_view value_end = {};
};

// The syntax of a format, or nothing if it has no tools (V2).
std::optional<CallSyntax> call_syntax(ChatFormat format);

}  // namespace fathom
