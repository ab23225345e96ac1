// Placement files: an expert table as JSON (docs/placement.md).
#pragma once

#include <string>
#include <string_view>

#include "placement/expert_table.h"

namespace fathom {

// Parses a file's text. `source` begins every error, which names field, value and limit.
Result<ExpertTable> parse_expert_table(std::string_view text, std::string_view source);

// Reads and parses the file at `path`.
Result<ExpertTable> read_expert_table(const std::string& path);

// The text of a placement file, one line a layer. Reading it gives an equal table.
std::string expert_table_text(const ExpertTable& table);

}  // namespace fathom
