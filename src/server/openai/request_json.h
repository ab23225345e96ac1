// Parses JSON from the network with Boost.JSON and limits.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/json.h"
#include "server/openai/api_error.h"

namespace fathom {

inline constexpr size_t kMaxBodyBytes = 32 << 20;
inline constexpr int kMaxJsonDepth = 64;
inline constexpr size_t kMaxJsonKeys = 100'000;
// Bounds the memory of a body such as "[0,0,0…" (24 bytes per value). A prompt of a million ids
// fits.
inline constexpr size_t kMaxJsonValues = 1'100'000;

// Strings up to this length are accepted for any model; longer ones must fit into its context.
inline constexpr size_t kMaxFreeStringBytes = 1 << 20;

// Parses an object. Errors: 413 for more than kMaxBodyBytes; 400 for anything that is not a JSON
// object, ill-formed UTF-8, unpaired surrogates, a byte order mark, a repeated key, a number beyond
// a double, or a broken limit. A string of more than max_string_bytes is refused before it is
// copied, as a prompt that exceeds the context.
ApiResult<json::object> parse_request_json(std::string_view body,
                                           size_t max_string_bytes = kMaxBodyBytes);

}  // namespace fathom
