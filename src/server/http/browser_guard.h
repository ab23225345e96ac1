// Refuses what a web page made a browser send. A page may post to any address that its browser can
// reach, this server's included, and a page whose name is resolved anew (DNS rebinding) is of the
// same origin as the server in the browser's eyes. Two rules hold against that; the first is that
// of Go's net/http.CrossOriginProtection:
//
//   Origin  A request that may change something (not GET, HEAD, OPTIONS) comes from no page, from a
//           page of this server, or from one of `origins`. Sec-Fetch-Site tells, which no page can
//           forge; browsers that do not send it are judged by Origin against Host.
//   Host    Names this server: an address, "localhost" or a name below it, the name that it was
//           told to listen on, the machine's name, or one of `hosts`. Where it listens on an
//           address that is no loopback address, also a name without a dot, which nobody can
//           register. Checked where no API key is set, because a page does not know the key, or
//           where `hosts` is given.
//
// Immutable; any thread.
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

  // 421: the request is for another server.
  std::optional<Response> refuse_host(const Headers& headers) const;
  // 403: a page of another origin sent it.
  std::optional<Response> refuse_origin(const RequestHead& head) const;

  // The value of Access-Control-Allow-Origin for the answer; empty: none.
  std::string cors_origin(const Headers& request) const;

 private:
  bool is_own_name(const std::string& name) const;  // without port

  const std::vector<std::string> origins_;
  std::vector<std::string> names_;  // in lower case
  bool any_host_ = false;
  bool dotless_names_ = false;
};

}  // namespace fathom::http
