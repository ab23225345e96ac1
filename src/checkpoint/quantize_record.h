// What identifies an unfinished run of `fathom quantize` (output_directory.h).
#pragma once

#include <string>

#include "checkpoint/quantize_checkpoint.h"

namespace fathom {

// The record, one line per item: the options that affect the output, and the source's files with
// sizes and times.
Result<std::string> quantize_record(const Checkpoint& checkpoint, const QuantizeOptions& options);

}  // namespace fathom
