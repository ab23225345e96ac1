// Maps method and path to a handler and an access class. Every route states its access, and a
// request without a route gets 404 or 405, so access is denied by default. Filled before the server
// starts, then read-only; any thread may read.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/message.h"
#include "server/http/responder.h"

namespace fathom::http {

enum class Method { kGet, kPost, kPut, kDelete };
std::string_view name_of(Method method);  // "GET"

enum class Access {
  kPublic,    // no key needed
  kKey,       // a key of ServerOptions::api_keys or admin_keys; public if there are no api_keys
  kOperator,  // a key of ServerOptions::admin_keys; like kKey if there are none
  kAdmin,     // a key of ServerOptions::admin_keys; always refused if there are none
};
std::string_view name_of(Access access);  // "public", "key", "operator", "admin"

// Answers a request, now or later, from any thread. An exception becomes a 500 (503 for
// std::bad_alloc). Several threads may call it at once.
using Handler = std::function<void(Request request, std::shared_ptr<Responder> responder)>;

// Called on the connection's I/O thread when a request is complete, before its handler. A returned
// response is sent instead of calling the handler. Must return at once.
using Gate = std::function<std::optional<Response>()>;

// The thread that runs a handler.
enum class RunOn {
  // One of ServerOptions::worker_threads: may compute for a while (parse, tokenize).
  kWorker,
  // The connection's I/O thread: must return at once; answers even if all workers are busy.
  kIoThread,
};

struct RouteOptions {
  RunOn run_on = RunOn::kWorker;
  bool while_draining = false;  // still served after begin_drain(): health, metrics
  bool wants_json = false;      // a body must be application/json, otherwise 415
};

struct Route {
  Method method = Method::kGet;
  std::string pattern;
  Access access = Access::kAdmin;
  Handler handler;
  RouteOptions options;
  Gate gate;  // null: every request passes
};

class RouteTable {
 public:
  // Patterns: "/v1/models", "/v1/responses/{id}" (one segment), "/v1/models/{id...}" (the rest of
  // the path with its slashes; last only). Segments are decoded before they are compared. Exact
  // segments win over {one}, which wins over {rest...}. A malformed or repeated pattern, or a null
  // handler, is a bug (FATHOM_CHECK).
  void add(Method method, std::string pattern, Access access, Handler handler,
           RouteOptions options = {}, Gate gate = {});

  struct Match {
    const Route* route = nullptr;  // null: see `allowed`
    std::vector<Parameter> path_parameters;
    std::vector<Method> allowed;  // methods of this path; empty: the path has no route
  };
  // `segments`: the path split at slashes, decoded. HEAD matches a GET route.
  Match find(std::string_view method, const std::vector<std::string>& segments) const;

  // Returns the routes in order of addition, for tests and documentation to enumerate.
  const std::vector<Route>& routes() const { return routes_; }

 private:
  std::vector<Route> routes_;
  std::vector<std::vector<std::string>> patterns_;  // each route's segments
};

}  // namespace fathom::http
