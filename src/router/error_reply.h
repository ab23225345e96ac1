// The router's own errors, in the form of the API that the request speaks.
#pragma once

#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::router {

enum class ErrorForm { kOpenAi, kResponses, kAnthropic };
// By the path: Anthropic's for /v1/messages…, that of /v1/responses, OpenAI's for all others.
ErrorForm error_form(std::string_view path);

http::Response error_reply(ErrorForm form, int status, std::string_view message,
                           std::string_view code);

// The event that ends a stream which the replica has not ended.
std::string error_event(ErrorForm form, std::string_view message);

}  // namespace fathom::router
