// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

// Tensor name -> name of its shard, a plain file name that ends in .safetensors.
// metadata.total_size is not read: published files have it wrong.
using SafetensorsIndex = std::map<std::string, std::string, std::less<>>;
Result<SafetensorsIndex> parse_safetensors_index(std::string_view text, std::string_view source);

}  // namespace fathom
