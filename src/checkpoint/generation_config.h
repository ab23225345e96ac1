// generation_config.json: where generation starts unless a request says otherwise.
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
  // Which tokens end a text: generation_config.json's, or config.json's where that names none.
  std::vector<int32_t> eos_ids;
};

// `source` begins every error; ids must be below vocab_size.
Result<GenerationDefaults> parse_generation_config(std::string_view text, std::string_view source,
                                                   int64_t vocab_size);

// One token id or an array of them, as eos_token_id has it in both files; empty when missing.
// `last` is the largest id there is.
Result<std::vector<int32_t>> parse_token_ids(const JsonFields& fields, std::string_view key,
                                             int64_t last, const std::string& where);

}  // namespace fathom
