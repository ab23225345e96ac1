// `fathom inspect MODEL`: describes a checkpoint and the memory it needs, from its headers.
#pragma once

#include <cstdio>
#include <string>

#include "base/status.h"

namespace fathom {

// Prints the configuration, the tensors by group, the cache's bytes per token in each format, and a
// memory plan; with `json` as one JSON object. Reads no weights.
Result<> inspect(const std::string& model, bool json, std::FILE* out);

}  // namespace fathom
