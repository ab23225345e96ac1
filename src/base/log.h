// Log lines for humans, written to stderr: fathom::log_info("…"). stdout is for the program's
// output.
#pragma once

#include <fmt/format.h>

#include <new>
#include <string_view>
#include <utility>

namespace fathom {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Drops lines below `level` from now on. The default is kInfo.
void set_log_level(LogLevel level);

void log_line(LogLevel level, std::string_view text);

// A log line that cannot be formatted for lack of memory is dropped: logging never fails a caller.
template <typename... Args>
void log_formatted(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  try {
    log_line(level, fmt::format(format, std::forward<Args>(args)...));
  } catch (const std::bad_alloc&) {
  }
}
template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kDebug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kWarning, format, std::forward<Args>(args)...);
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_formatted(LogLevel::kError, format, std::forward<Args>(args)...);
}

}  // namespace fathom
