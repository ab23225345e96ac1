// What a config.json must not have to be a model of this program: multi-head latent attention, or
// grouped-query attention as Llama has it, and feed-forward blocks as DeepSeek has them, and
// nothing else. A model is what its fields say; many families with other names are one of
// DeepSeek's, and others share the fields of latent attention and are something else.
#pragma once

#include <string>

#include "base/json.h"

namespace fathom {

// Whether every tensor of models of this type is known (tensor_names.h).
bool is_known_model_type(std::string_view model_type);

// Whether this is a model of grouped-query attention in Llama's form, without latents.
bool is_grouped_query(const JsonFields& fields, std::string_view model_type);

// Refuses a configuration with a field that stands for a part that is not computed here. The error
// names the field, its value and the part. `where` begins it.
Result<> check_architecture(const JsonFields& fields, std::string_view model_type,
                            const std::string& where);

}  // namespace fathom
