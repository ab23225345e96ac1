// The small parts of the router that work on text.
#include <gtest/gtest.h>

#include "router/error_reply.h"
#include "router/event_boundary.h"
#include "router/prompt_text.h"
#include "router/replica_load.h"
#include "router/request_head.h"

namespace fathom::router {
namespace {

TEST(EventBoundary, PassesWholeEventsWhereverTheBytesAreCut) {
  for (const std::string_view end : {"\n\n", "\r\n\r\n"}) {
    std::string stream;
    for (const char* event : {"data: one", ": note", "event: x\ndata: two", "data: [DONE]"}) {
      stream.append(event).append(end);
    }
    for (size_t size = 1; size <= stream.size(); ++size) {
      EventBoundary boundary;
      std::string out;
      for (size_t at = 0; at < stream.size(); at += size) {
        boundary.feed(std::string_view(stream).substr(at, size), out);
        EXPECT_TRUE(out.empty() || out.ends_with(end)) << size;
        EXPECT_TRUE(stream.starts_with(out));
      }
      EXPECT_EQ(out, stream) << size;
      EXPECT_EQ(boundary.take_rest(), "");
    }
  }
}

TEST(EventBoundary, KeepsAnUnfinishedEventBack) {
  EventBoundary boundary;
  std::string out;
  boundary.feed("data: one\n\ndata: tw", out);
  EXPECT_EQ(out, "data: one\n\n");
  EXPECT_EQ(boundary.take_rest(), "data: tw");
}

TEST(EventBoundary, DoesNotKeepMoreThanItsBound) {
  EventBoundary boundary;
  std::string out;
  boundary.feed(std::string(EventBoundary::kMostHeld + 1, 'x'), out);
  EXPECT_EQ(out.size(), EventBoundary::kMostHeld + 1);
  EXPECT_FALSE(boundary.is_between_events());
}

TEST(PromptText, BeginsAsConversationsDo) {
  const auto chat = [](std::string_view question) {
    return prompt_text(
        R"({"model":"m","temperature":1,"messages":[{"role":"system","content":"Be brief."},)"
        R"({"role":"user","content":[{"type":"text","text":")" +
        std::string(question) + R"("}]}]})");
  };
  EXPECT_TRUE(
      chat("a").starts_with("system\x1e"
                            "Be brief.\x1euser\x1e"));
  EXPECT_NE(chat("a"), chat("b"));
  EXPECT_EQ(prompt_text(R"({"prompt":[1,22,3]})"), "1,22,3,");
  EXPECT_TRUE(prompt_text(R"({"messages":[],"cache_salt":"s","prompt":"x"})").starts_with("s"));
  EXPECT_EQ(prompt_text("{"), "");
  EXPECT_EQ(prompt_text("[]"), "");
  EXPECT_EQ(prompt_text(R"({"prompt":")" + std::string(1 << 20, 'x') + "\"}").size(),
            kMostPromptText);
}

TEST(ReplicaLoad, SumsRanksAndKnowsBothNames) {
  const auto load = parse_load(
      "# HELP vllm:num_requests_running x\nvllm:num_requests_running{a=\"} 7\",dp_rank=\"0\"} 3\n"
      "vllm:num_requests_running{dp_rank=\"1\"} 4.0\nvllm:num_requests_waiting 2 1700000000\n"
      "vllm:kv_cache_usage_perc{dp_rank=\"0\"} 0.25\nvllm:kv_cache_usage_perc{dp_rank=\"1\"} "
      "0.5\nother 9\n");
  ASSERT_TRUE(load);
  EXPECT_EQ(load->running, 7);
  EXPECT_EQ(load->waiting, 2);
  EXPECT_EQ(load->cache_use, 0.5);
  EXPECT_EQ(parse_load("sglang:num_queue_reqs 5")->waiting, 5);
  EXPECT_FALSE(parse_load("up 1\n"));
  EXPECT_EQ(parse_load("vllm:num_requests_running NaN\nvllm:num_requests_running 1e300")->running,
            1'000'000'000);
}

TEST(RequestHead, LeavesWhatBelongsToTheConnection) {
  http::Request request;
  request.id = "r1";
  request.method = "POST";
  request.path = "/v1/messages";
  request.query = {{"beta", "a b"}};
  request.headers = {{"Host", "front"},
                     {"Connection", "close"},
                     {"X-Api-Key", "k"},
                     {"X-Other", "1"},
                     {"Origin", "http://x"}};
  request.body = "{}";
  EXPECT_EQ(request_head(request, "h:1", ""),
            "POST /v1/messages?beta=a%20b HTTP/1.1\r\nHost: h:1\r\nX-Api-Key: k\r\nX-Other: 1\r\n"
            "X-Request-Id: r1\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(request_head(request, "h:1", "secret").find("X-Api-Key"), std::string::npos);
  EXPECT_NE(request_head(request, "h:1", "secret").find("Authorization: Bearer secret"),
            std::string::npos);
}

TEST(ErrorReply, SpeaksTheApiOfThePath) {
  EXPECT_NE(error_event(error_form("/v1/messages"), "gone")
                .find("event: error\ndata: {\"type\":\"error\""),
            std::string::npos);
  EXPECT_EQ(error_event(error_form("/v1/chat/completions"), "gone")
                .find("data: {\"error\":{\"message\":\"gone\""),
            0);
  EXPECT_NE(error_event(error_form("/v1/responses"), "gone").find("event: error\n"),
            std::string::npos);
}

}  // namespace
}  // namespace fathom::router
