// Which handler answers which method and path, and who may ask. A route can't be added without
// saying who may ask, and what has no route is answered 404 or 405, so that access is denied by
// default. Filled before the server starts, then only read, by any thread.
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
  kPublic,    // anyone
  kKey,       // a key of ServerOptions::api_keys or admin_keys; anyone where there are no api_keys
  kOperator,  // a key of ServerOptions::admin_keys; as kKey where there are none
  kAdmin,     // a key of ServerOptions::admin_keys; nobody where there are none
};
std::string_view name_of(Access access);  // "public", "key", "operator", "admin"

// Answers a request, now or later, from any thread. May throw: that is a 500 (503 for
// std::bad_alloc). Several threads may be in it at once.
using Handler = std::function<void(Request request, std::shared_ptr<Responder> responder)>;

// Asked on the connection's I/O thread when a request is there, before its handler is: the answer
// that makes the handler's work needless, or none. Must return at once.
using Gate = std::function<std::optional<Response>()>;

// Where a handler runs.
enum class RunOn {
  kWorker,    // on one of ServerOptions::worker_threads: may compute (parse, tokenize) for a while
  kIoThread,  // on the connection's I/O thread: must return at once; answers though workers are
              // busy
};

struct RouteOptions {
  RunOn run_on = RunOn::kWorker;
  bool while_draining = false;  // answered after begin_drain() too: health, metrics
  bool wants_json = false;      // a body is application/json; 415 otherwise
};

struct Route {
  Method method = Method::kGet;
  std::string pattern;
  Access access = Access::kAdmin;
  Handler handler;
  RouteOptions options;
  Gate gate;  // null: open
};

class RouteTable {
 public:
  // Patterns: "/v1/models", "/v1/responses/{id}" (one segment), "/v1/models/{id...}" (the rest of
  // the path, slashes included; last only). Segments are decoded before they are compared; exact
  // segments win over {one}, and those over {rest...}. A malformed or repeated pattern, or a null
  // handler, is a bug (FATHOM_CHECK).
  void add(Method method, std::string pattern, Access access, Handler handler,
           RouteOptions options = {}, Gate gate = {});

  struct Match {
    const Route* route = nullptr;  // null: see `allowed`
    std::vector<Parameter> path_parameters;
    std::vector<Method> allowed;  // methods that this path has; empty: there is no such path
  };
  // `segments`: the path's parts between slashes, decoded. HEAD finds a GET route.
  Match find(std::string_view method, const std::vector<std::string>& segments) const;

  // In the order in which they were added: what tests and the documentation enumerate.
  const std::vector<Route>& routes() const { return routes_; }

 private:
  std::vector<Route> routes_;
  std::vector<std::vector<std::string>> patterns_;  // the segments of each
};

}  // namespace fathom::http
