// Version information of this build. cmake/Version.cmake generates the source at each build.
#pragma once

namespace fathom {

// "1.2.3" at the tag v1.2.3, "1.2.3+5.g0123abc" five commits later, otherwise the project's
// version.
const char* program_version();

// The commit's full hash, followed by ", changed" if files differ from it; "unknown" if it is not
// known.
const char* program_commit();

// The CUDA toolkit's version ("13.0.88"); empty if built without it.
const char* program_cuda();

}  // namespace fathom
