// The command line of `fathom`, from arguments to exit status.
#pragma once

#include <string_view>

namespace fathom {

inline constexpr int kExitFailed = 1;    // the work failed
inline constexpr int kExitBadInput = 2;  // invalid flags, model files or other input
inline constexpr int kExitDead = 3;      // a device or another node is lost, or a step hangs

// Prints the message as the program's last line on stderr; returns `status`.
int report_failure(std::string_view message, int status);

// Parses, runs the selected command and returns its exit status. Errors are one line on stderr.
int run_command_line(int argc, const char* const* argv);

}  // namespace fathom
