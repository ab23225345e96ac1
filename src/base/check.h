// FATHOM_CHECK: a condition that only a bug of ours can break. Always on; never reachable from
// input (that is base/status.h). Prints the condition, the place and a message, then aborts.
#pragma once

#include <fmt/format.h>

#include <string>

namespace fathom {

[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& message);

}  // namespace fathom

#define FATHOM_CHECK(condition, ...)                                                    \
  do {                                                                                  \
    if (!(condition)) [[unlikely]]                                                      \
      ::fathom::check_failed(#condition, __FILE__, __LINE__, fmt::format(__VA_ARGS__)); \
  } while (false)
