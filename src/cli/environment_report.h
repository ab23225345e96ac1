// What a bug report needs to know of the program and the machine: `fathom env`.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace fathom {

// Sections of names and values ("cpu": {"model": …}), read now from the program, /proc and /sys.
// What this machine does not tell is null. Of the environment it holds the variables that Fathom
// heeds, with the keys among their values masked.
json::object environment_report();

// The same for people: a line a value, a heading a section.
std::string environment_text(const json::object& report);

// What --version prints: version, commit, and what the kernels are compiled for.
std::string version_text();

}  // namespace fathom
