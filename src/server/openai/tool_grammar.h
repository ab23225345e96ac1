// Builds a grammar for well-formed tool calls: declared tools only, with arguments that follow
// their schemas.
#pragma once

#include <optional>
#include <vector>

#include "chat/format.h"
#include "engine/grammar_spec.h"
#include "server/openai/chat_request.h"

namespace fathom {

// Returns the grammar of a completion; nullopt: free text.
//
// `text` is the form requested for text that is not a call, if any.
//  - required and named: only calls, at least one; `text` is ignored.
//  - auto with a JSON form for `text`: either calls or that JSON. With any other form of `text` no
//    calls are possible.
//  - auto without `text`: free text; if a tool is strict, calls must follow its grammar.
// `parallel`: several calls are allowed.
std::optional<GrammarSpec> tool_grammar(ChatFormat format, const std::vector<Tool>& tools,
                                        const ToolChoice& choice, bool parallel,
                                        const std::optional<GrammarSpec>& text);

}  // namespace fathom
