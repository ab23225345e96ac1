// Which build this is. The source is made at each build by cmake/Version.cmake.
#pragma once

namespace fathom {

// "1.2.3" at a tag v1.2.3, "1.2.3+5.g0123abc" five commits later, else the project's version.
const char* program_version();

// The commit's full hash, with ", changed" if files differ from it; "unknown" where nothing says
// it.
const char* program_commit();

// The CUDA toolkit's version ("13.0.88"); empty if built without it.
const char* program_cuda();

}  // namespace fathom
