#include "server/client/sse_parser.h"

#include <gtest/gtest.h>

#include <vector>

namespace fathom::client {
namespace {

using Events = std::vector<std::string>;

Events parse(std::string_view text, size_t piece) {
  SseParser parser;
  Events events;
  for (size_t at = 0; at < text.size(); at += piece) {
    parser.feed(text.substr(at, piece), [&](std::string_view data) { events.emplace_back(data); });
  }
  return events;
}

TEST(SseParser, FindsTheSameEventsInPiecesOfAnySize) {
  constexpr std::string_view kText =
      "data: one\n\n: keep-alive\n\nevent: named\r\ndata:two\r\n\r\ndata: a\ndata:  b\ndata\n\n"
      "id: 7\n\ndata: return\r\rdata: [DONE]\n\ndata: without an end\n";
  const Events expected = {"one", "two", "a\n b\n", "return", "[DONE]"};
  for (size_t piece = 1; piece <= kText.size(); ++piece) {
    EXPECT_EQ(parse(kText, piece), expected) << "pieces of " << piece;
  }
}

TEST(SseParser, KeepsFieldsApartThatOnlyBeginAlike) {
  EXPECT_EQ(parse("database: x\ndata: y\n\n", 100), Events{"y"});
  EXPECT_EQ(parse("data:\n\n", 100), Events{""});
}

}  // namespace
}  // namespace fathom::client
