// Streams: order, framing, disconnects, clients that do not read, writers in other threads.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "server/http/server_fixture.h"
#include "server/http/sse.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kHold = "GET /hold HTTP/1.1\r\nHost: x\r\n\r\n";

class ServerStream : public ServerTest {};

TEST_F(ServerStream, SendsServerSentEvents) {
  serve();
  RawClient one = client();
  one.send(kHold);
  {
    SseStream stream(held.take().responder);
    stream.data(R"({"a":1})");
    EXPECT_EQ(one.read_until("\r\n\r\n").substr(0, 15), "HTTP/1.1 200 OK");
    EXPECT_EQ(one.read_chunk(), "data: {\"a\":1}\n\n");  // sent although nothing follows
    stream.event("message_stop", "two\nlines");
    EXPECT_EQ(one.read_chunk(), "event: message_stop\ndata: two\ndata: lines\n\n");
    stream.comment("still here");
    EXPECT_EQ(one.read_chunk(), ": still here\n\n");
    stream.done();
    EXPECT_EQ(one.read_chunk(), "data: [DONE]\n\n");
    EXPECT_EQ(one.read_chunk(), "");
  }
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(one.read_response().body, "hello");
}

TEST_F(ServerStream, HasTheHeadersThatProxiesNeed) {
  serve();
  RawClient one = client();
  one.send(kHold);
  SseStream(held.take().responder).end();
  const RawResponse response = one.read_response();
  EXPECT_EQ(response.field("Content-Type"), "text/event-stream");
  EXPECT_EQ(response.field("Cache-Control"), "no-cache");
  EXPECT_EQ(response.field("X-Accel-Buffering"), "no");
  EXPECT_EQ(response.field("Transfer-Encoding"), "chunked");
  EXPECT_EQ(response.field("Content-Length"), "");
  EXPECT_TRUE(response.complete);
}

TEST_F(ServerStream, StreamsToHttp10UntilTheEnd) {
  serve();
  RawClient one = client();
  one.send("GET /hold HTTP/1.0\r\n\r\n");
  SseStream stream(held.take().responder);
  stream.data("1");
  stream.end();
  const RawResponse response = one.read_response();
  EXPECT_EQ(response.field("Transfer-Encoding"), "");
  EXPECT_EQ(response.body, "data: 1\n\n");
  EXPECT_TRUE(one.ended());
}

TEST_F(ServerStream, TellsTheWriterThatHeadWantsNoStream) {
  serve();
  RawClient one = client();
  one.send("HEAD /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  const Held::Item item = held.take();
  std::atomic<bool> told{false};
  item.responder->on_closed([&] { told = true; });
  SseStream(item.responder).data("1");
  EXPECT_EQ(one.read_response(true).field("Content-Type"), "text/event-stream");
  EXPECT_TRUE(eventually([&] { return told.load(); }));
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(one.read_response().body, "hello");
}

TEST_F(ServerStream, KeepsTheOrderOfTenThousandWrites) {
  ServerOptions options = test_options();
  options.io_threads = 2;
  serve(options);
  constexpr int kStreams = 8, kWrites = 10'000;
  std::vector<RawClient> clients;
  std::vector<std::shared_ptr<Responder>> responders;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(client());
    clients.back().send(kHold);
    responders.push_back(held.take().responder);
    responders.back()->start_stream({.content_type = "text/plain"});
  }
  std::thread writer([&] {
    for (int n = 0; n < kWrites; ++n) {
      for (const auto& responder : responders) responder->write(std::to_string(n) + "\n");
    }
    for (const auto& responder : responders) responder->end();
  });
  std::string expected;
  for (int n = 0; n < kWrites; ++n) expected += std::to_string(n) + "\n";
  for (RawClient& one : clients) {
    const RawResponse response = one.read_response();
    EXPECT_TRUE(response.complete);
    EXPECT_TRUE(response.body == expected) << response.body.size();
  }
  writer.join();
}

TEST_F(ServerStream, SendsALargeAnswerWhole) {
  serve();
  RawClient one = client();
  one.send(kHold);
  std::string large;
  for (int i = 0; std::ssize(large) < (20 << 20); ++i) large += std::to_string(i);
  held.take().responder->send({.body = large});
  EXPECT_TRUE(one.read_response().body == large);
}

