// A grammar in which a model's tool calls are well-formed: of the tools that were declared, with
// arguments that follow their schemas.
#pragma once

#include <optional>
#include <vector>

#include "chat/format.h"
#include "engine/grammar_spec.h"
#include "server/openai/chat_request.h"

namespace fathom {

// `text` is what the answer must look like where it is no call, if the request says so.
//  - required and named: nothing but calls, at least one; `text` does not count.
//  - auto with a JSON schema for the text: either calls or that JSON. Other forms of text leave no
//    room for calls.
//  - auto without: nothing, but where a tool is strict text is free until a call begins.
// parallel: whether there may be several calls.
std::optional<GrammarSpec> tool_grammar(ChatFormat format, const std::vector<Tool>& tools,
                                        const ToolChoice& choice, bool parallel,
                                        const std::optional<GrammarSpec>& text);

}  // namespace fathom
