// What clients are told when the engine dies, whichever thread is late.
#include <gtest/gtest.h>

#include <future>
#include <latch>
#include <thread>

#include "server/api/api_test_support.h"
#include "server/api/live_reply.h"
#include "server/http/exchange.h"
#include "server/http/raw_client.h"

namespace fathom {
namespace {

constexpr std::string_view kRequest = R"({"prompt":[1,2,3],"stream":true,"max_tokens":9})";

// Loses its device in the first step, once it may; keeps whoever asks for experts' loads, as a
// handler of /metrics does on an I/O thread, until it may go on.
class LostRunner : public FakeRunner {
 public:
  struct Latches {
    std::latch step_begun{1}, may_be_lost{1}, asked{1}, may_answer{1};
  };
  explicit LostRunner(Latches& latches) : FakeRunner(FakeModel()), latches_(latches) {
    before_step = [this](const ForwardBatch&) -> Result<> {
      latches_.step_begun.count_down();
      latches_.may_be_lost.wait();
      lost = true;
      return error(Code::kInternal, "the device is gone");
    };
  }
  std::optional<ExpertStats> expert_stats() const override {
    if (!latches_.asked.try_wait()) latches_.asked.count_down();
    latches_.may_answer.wait();
    return std::nullopt;
  }

 private:
  Latches& latches_;
};

// The I/O thread does something else while the engine dies, for longer than a client may take to
// read its last words.
TEST(EngineDeath, StreamsGetTheirErrorFromAnIoThreadThatIsLate) {
  LostRunner::Latches latches;
  ApiOptions options;
  options.http.io_threads = 1;
  options.last_flush = std::chrono::hours(1);
  options.watchdog_timeout = std::chrono::seconds(0);
  const auto server = listening_server(std::move(options));
  server->serve(fake_backend(std::make_unique<LostRunner>(latches)));
  const std::shared_future<bool> dead =
      std::async(std::launch::async, [&] { return server->wait_until_dead(); });
  http::RawClient stream(server->port()), metrics(server->port());
  stream.send(post_request("/v1/completions", kRequest));
  latches.step_begun.wait();
  metrics.send(bare_request("GET", "/metrics"));
  latches.asked.wait();
  latches.may_be_lost.count_down();
  std::thread late([&latches, dead] {
    dead.wait_for(std::chrono::seconds(1));
    latches.may_answer.count_down();
  });
  EXPECT_TRUE(dead.get());
  // The process would end here: what has come by now is all that comes.
  const std::string text = stream.read_available();
  EXPECT_NE(text.find("the engine is dead: the device is gone"), std::string::npos) << text;
  late.join();
}

void expect_health(const ApiServer& server, int status, std::string_view word) {
  for (const char* path : {"/health", "/ping", "/ready"}) {
    http::RawClient client(server.port());
    client.send(bare_request("GET", path));
    const http::RawResponse response = client.read_response();
    EXPECT_EQ(response.status, status) << path;
    EXPECT_EQ(response.body, fmt::format(R"({{"status":"{}"}})", word)) << path;
  }
}

// A probe learns of the loss at once: before the server has told everyone, and afterwards.
TEST(EngineDeath, HealthChecksFailFromTheLossOn) {
  LostRunner::Latches latches;
  latches.may_answer.count_down();
  const auto server = listening_server();
  auto backend = fake_backend(std::make_unique<LostRunner>(latches));
  Engine& engine = *backend->engine;
  server->serve(std::move(backend));
  http::RawClient stream(server->port());
  stream.send(post_request("/v1/completions", kRequest));
  latches.step_begun.wait();
  expect_health(*server, 200, "ok");
  latches.may_be_lost.count_down();
  EXPECT_TRUE(engine.wait_until_dead(std::chrono::hours(1)));
  expect_health(*server, 503, "dead");  // the server has told no one yet
  EXPECT_TRUE(server->wait_until_dead());
  expect_health(*server, 503, "dead");
  EXPECT_NE(stream.read_response().body.find("the engine is dead"), std::string::npos);
}

// The engine dies, or a shutdown's patience ends, after a reply was listed and before it started.
TEST(LiveReply, ThatFailsBeforeItStartsIsARefusal) {
  Metrics metrics("");
  for (const bool streams : {true, false}) {
    const auto backend = fake_backend(std::make_unique<FakeRunner>(FakeModel()));
    auto generation = prepare(GeneratingEndpoint::kCompletions,
                              streams ? kRequest : R"({"prompt":[1,2,3],"max_tokens":9})",
                              backend->served, RequestLimits(), {});
    ASSERT_TRUE(generation) << generation.error().message;
    const auto outbox = std::make_shared<http::Outbox>([] {});
    const auto exchange = std::make_shared<http::Exchange>(outbox, nullptr);
    const auto reply =
        std::make_shared<LiveReply>("id", *backend->engine, metrics, std::move(generation->writer),
                                    std::make_shared<http::Responder>(exchange));
    reply->fail(ApiError(503, "the server is shutting down"));
    reply->start(std::move(generation->requests));
    http::Exchange::News news;
    exchange->take(news);
    const auto* const response = std::get_if<http::Response>(&news.head);
    ASSERT_NE(response, nullptr);
    EXPECT_EQ(response->status, 503);
    EXPECT_NE(response->body.find("the server is shutting down"), std::string::npos)
        << response->body;
    EXPECT_TRUE(news.ended);
    EXPECT_TRUE(backend->engine->drain(std::chrono::hours(1)));
    const EngineStats stats = backend->engine->stats();
    EXPECT_EQ(stats.stopped + stats.length + stats.aborted + stats.failed, 0) << "it was submitted";
  }
}

}  // namespace
}  // namespace fathom
