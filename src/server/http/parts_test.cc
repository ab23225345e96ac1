// The small parts of the transport, each alone.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/json.h"
#include "server/http/error_body.h"
#include "server/http/exchange.h"
#include "server/http/key_ring.h"
#include "server/http/log_text.h"
#include "server/http/request_id.h"
#include "server/http/response_head.h"
#include "server/http/send_queue.h"
#include "server/http/sse.h"

namespace fathom::http {
namespace {

TEST(SendQueue, GivesBackWhatItGot) {
  std::mt19937 random(7);
  SendQueue queue;
  std::string in, out;
  for (int i = 0; i < 3000; ++i) {
    std::string piece(random() % 20 == 0 ? random() % 100'000 : random() % 300, 'x');
    for (char& c : piece) c = static_cast<char>(random());
    in += piece;
    if (i % 2 == 0) {
      queue.append(std::string_view(piece));
    } else {
      queue.append(std::move(piece));
    }
    for (uint32_t takes = random() % 3; takes > 0 && !queue.empty(); --takes) {
      std::string_view parts[4];
      const size_t count = queue.front(parts);
      ASSERT_GT(count, 0u);
      std::string front;
      for (size_t k = 0; k < count; ++k) {
        ASSERT_FALSE(parts[k].empty());
        front += parts[k];
      }
      front.resize(1 + random() % front.size());
      out += front;
      queue.remove(front.size());
    }
    ASSERT_EQ(queue.size(), std::ssize(in) - std::ssize(out));
  }
  while (!queue.empty()) {
    std::string_view part[1];
    ASSERT_EQ(queue.front(part), 1u);
    out += part[0];
    queue.remove(part[0].size());
  }
  EXPECT_TRUE(in == out);
}

TEST(LogText, ShowsNothingThatATerminalObeys) {
  EXPECT_EQ(for_log("plain /path?x=1"), "plain /path?x=1");
  EXPECT_EQ(for_log("a\r\nb\x1b[31m\x7f\"\\"), "a\\x0d\\x0ab\\x1b[31m\\x7f\\\"\\\\");
  EXPECT_EQ(for_log("\xE2\x80\xAE"), "\\xe2\\x80\\xae");
  EXPECT_EQ(for_log(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(for_log("abcdef", 3), "abc...");
}

TEST(RequestId, IsTakenOverOnlyIfHarmless) {
  for (const char* good : {"a", "req-1:2.3_4", "00000000-0000-0000-0000-000000000000"}) {
    EXPECT_TRUE(is_valid_request_id(good)) << good;
  }
  for (const char* bad : {"", " a", "a b", "a/b", "a\n", "\xC3\xA4", "a\"", "a,b"}) {
    EXPECT_FALSE(is_valid_request_id(bad)) << bad;
  }
  EXPECT_TRUE(is_valid_request_id(std::string(128, 'a')));
  EXPECT_FALSE(is_valid_request_id(std::string(129, 'a')));
  std::set<std::string> made;
  for (int i = 0; i < 10'000; ++i) made.insert(make_request_id());
  EXPECT_EQ(made.size(), 10'000u);
  EXPECT_TRUE(is_valid_request_id(*made.begin()));
}

TEST(KeyRing, JudgesEveryPresentedKey) {
  using Verdict = KeyRing::Verdict;
  const KeyRing ring = *KeyRing::create({"one", "two"}, {"root"});
  Caller caller;
  const auto check = [&](Access access, Headers headers) {
    caller = {};
    return ring.check(access, headers, &caller);
  };
  EXPECT_EQ(check(Access::kPublic, {}), Verdict::kGranted);
  EXPECT_EQ(check(Access::kKey, {}), Verdict::kMissing);
  EXPECT_EQ(check(Access::kKey, {{"X-Api-Key", "two"}}), Verdict::kGranted);
  EXPECT_EQ(check(Access::kKey, {{"X-Api-Key", "root"}}), Verdict::kGranted);
  EXPECT_EQ(check(Access::kKey, {{"X-Api-Key", "tw"}}), Verdict::kWrong);
  EXPECT_EQ(check(Access::kAdmin, {{"X-Api-Key", "one"}}), Verdict::kNotAdmin);
  EXPECT_EQ(check(Access::kAdmin, {{"X-Api-Key", "one"}, {"authorization", "bearer root"}}),
            Verdict::kGranted);
  EXPECT_EQ(KeyRing::create({"one"}, {})->check(Access::kAdmin, {{"X-Api-Key", "one"}}, &caller),
            Verdict::kAdminOff);
  EXPECT_FALSE(KeyRing::create({"a\nb"}, {}));
  EXPECT_FALSE(KeyRing::create({}, {"schl\xC3\xBCssel"}));
}

TEST(ResponseHead, HasWhatHttpWants) {
  std::string text;
  append_response_head(text, {.status = 429,
                              .content_type = "application/json",
                              .headers = {{"Retry-After", "1"}, {"connection", "upgrade"}},
                              .content_length = 12,
                              .close = true,
                              .request_id = "id-1",
                              .cors_origin = "*"});
  EXPECT_TRUE(text.starts_with("HTTP/1.1 429 Too Many Requests\r\nDate: ")) << text;
  EXPECT_TRUE(
      text.ends_with(" GMT\r\n"
                     "Content-Type: application/json\r\n"
                     "Content-Length: 12\r\n"
                     "Connection: close\r\n"
                     "X-Request-Id: id-1\r\n"
                     "Request-Id: id-1\r\n"
                     "Access-Control-Allow-Origin: *\r\n"
                     "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n"
                     "Retry-After: 1\r\n"
                     "\r\n"))
      << text;
}

TEST(Sse, FramesEveryLine) {
  const auto event = [](std::string_view name, std::string_view data) {
    std::string text;
    append_sse_event(text, name, data);
    return text;
  };
  EXPECT_EQ(event("", "{}"), "data: {}\n\n");
  EXPECT_EQ(event("ping", ""), "event: ping\ndata: \n\n");
  EXPECT_EQ(event("", "a\nb\r\nc\rd\n"), "data: a\ndata: b\ndata: c\ndata: d\ndata: \n\n");
}

TEST(ErrorBody, IsJsonWhateverTheMessage) {
  const Response response =
      error_response(Status{Code::kResourceExhausted, "full: \"x\"\n\xFF\x01"});
  EXPECT_EQ(response.status, 429);
  EXPECT_EQ(*response.headers.find("retry-after"), "1");
  const auto body = parse_json(response.body, "body");
  ASSERT_TRUE(body) << response.body;
  EXPECT_EQ(body->at("error").at("message"), "full: \"x\"\n\xEF\xBF\xBD\x01");
  EXPECT_EQ(body->at("error").at("type"), "rate_limit_error");
  EXPECT_TRUE(body->at("error").at("code").is_null());
  EXPECT_EQ(parse_json(error_response(400, "m", "c", "p").body, "")->at("error").at("param"), "p");
}

// Writes to 256 streams in one step wake the I/O thread once.
TEST(Outbox, WakesOnceABurst) {
  int wakes = 0;
  const auto outbox = std::make_shared<Outbox>([&] { ++wakes; });
  std::vector<std::shared_ptr<Exchange>> streams, news;
  for (int i = 0; i < 256; ++i) {
    streams.push_back(std::make_shared<Exchange>(outbox, nullptr));
    streams.back()->start_stream({});
  }
  EXPECT_EQ(wakes, 1);
  outbox->take(news, true);
  EXPECT_EQ(news.size(), 256u);
  Exchange::News taken;
  for (const auto& stream : streams) stream->take(taken);
  for (int step = 0; step < 3; ++step) {  // the I/O thread has promised to call take()
    for (const auto& stream : streams) stream->write("a");
    for (const auto& stream : streams) stream->write("b");
  }
  EXPECT_EQ(wakes, 1);
  outbox->take(news, true);
  EXPECT_EQ(news.size(), 256u);  // each exchange once
  streams[0]->take(taken);
  EXPECT_EQ(taken.bytes, "ababab");
  outbox->take(news, true);  // nothing new: the I/O thread sleeps from here on
  EXPECT_TRUE(news.empty());
  streams[0]->write("c");
  EXPECT_EQ(wakes, 2);
  std::make_shared<Exchange>(outbox, nullptr)->send({});  // a complete response wakes at once
  EXPECT_EQ(wakes, 2);
  outbox->take(news, true);
  std::make_shared<Exchange>(outbox, nullptr)->send({});
  EXPECT_EQ(wakes, 3);
  outbox->close();
  streams[1]->take(taken);
  streams[1]->write("late");
  EXPECT_EQ(wakes, 3);
}

}  // namespace
}  // namespace fathom::http
