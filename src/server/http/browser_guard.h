// Refuses cross-origin requests that a web page makes a browser send (CSRF, DNS rebinding).
//
// A page may post to any address that its browser can reach, this server included. After DNS
// rebinding the browser takes the page and the server for the same origin. Two checks; the first is
// that of Go's net/http.CrossOriginProtection:
//
//   Origin  A request with an unsafe method (not GET, HEAD, OPTIONS) must come from no page, from a
//           page of this server, or from one of `cors_origins`. Sec-Fetch-Site decides, which no
//           page can forge; without it Origin is compared with Host.
//   Host    The field must name this server: an IP address, "localhost" or a name below it, the
//   name
//           in `host`, the machine's name, or one of `allowed_hosts`. A server that listens on an
//           address other than loopback also accepts names without a dot, which nobody can
//           register. The check is on where no API key is set (a page does not know the key) or
//           where `allowed_hosts` is given.
//
// Immutable; any thread may call.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/message.h"
#include "server/http/request_reader.h"
#include "server/http/server_options.h"

namespace fathom::http {

class BrowserGuard {
 public:
  explicit BrowserGuard(const ServerOptions& options);

  // Returns 421 if the Host field names another server.
  std::optional<Response> refuse_host(const Headers& headers) const;
  // Returns 403 if a page of another origin sent the request.
  std::optional<Response> refuse_origin(const RequestHead& head) const;

  // Returns the value of Access-Control-Allow-Origin; empty: the field is not sent.
  std::string cors_origin(const Headers& request) const;

 private:
  bool is_own_name(const std::string& name) const;  // `name` without port

  const std::vector<std::string> origins_;
  std::vector<std::string> names_;  // lower case
  bool any_host_ = false;
  bool dotless_names_ = false;
};

}  // namespace fathom::http
