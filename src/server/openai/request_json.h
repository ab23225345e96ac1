// JSON from the network: Boost.JSON behind the limits of a request.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/json.h"
#include "server/openai/api_error.h"

namespace fathom {

inline constexpr size_t kMaxBodyBytes = 32 << 20;
inline constexpr int kMaxJsonDepth = 64;
inline constexpr size_t kMaxJsonKeys = 100'000;
// 24 bytes each in memory: what bounds a body of "[0,0,0…". A prompt of a million ids fits.
inline constexpr size_t kMaxJsonValues = 1'100'000;

// A string of so many bytes is fine whatever the model; longer ones have to fit into its context.
inline constexpr size_t kMaxFreeStringBytes = 1 << 20;

// The object that `body` is. Refused with 400: what is not JSON or not an object, is not valid
// UTF-8, has unpaired surrogates, a byte order mark, a key twice in one object, a number beyond a
// double, or breaks a limit; with 413: more than kMaxBodyBytes. Strings of more than
// max_string_bytes are refused before they are copied, as a prompt that exceeds the context.
ApiResult<json::object> parse_request_json(std::string_view body,
                                           size_t max_string_bytes = kMaxBodyBytes);

}  // namespace fathom
