// Listening, draining, stopping, and the log.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "server/http/server_fixture.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kHold = "GET /hold HTTP/1.1\r\nHost: x\r\n\r\n";
constexpr std::string_view kHello = "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n";

class ServerLifecycle : public ServerTest {};

TEST_F(ServerLifecycle, NamesTheAddressThatItCannotHave) {
  serve();
  ServerOptions options = test_options();
  options.port = server->port();
  auto second = std::move(*Server::create(options, test_routes(held)));
  const auto taken = second->listen();
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, Code::kUnavailable);
  EXPECT_EQ(taken.error().message, "cannot listen on 127.0.0.1:" + std::to_string(server->port()) +
                                       ": Address already in use");
  options.host = "256.0.0.1";
  auto third = std::move(*Server::create(options, test_routes(held)));
  const auto unknown = third->listen();
  ASSERT_FALSE(unknown);
  EXPECT_TRUE(unknown.error().message.starts_with("cannot listen on 256.0.0.1:"));
}

TEST_F(ServerLifecycle, ListensOnLoopbackAloneByDefault) {
  serve();
  // /proc/net/tcp lists local address and port in hex; state 0A is LISTEN.
  std::ifstream table("/proc/net/tcp");
  char wanted[16];
  snprintf(wanted, sizeof(wanted), ":%04X", server->port());
  std::string listening;
  for (std::string line; std::getline(table, line);) {
    if (line.find(wanted + std::string(" 00000000:0000 0A")) != std::string::npos)
      listening += line;
  }
  EXPECT_NE(listening.find("0100007F" + std::string(wanted)), std::string::npos);
  EXPECT_EQ(listening.find("00000000" + std::string(wanted) + " "), std::string::npos);
}

TEST_F(ServerLifecycle, LetsClientsWaitBeforeTheStart) {
  auto made = Server::create(test_options(), test_routes(held));
  ASSERT_TRUE(made);
  server = std::move(*made);
  ASSERT_TRUE(server->listen());
  RawClient one = client();
  ASSERT_TRUE(one.connected());
  one.send(kHello);
  EXPECT_TRUE(one.silent_for(50ms));
  server->start();
  EXPECT_EQ(one.read_response().body, "hello");
}

TEST_F(ServerLifecycle, DrainsWhatRunsAndRefusesWhatIsNew) {
  RouteTable routes = test_routes(held);
  routes.add(
      Method::kGet, "/health", Access::kPublic,
      [](Request, std::shared_ptr<Responder> responder) { responder->send({.body = "alive"}); },
      {.run_on = RunOn::kIoThread, .while_draining = true});
  serve(test_options(), std::move(routes));
  RawClient whole = client(), stream = client(), idle = client();
  idle.send(kHello);
  EXPECT_EQ(idle.read_response().status, 200);
  whole.send(kHold);
  const Held::Item whole_item = held.take();
  stream.send(kHold);
  const Held::Item stream_item = held.take();
  stream_item.responder->start_stream({.content_type = "text/plain"});

  server->begin_drain();
  for (RawClient* one : {&idle}) {
    one->send(kHello);
    const RawResponse refused = one->read_response();
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.field("Retry-After"), "5");
    EXPECT_EQ(refused.field("Connection"), "close");
  }
  EXPECT_EQ(get("/hello").status, 503);
  RawClient last = client();
  last.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  const RawResponse health = last.read_response();
  EXPECT_EQ(health.body, "alive");
  EXPECT_EQ(health.field("Connection"), "close");
  EXPECT_EQ(last.read_to_end(), "");
  EXPECT_TRUE(last.ended()) << "nothing is served on this connection any more";

  std::thread finisher([&] {
    usleep(100'000);
    stream_item.responder->write("all of it");
    stream_item.responder->end();
    whole_item.responder->send({.body = "whole"});
  });
  EXPECT_TRUE(server->stop(60s));
  finisher.join();
  EXPECT_EQ(whole.read_response().body, "whole");
  const RawResponse streamed = stream.read_response();
  EXPECT_EQ(streamed.body, "all of it");
  EXPECT_TRUE(streamed.complete);
  EXPECT_FALSE(client().connected());
}

TEST_F(ServerLifecycle, CutsWhatTheGraceIsTooShortFor) {
  serve();
  RawClient one = client();
  one.send(kHold);
  const Held::Item item = held.take();
  std::atomic<bool> told{false};
  item.responder->on_closed([&] { told = true; });
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(server->stop(200ms));
  EXPECT_TRUE(told);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 200ms);
  EXPECT_EQ(one.read_to_end(), "");
}

