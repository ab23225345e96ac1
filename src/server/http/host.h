// Hosts as flags, URLs and Host fields name them.
#pragma once

#include <string>
#include <string_view>

namespace fathom::http {

// "127.0.0.1:8000", "[::1]:8000"; `host` with or without brackets.
std::string address_text(std::string_view host, int port);

// "::1" of "[::1]"; other text as it is.
std::string_view without_brackets(std::string_view host);

// An IPv4 or IPv6 address, without brackets.
bool is_ip_address(const std::string& host);

// Whether only this machine reaches what listens there: 127.0.0.0/8, ::1, localhost.
bool is_loopback_host(std::string_view host);

// The host of a Host field, in lower case, without port, brackets and last dot: "chat.example" of
// "Chat.Example.:8000", "::1" of "[::1]:8000". Empty where the field is malformed.
std::string host_name_in(std::string_view field);

}  // namespace fathom::http