TEST_F(ServerStream, NoticesThatTheClientLeft) {
  serve();
  for (const std::string_view how : {"close", "reset"}) {
    for (const bool streaming : {false, true}) {
      RawClient one = client();
      one.send(kHold);
      const Held::Item item = held.take();
      std::atomic<int> told{0};
      item.responder->on_closed([&] { ++told; });
      if (streaming) {
        item.responder->start_stream({.content_type = "text/plain", .keep_alive = "\n"});
        item.responder->write("begin");
        EXPECT_EQ(one.read_response(true).status, 200);
        one.read_chunk();  // unread bytes would turn close() into RST
      }
      EXPECT_FALSE(item.responder->closed());
      if (how == "close") one.close();
      if (how == "reset") one.reset();
      EXPECT_TRUE(eventually([&] { return told == 1; })) << how << streaming;
      EXPECT_TRUE(item.responder->closed());
      EXPECT_FALSE(item.responder->send({}));
      if (streaming) item.responder->write("ignored");
      if (streaming) item.responder->end();
      usleep(20'000);
      EXPECT_EQ(told, 1);
    }
  }
  EXPECT_TRUE(eventually([&] { return server->stats().connections == 0; }));
  EXPECT_EQ(server->stats().closed_by_client, 4);
  EXPECT_EQ(server->stats().requests_in_flight, 0);
}

// A client that shuts down only its sending side, as `nc -N` does, gets its response.
TEST_F(ServerStream, AnswersAHalfClosedConnection) {
  serve();
  for (const std::string_view version : {"1.1", "1.0"}) {
    const std::string end = " HTTP/" + std::string(version) + "\r\nHost: x\r\n\r\n";
    RawClient at_once = client();
    at_once.send("GET /hello" + end);
    at_once.end_sending();
    EXPECT_TRUE(at_once.read_to_end().ends_with("\r\n\r\nhello"));
    RawClient late = client();
    late.send("GET /hold" + end);
    const Held::Item item = held.take();
    late.end_sending();
    EXPECT_EQ(late.read_until("HTTP/1.1 "), "HTTP/1.1 ");  // the server has seen the FIN
    EXPECT_FALSE(item.responder->closed());
    item.responder->send({.status = 404, .body = "late"});
    const std::string text = late.read_to_end();
    EXPECT_TRUE(text.starts_with("404 Not Found\r\n")) << text;
    EXPECT_TRUE(text.ends_with("\r\n\r\nlate")) << text;
    EXPECT_TRUE(late.ended());
  }
  // A stream continues after FIN, and pipelined requests are served.
  RawClient one = client();
  one.send(std::string(kHold) + "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n" + std::string(kHold));
  const Held::Item item = held.take();
  item.responder->start_stream({.content_type = "text/plain", .keep_alive = "."});
  item.responder->write("begin");
  EXPECT_EQ(one.read_response(true).status, 200);
  EXPECT_EQ(one.read_chunk(), "begin");
  one.end_sending();
  EXPECT_EQ(one.read_chunk(), ".");
  item.responder->write("end");
  item.responder->end();
  EXPECT_EQ(one.read_chunk(), "end");
  EXPECT_EQ(one.read_chunk(), "");
  EXPECT_EQ(one.read_response().body, "hello");
  held.take().responder->send({.body = "last"});
  EXPECT_EQ(one.read_response().body, "last");
  EXPECT_EQ(one.read_to_end(), "");
  EXPECT_TRUE(eventually([&] { return server->stats().connections == 0; }));
  EXPECT_EQ(server->stats().closed_by_client, 0);
}

// An incomplete request is dropped when the client closes.
TEST_F(ServerStream, ClosesAHalfClosedConnectionWithoutARequest) {
  serve();
  EXPECT_EQ(exchange("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhel"), "");
  EXPECT_EQ(exchange(""), "");
}

TEST_F(ServerStream, TellsWhoAsksTooLate) {
  serve();
  RawClient one = client();
  one.send(kHold);
  const Held::Item item = held.take();
  one.close();
  ASSERT_TRUE(eventually([&] { return item.responder->closed(); }));
  bool told = false;
  item.responder->on_closed([&] { told = true; });
  EXPECT_TRUE(told);
}

TEST_F(ServerStream, DropsTheCallbackOfADeliveredAnswer) {
  serve();
  RawClient one = client();
  one.send(kHold);
  const Held::Item item = held.take();
  const auto token = std::make_shared<int>(0);
  std::atomic<bool> told{false};
  item.responder->on_closed([&told, token] { told = true; });
  item.responder->send({.body = "x"});
  EXPECT_EQ(one.read_response().body, "x");
  EXPECT_TRUE(eventually([&] { return token.use_count() == 1; }));
  one.close();
  EXPECT_TRUE(eventually([&] { return server->stats().connections == 0; }));
  EXPECT_FALSE(told);
}

// Four threads write, end and destroy responders while clients disconnect at any moment.
TEST_F(ServerStream, SurvivesWritersThatRaceWithDisconnects) {
  ServerOptions options = test_options();
  options.io_threads = 2;
  options.worker_threads = 2;
  std::atomic<int64_t> opened{0}, told{0};
  RouteTable routes;
  std::vector<std::thread> writers;
  std::mutex mutex;
  routes.add(Method::kGet, "/stream", Access::kPublic,
             [&](const Request&, std::shared_ptr<Responder> responder) {
               ++opened;
               responder->on_closed([&] { ++told; });
               const std::lock_guard lock(mutex);
               writers.emplace_back([responder = std::move(responder)] {
                 SseStream stream(responder);
                 for (int i = 0; i < 200 && !responder->closed(); ++i) {
                   stream.data("token " + std::to_string(i));
                   if (i % 50 == 0) usleep(500);
                 }
                 if (reinterpret_cast<uintptr_t>(responder.get()) % 32 != 0) stream.done();
               });
             });
  serve(options, std::move(routes));
  std::vector<std::thread> clients;
  clients.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    clients.emplace_back([&, thread] {
      for (int i = 0; i < 40; ++i) {
        RawClient one = client();
        one.send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
        if (i % 4 == 0) one.receive();
        if (i % 4 == 1) one.reset();
        if (i % 4 == 2) one.read_response();
        if (i % 4 == 3) usleep(static_cast<useconds_t>(100 * thread));
      }
    });
  }
  for (std::thread& thread : clients) thread.join();
  EXPECT_TRUE(eventually([&] { return server->stats().requests_in_flight == 0; }));
  EXPECT_TRUE(server->stop(5s));
  for (std::thread& thread : writers) thread.join();
  EXPECT_GT(opened, 0);
  EXPECT_LE(told, opened);
}

