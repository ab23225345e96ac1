// Decides on a request once its head is read: the route that handles it, or the refusal.
//
// Checks in order: target (400), host (421), route (404, 405, 501), origin (403), key (401, 403),
// content type and coding (415), drain (503). Uses no sockets. Immutable; any thread may call.
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
  // `routes` must outlive the dispatcher.
  Dispatcher(const RouteTable& routes, KeyRing keys, BrowserGuard guard);

  struct Decision {
    // Handles the request, unless `refusal` is set. The response to OPTIONS is a refusal too.
    const Route* route = nullptr;
    std::optional<Response> refusal;
    Target target;
    std::vector<Parameter> path_parameters;
    Caller caller;
  };
  Decision decide(const RequestHead& head, bool draining) const;

  // Returns the value of Access-Control-Allow-Origin; empty: the field is not sent.
  std::string cors_origin(const Headers& request) const { return guard_.cors_origin(request); }

 private:
  Response answer_options(const RequestHead& head, const std::vector<Method>& methods) const;

  const RouteTable& routes_;
  const KeyRing keys_;
  const BrowserGuard guard_;
};

}  // namespace fathom::http
