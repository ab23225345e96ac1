// model.safetensors.index.json: the shard of each tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// Maps a tensor's name to its shard's, a plain file name that ends in .safetensors.
// metadata.total_size is ignored: it is wrong in published files.
using SafetensorsIndex = std::map<std::string, std::string, std::less<>>;
Result<SafetensorsIndex> parse_safetensors_index(std::string_view text, std::string_view source);

}  // namespace fathom
