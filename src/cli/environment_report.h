// The report of program and machine for a bug report: `fathom env`.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace fathom {

// Sections of names and values ("cpu": {"model": …}), collected from the program, /proc and /sys.
// Values that are not available are null. Includes the environment variables that Fathom reads,
// with secrets masked.
json::object environment_report();

// The same as text: one line per value, one heading per section.
std::string environment_text(const json::object& report);

// The output of --version: version, commit, and the targets of the kernels.
std::string version_text();

}  // namespace fathom