TEST_F(ServerStream, IsHarmlessAfterTheServer) {
  serve();
  RawClient one = client();
  one.send(kHold);
  const Held::Item item = held.take();
  std::atomic<bool> told{false};
  item.responder->on_closed([&] { told = true; });
  item.responder->start_stream({.content_type = "text/plain"});
  EXPECT_FALSE(server->stop(0s));
  EXPECT_TRUE(told);
  server.reset();
  item.responder->write("late");
  item.responder->end();
  EXPECT_TRUE(item.responder->closed());
}

TEST_F(ServerStream, CutsAStreamThatItsWriterDropped) {
  serve();
  RawClient one = client();
  one.send(kHold);
  {
    const Held::Item item = held.take();
    item.responder->start_stream({.content_type = "text/plain"});
    item.responder->write("begin");
    EXPECT_EQ(one.read_response(true).status, 200);
    EXPECT_EQ(one.read_chunk(), "begin");
  }
  EXPECT_EQ(one.read_to_end(), "");  // no last chunk
}

TEST_F(ServerStream, SaysThatItIsAlive) {
  serve();
  RawClient one = client();
  one.send(kHold);
  SseStream stream(held.take().responder, 500ms);
  EXPECT_EQ(one.read_response(true).status, 200);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(one.read_chunk(), ": keep-alive\n\n");
  EXPECT_EQ(one.read_chunk(), ": keep-alive\n\n");
  EXPECT_GE(std::chrono::steady_clock::now() - start, 900ms);
  for (int i = 0; i < 10; ++i) {  // no keep-alive while something is written
    stream.data("x");
    EXPECT_EQ(one.read_chunk(), "data: x\n\n");
    usleep(70'000);
  }
  stream.done();
  EXPECT_EQ(one.read_chunk(), "data: [DONE]\n\n");
}

// A client that reads nothing is cut off; another one is not affected.
TEST_F(ServerStream, CutsOffAReaderThatDoesNotRead) {
  ServerOptions options = test_options();
  options.send_buffer_bytes = 64 << 10;
  options.stall_timeout = 300ms;
  serve(options);
  RawClient slow(server->port(), 4096);
  slow.send(kHold);
  const Held::Item item = held.take();
  std::atomic<bool> told{false};
  item.responder->on_closed([&] { told = true; });
  item.responder->start_stream({.content_type = "text/plain"});
  const auto start = std::chrono::steady_clock::now();
  const std::string block(100'000, 'x');
  while (!told && std::chrono::steady_clock::now() - start < 30s) {
    item.responder->write(block);
    EXPECT_EQ(get("/hello").status, 200);
    usleep(10'000);
  }
  EXPECT_TRUE(told);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 300ms);
  EXPECT_EQ(server->stats().cut_off, 1);
}

// A client that pauses is blocked for short times only, however long the response takes. The times
// are far from the limit on both sides.
TEST_F(ServerStream, WaitsForAReaderThatPauses) {
  ServerOptions options = test_options();
  options.send_buffer_bytes = options.max_unsent_bytes = 64 << 20;
  options.stall_timeout = 2500ms;
  serve(options);
  RawClient slow(server->port(), 256 << 10);
  slow.send(kHold);
  const std::string body(32 << 20, 'x');
  held.take().responder->send({.body = body});
  // The kernel's buffers are full and nothing more is sent: the connection is blocked.
  int64_t sent = 0;
  ASSERT_TRUE(eventually([&] {
    usleep(20'000);
    const int64_t before = std::exchange(sent, server->stats().bytes_sent);
    return sent > 0 && sent == before;
  }));
  ASSERT_LT(sent, std::ssize(body));
  std::this_thread::sleep_for(1400ms);
  while (server->stats().bytes_sent < sent + (1 << 20)) ASSERT_TRUE(slow.receive());
  std::this_thread::sleep_for(1400ms);
  EXPECT_TRUE(slow.read_response().body == body);
  EXPECT_EQ(server->stats().cut_off, 0);
}

// A client that was behind and caught up gets the full stall_timeout again.
TEST_F(ServerStream, ForgetsThatAReaderWasBehind) {
  ServerOptions options = test_options();
  options.send_buffer_bytes = 64 << 10;
  options.stall_timeout = 3000ms;
  serve(options);
  RawClient slow(server->port(), 256 << 10);
  slow.send(kHold);
  const Held::Item item = held.take();
  item.responder->start_stream({.content_type = "text/plain"});
  const std::string block(8 << 20, 'x');
  item.responder->write(block);
  std::this_thread::sleep_for(100ms);  // several checks see too much unsent
  EXPECT_EQ(slow.read_response(true).status, 200);
  std::string received;
  while (received.size() < block.size()) {
    const std::string chunk = slow.read_chunk();
    ASSERT_NE(chunk, "");
    received += chunk;
  }
  EXPECT_TRUE(received == block);
  std::this_thread::sleep_for(3200ms);
  item.responder->write("end");
  EXPECT_EQ(slow.read_chunk(), "end");
  EXPECT_EQ(server->stats().cut_off, 0);
}

// A client that reads slower than the stream is written, for too long, is cut off.
TEST_F(ServerStream, CutsOffAReaderThatFallsBehind) {
  ServerOptions options = test_options();
  options.send_buffer_bytes = 64 << 10;
  options.stall_timeout = 300ms;
  serve(options);
  RawClient slow(server->port(), 4096);
  slow.send(kHold);
  const Held::Item item = held.take();
  item.responder->start_stream({.content_type = "text/plain"});
  const auto start = std::chrono::steady_clock::now();
  item.responder->write(std::string(8 << 20, 'x'));
  while (!item.responder->closed() && std::chrono::steady_clock::now() - start < 30s) {
    char bytes[2048];
    recv(slow.descriptor(), bytes, sizeof(bytes), MSG_DONTWAIT);
    usleep(5'000);
  }
  EXPECT_TRUE(item.responder->closed());
  EXPECT_GE(std::chrono::steady_clock::now() - start, 290ms);
}

TEST_F(ServerStream, BoundsWhatOneStreamMayQueue) {
  ServerOptions options = test_options();
  options.send_buffer_bytes = 64 << 10;
  options.max_unsent_bytes = 1 << 20;
  serve(options);
  RawClient slow(server->port(), 4096);
  slow.send(kHold);
  const Held::Item item = held.take();
  item.responder->start_stream({.content_type = "text/plain"});
  item.responder->write(std::string(8 << 20, 'x'));
  EXPECT_TRUE(eventually([&] { return item.responder->closed(); }));
}

TEST_F(ServerStream, WithoutADelayEveryWriteIsSentAtOnce) {
  ServerOptions options = test_options();
  options.write_delay = 0ms;
  serve(options);
  RawClient one = client();
  one.send(kHold);
  SseStream stream(held.take().responder);
  EXPECT_EQ(one.read_response(true).status, 200);
  for (int i = 0; i < 100; ++i) {
    stream.data(std::to_string(i));
    EXPECT_EQ(one.read_chunk(), "data: " + std::to_string(i) + "\n\n");
  }
  stream.end();
}

// What lies in front of the I/O thread when the server stops is sent first.
TEST_F(ServerStream, SendsWhatWasWrittenBeforeTheStop) {
  ServerOptions options = test_options();
  options.write_delay = std::chrono::hours(1);
  options.check_interval = std::chrono::hours(1);
  serve(options);
  RawClient one = client();
  one.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  const Held::Item item = held.take();
  item.responder->start_stream({});
  EXPECT_EQ(one.read_response(/*to_head=*/true).status, 200);
  item.responder->write("last words");
  EXPECT_TRUE(one.silent_for(20ms));
  server->stop(0s);
  EXPECT_NE(one.read_to_end().find("last words"), std::string::npos);
}

}  // namespace
}  // namespace fathom::http
