// The tags around reasoning, the same words in every format that has it.
#pragma once

#include <string_view>

namespace fathom {

inline constexpr std::string_view kThinkOpen = "<think>";
inline constexpr std::string_view kThinkClose = "</think>";

}  // namespace fathom
