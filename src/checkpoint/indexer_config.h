// The fields of sparse attention in a config.json: DeepSeek-V3.2's, and what GLM-5 adds to them.
#pragma once

#include <string>

#include "base/json.h"
#include "checkpoint/model_config.h"

namespace fathom {

// Whether such a model has an indexer: by its type, or because it has an indexer's fields.
bool declares_indexer(const JsonFields& fields, std::string_view model_type);

// Reads and checks them. `config` has its attention's sizes already. `where` begins each error.
Result<IndexerConfig> parse_indexer(const JsonFields& fields, const ModelConfig& config,
                                    const std::string& where);

}  // namespace fathom
