// Heads of messages between router and replica, without what belongs to one connection only.
#pragma once

#include <string>
#include <string_view>

#include "server/http/message.h"

namespace fathom::router {

// Returns the head of the request to a replica at `host` ("127.0.0.1:8001"), with its empty line.
// `api_key`: replaces the client's; empty: the client's is kept.
std::string request_head(const http::Request& request, std::string_view host,
                         std::string_view api_key);

// Returns a reply's fields for the client, without those that the front sets itself.
http::Headers reply_headers(const http::Headers& headers);

}  // namespace fathom::router
