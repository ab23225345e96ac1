// A request's name, from the client or made up: in the answer, in every log line.
#pragma once

#include <string>
#include <string_view>

namespace fathom::http {

// What is taken over from X-Request-Id: 1 to 128 letters, digits, '.', '_', '-' and ':', so that it
// can stand in a log line or a file's name as it is.
bool is_valid_request_id(std::string_view id);

// "req-" and 32 hex digits that nobody can guess: who knows an id may end its request. Any thread.
std::string make_request_id();

}  // namespace fathom::http
