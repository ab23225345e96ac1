// FATHOM_CHECK tests a condition that only a bug in this program can break. It is always on and
// must never be reachable from input (that is base/status.h). On failure it prints the condition,
// the source location and a message, then aborts.
#pragma once

#ifdef __CUDACC__
#include <sstream>
#else
#include <fmt/format.h>
#endif

#include <string>

namespace fathom {

[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& message);

#ifdef __CUDACC__
// nvcc 13 does not compile fmt 9: there the values are appended to the message.
template <typename... Values>
std::string check_message(const char* message, const Values&... values) {
  std::ostringstream text;
  text << message;
  ((text << " | " << values), ...);
  return text.str();
}
#define FATHOM_CHECK_MESSAGE(...) ::fathom::check_message(__VA_ARGS__)
#else
#define FATHOM_CHECK_MESSAGE(...) fmt::format(__VA_ARGS__)
#endif

}  // namespace fathom

#define FATHOM_CHECK(condition, ...)                                                             \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::fathom::check_failed(#condition, __FILE__, __LINE__, FATHOM_CHECK_MESSAGE(__VA_ARGS__)); \
  } while (false)
