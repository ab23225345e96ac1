// Every limit and timeout, reduced so that a test reaches it.
#include <gtest/gtest.h>

#include <vector>

#include "server/http/server_fixture.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;

class ServerLimits : public ServerTest {
 protected:
  static int64_t ms_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 start)
        .count();
  }
  // Sends the request in one piece and returns the status of its refusal.
  int status_of(const std::string& text) {
    RawClient one = client();
    one.send(text);
    return one.read_response().status;
  }
};

TEST_F(ServerLimits, OfTheHead) {
  ServerOptions options = test_options();
  options.max_header_bytes = 1000;
  options.max_headers = 10;
  serve(options);
  const std::string begin = "GET /hello HTTP/1.1\r\nHost: x\r\n";
  const auto with_size = [&](size_t size) {
    return begin + "X: " + std::string(size - begin.size() - 7, 'x') + "\r\n\r\n";
  };
  ASSERT_EQ(with_size(1000).size(), 1000u);
  EXPECT_EQ(status_of(with_size(1000)), 200);
  EXPECT_EQ(status_of(with_size(1001)), 431);
  EXPECT_EQ(status_of(with_size(100'000)), 431);
  EXPECT_EQ(status_of("GET /" + std::string(2000, 'a') + " HTTP/1.1\r\nHost: x\r\n\r\n"), 414);
  std::string fields;
  for (int i = 0; i < 9; ++i) fields += "X: y\r\n";
  EXPECT_EQ(status_of(begin + fields + "\r\n"), 200);
  EXPECT_EQ(status_of(begin + fields + "X: y\r\n\r\n"), 431);
  // Fields of a trailer count too.
  EXPECT_EQ(status_of("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" +
                      fields + "\r\n"),
            431);
}

TEST_F(ServerLimits, OfTheBody) {
  ServerOptions options = test_options();
  options.max_body_bytes = 1000;
  serve(options);
  EXPECT_EQ(request("POST", "/echo", "", std::string(1000, 'x')).body.size(), 1000u);
  EXPECT_EQ(request("POST", "/echo", "", std::string(1001, 'x')).status, 413);
  const auto in_chunks = [&](const std::string& chunks) {
    return status_of("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" +
                     chunks);
  };
  const std::string chunk = "1f4\r\n" + std::string(500, 'x') + "\r\n";  // 500 bytes of data
  EXPECT_EQ(in_chunks(chunk + chunk + "0\r\n\r\n"), 200);
  EXPECT_EQ(in_chunks(chunk + chunk + "1\r\nx\r\n0\r\n\r\n"), 413);
  EXPECT_EQ(in_chunks("3e9\r\n"), 413);
  EXPECT_EQ(in_chunks("5;" + std::string(20'000, 'x')), 400);  // chunk line without an end
}

// A refusal arrives although the client keeps sending.
TEST_F(ServerLimits, AreToldToClientsThatGoOnSending) {
  ServerOptions options = test_options();
  options.max_body_bytes = 1000;
  serve(options);
  for (int i = 0; i < 20; ++i) {
    RawClient one = client();
    one.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" +
             std::string(3'000'000, 'x'));
    EXPECT_EQ(one.read_response().status, 413);
  }
}

TEST_F(ServerLimits, OfAllBodiesTogether) {
  ServerOptions options = test_options();
  options.max_body_bytes = 100'000;
  options.max_total_body_bytes = 150'000;
  serve(options);
  const std::string half =
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + std::string(90'000, 'x');
  RawClient first = client();
  first.send(half);
  ASSERT_TRUE(eventually([&] { return server->stats().bytes_received > 90'000; }));
  RawClient second = client();
  second.send(half);
  const RawResponse refused = second.read_response();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.field("Retry-After"), "1");
  first.send(std::string(10'000, 'x'));
  EXPECT_EQ(first.read_response().status, 200);
  EXPECT_EQ(request("POST", "/echo", "", std::string(100'000, 'x')).status, 200);  // there is room
}

TEST_F(ServerLimits, OfTheTimeForAHead) {
  ServerOptions options = test_options();
  options.header_timeout = 200ms;
  options.check_interval = 60s;  // the timer does not depend on it
  options.linger_timeout = 60s;  // unread input must not discard the response
  serve(options);
  // Slowloris: single bytes do not extend the limit.
  const auto start = std::chrono::steady_clock::now();
  std::vector<RawClient> slow;
  slow.reserve(50);
  for (int i = 0; i < 50; ++i) slow.push_back(client());
  const std::string text = "GET /hello HTTP/1.1\r\nHost: x\r\nX-Slow: yes yes yes yes yes\r\n";
  for (size_t sent = 0; sent < text.size() && ms_since(start) < 400; ++sent) {
    for (RawClient& one : slow) one.send({&text[sent], 1});
    EXPECT_EQ(get("/hello").status, 200);
    usleep(15'000);
  }
  for (RawClient& one : slow) {
    const RawResponse response = one.read_response();
    EXPECT_EQ(response.status, 408);
    EXPECT_EQ(response.field("Connection"), "close");
  }
  EXPECT_LT(ms_since(start), 30'000);  // check_interval is a minute
}

// The deadline of a finished head does not affect the next request of the connection.
TEST_F(ServerLimits, OfTheTimeForAHeadAreEachHeadsOwn) {
  ServerOptions options = test_options();
  options.header_timeout = 1s;  // longer than a client is delayed on a busy machine
  serve(options);
  RawClient one = client();
  for (int i = 0; i < 4; ++i) {
    one.send("POST /echo HTTP/1.1\r\nHost: x\r\n");
    usleep(300'000);
    one.send("Content-Length: 5\r\n\r\nhe");
    usleep(i == 3 ? 1'200'000 : 1'000);
    one.send("llo");
    EXPECT_EQ(one.read_response().body, "hello");
  }
  usleep(1'200'000);  // no byte of a head was sent
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 200);
}

TEST_F(ServerLimits, OfAGateComeBeforeTheHandler) {
  std::atomic<bool> full = true;
  std::atomic<int> handled = 0;
  RouteTable routes;
  routes.add(
      Method::kPost, "/gated", Access::kPublic,
      [&](const Request&, const std::shared_ptr<Responder>& responder) {
        ++handled;
        responder->send({.body = "in"});
      },
      {},
      [&]() -> std::optional<Response> {
        if (!full) return std::nullopt;
        return Response{.status = 429, .body = "full"};
      });
  serve(test_options(), std::move(routes));
  const std::string post = "POST /gated HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
  RawClient one = client();
  one.send(post + post);
  for (int i = 0; i < 2; ++i) {
    const RawResponse refused = one.read_response();
    EXPECT_EQ(refused.status, 429);
    EXPECT_EQ(refused.body, "full");
  }
  EXPECT_EQ(handled, 0);
  full = false;  // the connection is still usable
  one.send(post);
  EXPECT_EQ(one.read_response().body, "in");
  one.send("POST /gated HTTP/1.0\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 200);
  EXPECT_EQ(handled, 2);
}

TEST_F(ServerLimits, OfTheTimeForABody) {
  ServerOptions options = test_options();
  // Longer than a client is delayed on a busy machine.
  options.body_timeout = 1s;
  options.min_body_bytes_per_second = 2'000;
  options.linger_timeout = 60s;  // unread input must not discard the response
  serve(options);
  const std::string head = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n";
  RawClient silent = client();
  silent.send(head);
  RawClient slow = client();
  slow.send(head);
  RawClient steady = client();
  steady.send(head);
  for (int i = 0; i < 30; ++i) {
    slow.send("xxxx");
    steady.send(std::string(1000, 'x'));
    usleep(100'000);
  }
  EXPECT_EQ(silent.read_response().status, 408);
  EXPECT_EQ(slow.read_response().status, 408);
  EXPECT_EQ(steady.read_response().body.size(), 30'000u);  // three windows long, at an allowed rate
}

// Bytes of one window do not count in the next.
TEST_F(ServerLimits, OfTheTimeForABodyAreEachTimesOwn) {
  ServerOptions options = test_options();
  options.body_timeout = 200ms;
  options.min_body_bytes_per_second = 10'000;
  serve(options);
  RawClient one = client();
  one.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n" +
           std::string(19'999, 'x'));
  EXPECT_EQ(one.read_response().status, 408);
}

TEST_F(ServerLimits, OfTheTimeBetweenRequests) {
  ServerOptions options = test_options();
  options.idle_timeout = 1s;
  serve(options);
  const auto start = std::chrono::steady_clock::now();
  RawClient fresh = client();
  RawClient used = client();
  used.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(used.read_response().status, 200);
  RawClient busy = client();
  busy.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(fresh.read_to_end(), "");
  EXPECT_EQ(used.read_to_end(), "");
  EXPECT_TRUE(fresh.ended() && used.ended());
  EXPECT_GE(ms_since(start), 990);
  usleep(1'200'000);
  held.take().responder->send({.body = "late"});  // a client that waits for a response is not idle
  EXPECT_EQ(busy.read_response().body, "late");
}

// Connections are checked in parts of 256: idle ones behind 300 that stay are closed, too.
TEST_F(ServerLimits, OfTheTimeBetweenRequestsHoldForManyConnections) {
  ServerOptions options = test_options();
  options.idle_timeout = 200ms;
  serve(options);
  std::vector<RawClient> staying, idle;
  staying.reserve(300);
  idle.reserve(300);
  for (int i = 0; i < 300; ++i) {
    staying.push_back(client());
    staying.back().send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe");
  }
  for (int i = 0; i < 300; ++i) idle.push_back(client());
  for (RawClient& one : idle) {
    ASSERT_EQ(one.read_to_end(), "");
    ASSERT_TRUE(one.ended());
  }
  for (RawClient& one : staying) {
    one.send("llo");
    ASSERT_EQ(one.read_response().body, "hello");
  }
}

TEST_F(ServerLimits, OfConnections) {
  ServerOptions options = test_options();
  options.max_connections = 3;
  serve(options);
  std::vector<RawClient> open;
  for (int i = 0; i < 3; ++i) {
    open.push_back(client());
    open.back().send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_EQ(open.back().read_response().status, 200);
  }
  {
    RawClient one_more = client();
    one_more.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    const RawResponse response = one_more.read_response();
    EXPECT_EQ(response.status, 503);
    EXPECT_EQ(response.field("Retry-After"), "1");
    EXPECT_EQ(one_more.read_to_end(), "");
    EXPECT_TRUE(one_more.ended());
  }
  open[0].send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(open[0].read_response().status, 200);
  open.pop_back();
  ASSERT_TRUE(eventually([&] { return server->stats().connections == 2; }));
  EXPECT_EQ(get("/hello").status, 200);
  EXPECT_EQ(server->stats().connections_refused, 1);
}

// Every connection above the limit gets the refusal.
TEST_F(ServerLimits, OfConnectionsAreToldToAll) {
  ServerOptions options = test_options();
  options.max_connections = 1;
  serve(options);
  RawClient first = client();
  first.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(first.read_response().status, 200);
  std::vector<RawClient> others;
  for (int i = 0; i < 400; ++i) others.push_back(client());
  for (RawClient& one : others) one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  for (RawClient& one : others) {
    const RawResponse response = one.read_response();
    ASSERT_EQ(response.status, 503);
    ASSERT_TRUE(response.complete);
    EXPECT_EQ(one.read_to_end(), "");
    ASSERT_TRUE(one.ended());
  }
  EXPECT_EQ(server->stats().connections_refused, 400);
  EXPECT_EQ(server->stats().connections, 1);
  EXPECT_EQ(server->stats().responses[5], 400);
}

// Input that a client above the limit sends after its response is read: a reset could discard the
// response.
TEST_F(ServerLimits, OfConnectionsLetClientsSendOn) {
  ServerOptions options = test_options();
  options.max_connections = 1;
  options.linger_timeout = 60s;
  serve(options);
  RawClient first = client();
  first.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(first.read_response().status, 200);
  RawClient one_more = client();
  EXPECT_EQ(one_more.read_response().status, 503);
  EXPECT_EQ(one_more.read_to_end(), "");
  EXPECT_TRUE(one_more.ended());
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(send(one_more.descriptor(), "x", 1, MSG_NOSIGNAL), 1) << i;
    usleep(5'000);
  }
}

// Pipelined input is bounded while the first request is answered, and is served afterwards.
TEST_F(ServerLimits, OfWhatIsReadAhead) {
  ServerOptions options = test_options();
  options.max_header_bytes = 1000;
  serve(options);
  RawClient one = client();
  one.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  const Held::Item item = held.take();
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n";
  one.send(text);
  item.responder->send({.body = "first"});
  EXPECT_EQ(one.read_response().body, "first");
  for (int i = 0; i < 2000; ++i) ASSERT_EQ(one.read_response().body, "hello");
}

TEST_F(ServerLimits, AreCheckedWhenSet) {
  const auto refusal = [](auto change) {
    ServerOptions options;
    change(options);
    const auto made = Server::create(std::move(options), RouteTable());
    return made ? "" : made.error().message;
  };
  EXPECT_EQ(refusal([](ServerOptions&) {}), "");
  EXPECT_EQ(refusal([](ServerOptions& o) { o.port = 65536; }),
            "port is 65536, expected 0 to 65535");
  EXPECT_EQ(refusal([](ServerOptions& o) { o.io_threads = 0; }), "io_threads is 0, the least is 1");
  EXPECT_EQ(refusal([](ServerOptions& o) { o.api_keys = {"good", ""}; }), "API key 2 is empty");
  EXPECT_NE(refusal([](ServerOptions& o) { o.admin_keys = {"a b"}; }), "");
  EXPECT_NE(refusal([](ServerOptions& o) { o.tls_key_file = "key.pem"; }), "");
  EXPECT_NE(refusal([](ServerOptions& o) { o.max_header_bytes = 2 << 20; }), "");
  EXPECT_NE(refusal([](ServerOptions& o) { o.max_total_body_bytes = 1; }), "");
}

}  // namespace
}  // namespace fathom::http
