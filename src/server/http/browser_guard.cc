#include "server/http/browser_guard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "server/http/error_body.h"
#include "server/http/host.h"
#include "server/http/log_text.h"

namespace fathom::http {
namespace {

std::string machine_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, HOST_NAME_MAX) == 0 ? host_name_in(name) : std::string();
}

bool is_safe(std::string_view method) {
  return method == "GET" || method == "HEAD" || method == "OPTIONS";
}

// Returns "chat.example:8000" for "https://chat.example:8000"; empty for "null".
std::string_view authority_of(std::string_view origin) {
  const size_t scheme = origin.find("://");
  return scheme == std::string_view::npos ? std::string_view() : origin.substr(scheme + 3);
}

}  // namespace

BrowserGuard::BrowserGuard(const ServerOptions& options)
    : origins_(options.cors_origins),
      any_host_(options.allowed_hosts.empty() && !options.api_keys.empty()) {
  for (const std::string& allowed : options.allowed_hosts) {
    any_host_ |= allowed == "*";
    names_.push_back(host_name_in(allowed));
  }
  const bool listens_on_address = is_ip_address(std::string(without_brackets(options.host)));
  if (!listens_on_address) names_.push_back(host_name_in(options.host));
  dotless_names_ = listens_on_address && !is_loopback_host(options.host);
  const std::string machine = machine_name();
  const std::string label = machine.substr(0, machine.find('.'));
  names_.insert(names_.end(), {"localhost", machine, label, label + ".local"});
}

bool BrowserGuard::is_own_name(const std::string& name) const {
  if (name.empty()) return false;
  if (is_ip_address(name) || name.ends_with(".localhost")) return true;
  if (dotless_names_ && name.find('.') == std::string::npos) return true;
  return std::find(names_.begin(), names_.end(), name) != names_.end();
}

std::optional<Response> BrowserGuard::refuse_host(const Headers& headers) const {
  const std::string* host = headers.find("Host");
  // Browsers always send Host; HTTP/1.0 clients may omit it.
  if (any_host_ || host == nullptr || is_own_name(host_name_in(*host))) return std::nullopt;
  return error_response(421,
                        fmt::format("'{}' in the Host field is not a name of this server; "
                                    "--allowed-hosts adds one",
                                    for_log(*host, 255)),
                        "host_not_allowed");
}

std::optional<Response> BrowserGuard::refuse_origin(const RequestHead& head) const {
  if (is_safe(head.method) || !cors_origin(head.headers).empty()) return std::nullopt;
  const std::string* origin = head.headers.find("Origin");
  if (const std::string* site = head.headers.find("Sec-Fetch-Site")) {
    if (*site == "same-origin" || *site == "none") return std::nullopt;
  } else {
    const std::string* host = head.headers.find("Host");
    if (origin == nullptr) return std::nullopt;  // not sent by a browser
    if (host != nullptr && !host->empty() && equal_ignoring_case(authority_of(*origin), *host)) {
      return std::nullopt;
    }
  }
  return error_response(403,
                        fmt::format("pages of the origin '{}' may not call this server; "
                                    "--allowed-origins adds one",
                                    origin == nullptr ? "null" : for_log(*origin, 255)),
                        "origin_not_allowed");
}

std::string BrowserGuard::cors_origin(const Headers& request) const {
  const std::string* origin = request.find("Origin");
  if (origin == nullptr) return {};
  for (const std::string& allowed : origins_) {
    if (allowed == "*") return "*";
    if (equal_ignoring_case(allowed, *origin)) return *origin;
  }
  return {};
}

}  // namespace fathom::http
