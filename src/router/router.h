// `fathom route`: one address in front of several servers of the same model.
//
//   create(), listen(), start()  clients can connect; replicas are polled, /ready says 503 until
//   one is
//                                ready
//   stop()                       refuses new requests, waits for those in flight, ends the threads
//
// Threads: the front's I/O threads and workers (server/http), and the router's own, which has all
// replicas, their connections and the requests in flight. Any thread may call.
#pragma once

#include <chrono>
#include <memory>

#include "base/status.h"
#include "router/router_options.h"

namespace fathom::router {

class Router {
 public:
  static Result<std::unique_ptr<Router>> create(RouterOptions options);
  ~Router();  // stop() with zero grace
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;

  Result<> listen();
  int port() const;
  void start();
  // Returns true if every request was answered within `grace`.
  bool stop(std::chrono::nanoseconds grace);

 private:
  struct Parts;
  explicit Router(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom::router
