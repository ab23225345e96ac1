// generation_config.json: the model's defaults for generation, which a request may override.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace fathom {

struct GenerationDefaults {
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  // The ids that end a text: generation_config.json's, or config.json's if it has none.
  std::vector<int32_t> eos_ids;
};

// `source` begins each error. Token ids must be below vocab_size.
Result<GenerationDefaults> parse_generation_config(std::string_view text, std::string_view source,
                                                   int64_t vocab_size);

// Reads one token id or an array of them, as eos_token_id is stored in both files; empty if
// missing. `last` is the largest valid id.
Result<std::vector<int32_t>> parse_token_ids(const JsonFields& fields, std::string_view key,
                                             int64_t last, const std::string& where);

}  // namespace fathom
