// The error for a caught std::bad_alloc.
#pragma once

#include "base/status.h"

namespace fathom {

// Does not allocate: the message fits into the string object itself.
inline Status out_of_memory() noexcept { return {Code::kUnavailable, "out of memory"}; }

}  // namespace fathom
