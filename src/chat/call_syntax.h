// How a chat format writes tool calls, in literal pieces: what a grammar that allows only
// well-formed calls is put together from. The parsers (chat/tool_calls.h) read the same text, more
// leniently.
#pragma once

#include <optional>
#include <string_view>

#include "chat/format.h"

namespace fathom {

// block_begin, then calls with `between` between them, then block_end. A call is before_name, the
// function's name, after_name, the arguments, call_end.
struct CallSyntax {
  std::string_view block_begin;
  std::string_view before_name;
  std::string_view after_name;
  std::string_view call_end;
  std::string_view between;
  std::string_view block_end;
  bool numbered = false;       // ":" and the call's number follow the name (Kimi)
  bool json_arguments = true;  // false: tags for each parameter (V3.2)
};

// Nothing for a format without tools (V2).
std::optional<CallSyntax> call_syntax(ChatFormat format);

}  // namespace fathom
