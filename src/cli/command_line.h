// The command line of `fathom`, from arguments to an exit status.
#pragma once

namespace fathom {

inline constexpr int kExitFailed = 1;    // something went wrong while running
inline constexpr int kExitBadInput = 2;  // flags, model files or other input are wrong

// Parses, runs the chosen command and returns its exit status. Errors are one line on stderr.
int run_command_line(int argc, const char* const* argv);

}  // namespace fathom
