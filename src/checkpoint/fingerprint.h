// A short text that tells whether two machines have the same checkpoint, without reading all of it.
#pragma once

#include <string>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace fathom {

// 32 hexadecimal digits: a hash of config.json, of every tensor's name, dtype and shape, and of a
// few KiB of up to 64 tensors, which differ between two trainings of one architecture. It does not
// depend on the directory or on how tensors are spread over files. Errors name the file.
Result<std::string> fingerprint(const Checkpoint& checkpoint);

}  // namespace fathom
