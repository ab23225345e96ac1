#include "server/client/http_client.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "server/http/server.h"
#include "server/http/sse.h"

namespace fathom::client {
namespace {

// Records a handler's calls for a thread that waits for them.
class Heard : public ReplyHandler {
 public:
  void on_event(std::string_view data) override {
    const std::lock_guard lock(mutex_);
    events_.emplace_back(data);
    changed_.notify_all();
  }
  void on_end(Result<ClientReply> reply) override {
    const std::lock_guard lock(mutex_);
    EXPECT_FALSE(reply_) << "told twice";
    reply_ = std::move(reply);
    changed_.notify_all();
  }
  Result<ClientReply> reply() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reply_.has_value(); });
    return *reply_;
  }
  std::vector<std::string> events(size_t at_least = 0) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return events_.size() >= at_least; });
    return events_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> events_;
  std::optional<Result<ClientReply>> reply_;
};

class HttpClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    using http::Access;
    using http::Method;
    http::RouteTable routes;
    routes.add(Method::kPost, "/echo", Access::kKey,
               [](http::Request request, std::shared_ptr<http::Responder> responder) {
                 responder->send({.status = 418, .body = request.body});
               });
    routes.add(Method::kGet, "/count", Access::kPublic,
               [](http::Request, std::shared_ptr<http::Responder> responder) {
                 http::SseStream stream(std::move(responder));
                 for (int i = 0; i < 100; ++i) stream.data(std::to_string(i));
                 stream.done();
               });
    routes.add(Method::kGet, "/hang", Access::kPublic,
               [this](http::Request, std::shared_ptr<http::Responder> responder) {
                 responder->on_closed([this] { left_.on_event("left"); });
                 http::SseStream stream(responder);
                 stream.data("first");
                 hanging_.push_back(std::move(responder));
               });
    http::ServerOptions options;
    options.port = 0;
    options.access_log = false;
    options.api_keys = {"sesame"};
    server_ = std::move(*http::Server::create(std::move(options), std::move(routes)));
    ASSERT_TRUE(server_->listen());
    server_->start();
    client_ = std::move(*HttpClient::create({.host = "127.0.0.1", .port = server_->port()}));
  }

  Heard left_;
  std::vector<std::shared_ptr<http::Responder>> hanging_;
  std::unique_ptr<http::Server> server_;
  std::unique_ptr<HttpClient> client_;
};

TEST_F(HttpClientTest, AsksWithBodyAndKey) {
  const std::string body = "\"" + std::string(1 << 20, 'x') + "\"";
  const auto reply =
      client_->ask({.method = "POST", .path = "/echo", .api_key = "sesame", .body = body});
  ASSERT_TRUE(reply) << reply.error().message;
  EXPECT_EQ(reply->status, 418);
  EXPECT_EQ(reply->body, body);
  const auto refused = client_->ask({.method = "POST", .path = "/echo", .body = "1"});
  ASSERT_TRUE(refused) << refused.error().message;
  EXPECT_EQ(refused->status, 401);
}

TEST_F(HttpClientTest, ReadsManyStreamsAtOnce) {
  std::vector<std::shared_ptr<Heard>> all;
  for (int i = 0; i < 200; ++i) {
    all.push_back(std::make_shared<Heard>());
    client_->send({.path = "/count"}, all.back());
  }
  for (const auto& heard : all) {
    const auto reply = heard->reply();
    ASSERT_TRUE(reply) << reply.error().message;
    EXPECT_EQ(reply->status, 200);
    EXPECT_EQ(reply->body, "");
    const auto events = heard->events();
    ASSERT_EQ(events.size(), 101u);
    EXPECT_EQ(events[42], "42");
    EXPECT_EQ(events[100], "[DONE]");
  }
}

TEST_F(HttpClientTest, DisconnectsAtTheTimeLimit) {
  const auto heard = std::make_shared<Heard>();
  client_->send({.path = "/hang", .time_limit = std::chrono::seconds(1)}, heard);
  const auto reply = heard->reply();
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, Code::kDeadlineExceeded);
  EXPECT_EQ(heard->events(), std::vector<std::string>{"first"});
  left_.events(1);  // the server has seen the disconnect
}

TEST_F(HttpClientTest, SaysWhenTheServerCutsAStreamOff) {
  const auto heard = std::make_shared<Heard>();
  client_->send({.path = "/hang"}, heard);
  heard->events(1);
  server_->stop(std::chrono::nanoseconds(0));
  const auto reply = heard->reply();
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, Code::kUnavailable);
}

TEST_F(HttpClientTest, SaysWhenNobodyListens) {
  const int port = server_->port();
  server_->stop(std::chrono::nanoseconds(0));
  const auto client = std::move(*HttpClient::create({.host = "127.0.0.1", .port = port}));
  const auto reply = client->ask({.path = "/count"});
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, Code::kUnavailable);
  EXPECT_NE(reply.error().message.find("connecting"), std::string::npos);
}

TEST_F(HttpClientTest, MayGoWhileStreamsRun) {
  const auto heard = std::make_shared<Heard>();
  client_->send({.path = "/hang"}, heard);
  heard->events(1);
  client_.reset();
  EXPECT_EQ(heard.use_count(), 1);
}

TEST(BaseUrl, IsAHostWithAPort) {
  const auto full = parse_base_url("http://127.0.0.1:8123/");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->host, "127.0.0.1");
  EXPECT_EQ(full->port, 8123);
  const auto short_form = parse_base_url("http://example");
  ASSERT_TRUE(short_form);
  EXPECT_EQ(short_form->port, 80);
  const auto v6 = parse_base_url("http://[::1]");
  ASSERT_TRUE(v6);
  EXPECT_EQ(v6->host, "[::1]");
  for (const char* bad : {"", "127.0.0.1:8000", "https://x", "http://", "http://x:0", "http://x:y",
                          "http://x:80/v1", "http://:80"}) {
    EXPECT_FALSE(parse_base_url(bad)) << bad;
  }
}

}  // namespace
}  // namespace fathom::client
