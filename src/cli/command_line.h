// The command line of `fathom`, from arguments to exit status.
#pragma once

namespace fathom {

inline constexpr int kExitFailed = 1;    // the work failed
inline constexpr int kExitBadInput = 2;  // invalid flags, model files or other input

// Parses, runs the selected command and returns its exit status. Errors are one line on stderr.
int run_command_line(int argc, const char* const* argv);

}  // namespace fathom
