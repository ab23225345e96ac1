// Request ids, from the client or generated. They appear in the response and in every log line.
#pragma once

#include <string>
#include <string_view>

namespace fathom::http {

// Returns whether an X-Request-Id is accepted: 1 to 128 letters, digits, '.', '_', '-' and ':',
// which need no escaping in a log line or a file name.
bool is_valid_request_id(std::string_view id);

// Returns "req-" and 32 unguessable hex digits: whoever knows an id may abort its request. Any
// thread may call.
std::string make_request_id();

}  // namespace fathom::http
