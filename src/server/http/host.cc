#include "server/http/host.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>

#include "server/http/message.h"

namespace fathom::http {

std::string address_text(std::string_view host, int port) {
  const bool is_bare_ipv6 = host.find(':') != host.npos && !host.starts_with('[');
  return is_bare_ipv6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::string_view without_brackets(std::string_view host) {
  const bool has_brackets = host.starts_with('[') && host.ends_with(']');
  return has_brackets ? host.substr(1, host.size() - 2) : host;
}

bool is_ip_address(const std::string& host) {
  in6_addr address;  // has room for either
  return inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

bool is_loopback_host(std::string_view host) {
  const std::string address(without_brackets(host));
  in_addr v4;
  if (inet_pton(AF_INET, address.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, address.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return equal_ignoring_case(address, "localhost");
}

std::string host_name_in(std::string_view field) {
  const size_t bracket = field.rfind(']');
  const size_t colon = field.find(':', bracket == field.npos ? 0 : bracket);
  const std::string_view port = colon == field.npos ? "" : field.substr(colon + 1);
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (!std::all_of(port.begin(), port.end(), is_digit)) return {};
  std::string_view host = field.substr(0, colon);
  if (host.starts_with('[')) {
    const std::string address(without_brackets(host));
    return host.ends_with(']') && is_ip_address(address) ? address : std::string();
  }
  if (host.ends_with('.')) host.remove_suffix(1);
  std::string name(host);
  for (char& c : name) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return name;
}

}  // namespace fathom::http
