// `fathom inspect MODEL`: what a checkpoint is and what it would take to run, from its headers.
#pragma once

#include <cstdio>
#include <string>

#include "base/status.h"

namespace fathom {

// Prints the configuration, the tensors by group, the cache's bytes per token in each format and a
// memory plan; as one JSON object if `json`. Reads no weights.
Result<> inspect(const std::string& model, bool json, std::FILE* out);

}  // namespace fathom