TEST_F(ServerLifecycle, ASecondStopHastensTheFirst) {
  serve();
  RawClient one = client();
  one.send(kHold);
  const Held::Item item = held.take();
  const auto start = std::chrono::steady_clock::now();
  bool first_says = true;
  std::thread first([&] { first_says = server->stop(60s); });
  while (get("/hello").status != 503) std::this_thread::yield();  // it has begun
  const bool second_says = server->stop(0s);
  first.join();
  EXPECT_FALSE(first_says && second_says) << "one of them has cut the request off";
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);  // the first grace is a minute
}

TEST_F(ServerLifecycle, BindsAgainAtOnceAndManyTimes) {
  ServerOptions options = test_options();
  for (int i = 0; i < 50; ++i) {
    serve(options);
    options.port = server->port();
    RawClient one = client();
    one.send(kHello);
    ASSERT_EQ(one.read_response().status, 200);
    ASSERT_TRUE(server->stop(60s));  // leaves the connection in TIME_WAIT on the server's side
    server.reset();
  }
}

TEST_F(ServerLifecycle, AnswersOnIoThreadsWhileWorkersAreBusy) {
  RouteTable routes = test_routes(held);
  std::atomic<bool> release{false};
  routes.add(Method::kGet, "/slow", Access::kPublic,
             [&](Request, std::shared_ptr<Responder> responder) {
               while (!release) usleep(1000);
               responder->send({.body = "slow"});
             });
  serve(test_options(), std::move(routes));
  RawClient slow = client();
  slow.send("GET /slow HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(get("/hello").body, "hello");
  release = true;
  EXPECT_EQ(slow.read_response().body, "slow");
}

TEST_F(ServerLifecycle, LogsOneLineARequestWithNothingToObey) {
  ServerOptions options = test_options();
  options.access_log = true;
  options.api_keys = {"the-secret-key"};
  serve(options);
  testing::internal::CaptureStderr();
  RawClient one = client();
  one.send(
      "POST /echo?key=the-query HTTP/1.1\r\nHost: x\r\nX-Request-Id: abc-1\r\n"
      "Authorization: Bearer the-secret-key\r\nContent-Length: 8\r\n\r\nthe-body");
  EXPECT_EQ(one.read_response().body, "the-body");
  one.send("GET /\"%1b[31m\\ HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x1b[31mb\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 400);
  RawClient gone = client();
  gone.send("GET /hold HTTP/1.1\r\nHost: x\r\nX-Request-Id: abc-3\r\n\r\n");
  const Held::Item item = held.take();
  gone.close();
  ASSERT_TRUE(eventually([&] { return server->stats().requests_in_flight == 0; }));
  EXPECT_EQ(exchange("G\"T / HTTP/1.1\r\nHost: \x1b]0;x\x07\r\n\r\n").substr(0, 12),
            "HTTP/1.1 400");
  server->stop(60s);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 4) << log;
  EXPECT_NE(log.find("request id=abc-1 peer=127.0.0.1:"), std::string::npos) << log;
  EXPECT_NE(log.find(" method=POST path=\"/echo\" status=200 bytes="), std::string::npos) << log;
  EXPECT_NE(log.find("id=abc-3"), std::string::npos) << log;
  EXPECT_NE(log.find(" ended=closed_by_client\n"), std::string::npos) << log;
  for (const char* secret : {"the-secret-key", "the-query", "the-body", "\x1b", "\x07", "\r"}) {
    EXPECT_EQ(log.find(secret), std::string::npos) << log;
  }
}

TEST_F(ServerLifecycle, CountsWhatItDoes) {
  serve();
  RawClient one = client();
  one.send(kHello);
  one.read_response();
  const std::string_view absent = "GET /absent HTTP/1.1\r\nHost: x\r\n\r\n";
  one.send(absent);
  one.read_response();
  ASSERT_TRUE(eventually([&] { return server->stats().requests_in_flight == 0; }));
  const ServerStats stats = server->stats();
  EXPECT_EQ(stats.connections, 1);
  EXPECT_EQ(stats.connections_accepted, 1);
  EXPECT_EQ(stats.responses[2], 1);
  EXPECT_EQ(stats.responses[4], 1);
  EXPECT_EQ(stats.bytes_received, std::ssize(kHello) + std::ssize(absent));
  EXPECT_GT(stats.bytes_sent, 300);
}

}  // namespace
}  // namespace fathom::http
