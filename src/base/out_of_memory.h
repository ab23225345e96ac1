// What is said where std::bad_alloc was caught.
#pragma once

#include "base/status.h"

namespace fathom {

// Needs no memory to be made or copied: its words are short enough to stand in the string itself.
inline Status out_of_memory() noexcept { return {Code::kUnavailable, "out of memory"}; }

}  // namespace fathom
