// How Kimi K2.5 is told of tools: types in TypeScript, made of the parameters' JSON schemas.
//
// Source: the tokenizer's `encode_tools_to_typescript_style`, which the checkpoint ships as code
// (read as published with tinker-cookbook). What it cannot express it declares as JSON.
#pragma once

#include <string>
#include <vector>

#include "chat/message.h"

namespace fathom {

// All declarations, keys in ascending order as the tokenizer sorts them first. A schema with a part
// that has no form in TypeScript (no type, an unknown reference, an enum's value of another type)
// gives all tools as compact JSON. `tools` are not empty.
std::string kimi_declarations(const std::vector<Tool>& tools);

}  // namespace fathom
