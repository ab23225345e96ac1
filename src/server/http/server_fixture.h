// Test fixture: a server on a free port with routes that a test controls.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "server/http/raw_client.h"
#include "server/http/server.h"

namespace fathom::http {

// Requests whose handler returned without a response; the test sends it.
class Held {
 public:
  struct Item {
    Request request;
    std::shared_ptr<Responder> responder;
  };
  void put(Request request, std::shared_ptr<Responder> responder) {
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(request), std::move(responder)});
    arrived_.notify_all();
  }
  // Waits for the next request; returns an Item without responder if none comes.
  Item take() {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, std::chrono::seconds(60), [&] { return !items_.empty(); })) {
      ADD_FAILURE() << "no request came";
      return {};
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }
  bool empty() {
    const std::lock_guard lock(mutex_);
    return items_.empty();
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Item> items_;
};

// Polls until condition() holds; false if it does not within a minute.
template <typename Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 12'000; ++i) {
    if (condition()) return true;
    usleep(5000);
  }
  return false;
}

class ServerTest : public testing::Test {
 protected:
  // GET /hello: "hello" (I/O thread). POST /echo: the body (worker). GET and POST /hold: see Held.
  // GET /throw and /drop. GET /items/{id} and /rest/{path...}: the parameter.
  static RouteTable test_routes(Held& held) {
    RouteTable routes;
    const RouteOptions at_once{.run_on = RunOn::kIoThread};
    routes.add(
        Method::kGet, "/hello", Access::kPublic,
        [](const Request&, const std::shared_ptr<Responder>& responder) {
          responder->send({.content_type = "text/plain", .body = "hello"});
        },
        at_once);
    routes.add(Method::kPost, "/echo", Access::kPublic,
               [](Request request, const std::shared_ptr<Responder>& responder) {
                 responder->send({.content_type = "text/plain", .body = std::move(request.body)});
               });
    for (const Method method : {Method::kGet, Method::kPost}) {
      routes.add(method, "/hold", Access::kPublic,
                 [&held](Request request, std::shared_ptr<Responder> responder) {
                   held.put(std::move(request), std::move(responder));
                 });
    }
    routes.add(Method::kGet, "/throw", Access::kPublic,
               [](const Request&, const std::shared_ptr<Responder>&) {
                 throw std::runtime_error("a\nsecret");
               });
    routes.add(Method::kGet, "/drop", Access::kPublic,
               [](const Request&, const std::shared_ptr<Responder>&) {});
    routes.add(Method::kGet, "/items/{id}", Access::kPublic,
               [](const Request& request, const std::shared_ptr<Responder>& responder) {
                 responder->send({.body = *request.path_parameter("id")});
               });
    routes.add(Method::kGet, "/rest/{path...}", Access::kPublic,
               [](const Request& request, const std::shared_ptr<Responder>& responder) {
                 responder->send({.body = *request.path_parameter("path")});
               });
    return routes;
  }

  // Options for tests: a free port, short check interval, no access log.
  static ServerOptions test_options() {
    ServerOptions options;
    options.port = 0;
    options.check_interval = std::chrono::milliseconds(10);
    options.linger_timeout = std::chrono::milliseconds(500);
    options.access_log = false;
    options.allowed_hosts = {"*"};  // tests send arbitrary Host fields
    return options;
  }

  void serve(ServerOptions options = test_options()) {
    serve(std::move(options), test_routes(held));
  }
  void serve(ServerOptions options, RouteTable routes) {
    auto made = Server::create(std::move(options), std::move(routes));
    ASSERT_TRUE(made) << made.error().message;
    server = std::move(*made);
    const auto listening = server->listen();
    ASSERT_TRUE(listening) << listening.error().message;
    server->start();
  }

  RawClient client() { return RawClient(server->port()); }

  // Sends one request on a new connection and returns everything received until its end.
  std::string exchange(std::string_view bytes) {
    RawClient one = client();
    one.send(bytes);
    one.end_sending();
    return one.read_to_end();
  }
  RawResponse get(std::string_view path, std::string_view more_fields = "") {
    return request("GET", path, more_fields, "");
  }
  RawResponse request(std::string_view method, std::string_view path, std::string_view more_fields,
                      std::string_view body) {
    RawClient one = client();
    std::string text =
        std::string(method).append(" ").append(path).append(" HTTP/1.1\r\nHost: x\r\n");
    text.append(more_fields);
    if (!body.empty()) text.append("Content-Length: " + std::to_string(body.size()) + "\r\n");
    one.send(text.append("\r\n").append(body));
    return one.read_response(method == "HEAD");
  }

  Held held;  // outlives the server
  std::unique_ptr<Server> server;
};

}  // namespace fathom::http
