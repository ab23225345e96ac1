// What a request's prompt begins with, as text to compare with other requests'. Not what the model
// sees: the strings of the body's prompt fields in the order in which chat formats render them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fathom::router {

// Longer prompts are compared by this much of their beginning.
inline constexpr size_t kMostPromptText = 256 << 10;

// `body`: JSON of any of the generating endpoints. Empty if it is not JSON or has no prompt: the
// replica will say what is wrong.
std::string prompt_text(std::string_view body);

}  // namespace fathom::router
