// Host names and addresses, as they occur in flags, URLs and Host fields.
#pragma once

#include <string>
#include <string_view>

namespace fathom::http {

// Returns "127.0.0.1:8000" or "[::1]:8000"; `host` may have brackets.
std::string address_text(std::string_view host, int port);

// Returns "::1" for "[::1]" and other text unchanged.
std::string_view without_brackets(std::string_view host);

// Returns whether `host` is an IPv4 or IPv6 address without brackets.
bool is_ip_address(const std::string& host);

// Returns whether a socket bound to `host` is reachable from this machine only: 127.0.0.0/8, ::1,
// localhost.
bool is_loopback_host(std::string_view host);

// Returns the host of a Host field in lower case, without port, brackets and final dot:
// "chat.example" for "Chat.Example.:8000", "::1" for "[::1]:8000". Empty if the field is malformed.
std::string host_name_in(std::string_view field);

}  // namespace fathom::http
