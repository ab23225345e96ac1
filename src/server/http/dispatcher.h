// What becomes of a request, once its head is there: the route that may answer it, or the refusal.
// Order: target (400), host (421), route (404, 405, 501), origin (403), key (401, 403), content
// type and coding (415), drain (503). Knows no sockets; immutable, any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http/browser_guard.h"
#include "server/http/key_ring.h"
#include "server/http/message.h"
#include "server/http/request_reader.h"
#include "server/http/route_table.h"
#include "server/http/target.h"

namespace fathom::http {

class Dispatcher {
 public:
  // The table must outlive the dispatcher.
  Dispatcher(const RouteTable& routes, KeyRing keys, BrowserGuard guard);

  struct Decision {
    const Route* route = nullptr;     // answers it, unless there is a
    std::optional<Response> refusal;  // (or an answer to OPTIONS)
    Target target;
    std::vector<Parameter> path_parameters;
    Caller caller;
  };
  Decision decide(const RequestHead& head, bool draining) const;

  // The value of Access-Control-Allow-Origin for the answer; empty: none.
  std::string cors_origin(const Headers& request) const { return guard_.cors_origin(request); }

 private:
  Response answer_options(const RequestHead& head, const std::vector<Method>& methods) const;

  const RouteTable& routes_;
  const KeyRing keys_;
  const BrowserGuard guard_;
};

}  // namespace fathom::http
