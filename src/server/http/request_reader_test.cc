#include "server/http/request_reader.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fathom::http {
namespace {

constexpr RequestReader::Limits kLimits{
    .max_header_bytes = 4096, .max_headers = 50, .max_body_bytes = 10'000};

// Feeds `text` in pieces of `piece` bytes until the first request ends; returns the bytes consumed.
size_t feed_in_pieces(RequestReader& reader, std::string_view text, size_t piece) {
  size_t at = 0;
  using Stage = RequestReader::Stage;
  while (at < text.size() && reader.stage() != Stage::kDone && reader.stage() != Stage::kFailed) {
    at += reader.feed(text.substr(at, piece));
    if (reader.stage() == Stage::kHeadDone) reader.read_body();
  }
  return at;
}

TEST(RequestReader, ReadsTheSameHoweverTheBytesAreCut) {
  const std::string requests[] = {
      "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n"
      "1\r\nh\r\n00004;a=b;c\r\nello\r\n0\r\n\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
      "5\r\nhello\r\n000;x\r\nA: b\r\nC: d\r\n\r\n",
  };
  for (const std::string& request : requests) {
    for (size_t piece = 1; piece <= request.size() + 3; ++piece) {
      RequestReader reader(kLimits);
      EXPECT_EQ(feed_in_pieces(reader, request + "GET", piece), request.size()) << piece;
      ASSERT_EQ(reader.stage(), RequestReader::Stage::kDone) << request << piece;
      EXPECT_EQ(reader.head().headers.find("A"), nullptr);
      EXPECT_EQ(reader.body(), request[0] == 'G' ? "" : "hello") << piece;
    }
  }
}

TEST(RequestReader, TellsWhatTheHeadSays) {
  RequestReader reader(kLimits);
  EXPECT_FALSE(reader.started());
  reader.feed("\r\n");
  EXPECT_FALSE(reader.started());
  reader.feed("PUT /a?b HTTP/1.1\r\nhOsT:   spaced\t \r\nExpect: 100-CONTINUE\r\n");
  EXPECT_TRUE(reader.started());
  EXPECT_EQ(reader.stage(), RequestReader::Stage::kHead);
  reader.feed("Connection: keep-alive, Close\r\nContent-Length: 2\r\n\r\nignored");
  ASSERT_EQ(reader.stage(), RequestReader::Stage::kHeadDone);
  const RequestHead& head = reader.head();
  EXPECT_EQ(head.method, "PUT");
  EXPECT_EQ(head.target, "/a?b");
  EXPECT_EQ(*head.headers.find("Host"), "spaced");
  EXPECT_EQ(head.minor_version, 1);
  EXPECT_FALSE(head.keep_alive);
  EXPECT_TRUE(head.has_body);
  EXPECT_TRUE(head.expects_continue);
}

TEST(RequestReader, KeepsOldConnectionsShort) {
  RequestReader reader(kLimits);
  reader.feed("GET / HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n\r\n");
  ASSERT_EQ(reader.stage(), RequestReader::Stage::kHeadDone);
  EXPECT_FALSE(reader.head().keep_alive);
  EXPECT_FALSE(reader.head().expects_continue);
  EXPECT_EQ(reader.head().minor_version, 0);
}

// A refusal does not depend on how the bytes are split, and comes as early as with the whole text.
TEST(RequestReader, RefusesTheSameHoweverTheBytesAreCut) {
  const std::string requests[] = {
      "GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
      "GET / HTTP/1.1\nHost: a\n\n",
      "GET / HTTP/3.0\r\n\r\n",
      "GET /" + std::string(5000, 'x'),
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 10001\r\n\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n;" + std::string(99, 'x'),
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n c\r\n",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;" +
          std::string(5000, 'x') + "\r\nabc",
      "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nA: " +
          std::string(5000, 'x'),
  };
  for (const std::string& request : requests) {
    RequestReader whole(kLimits);
    feed_in_pieces(whole, request + "\r\n\r\n", std::string::npos);
    ASSERT_EQ(whole.stage(), RequestReader::Stage::kFailed) << request;
    for (size_t piece = 1; piece <= std::min<size_t>(request.size(), 90); ++piece) {
      RequestReader reader(kLimits);
      feed_in_pieces(reader, request + "\r\n\r\n", piece);
      ASSERT_EQ(reader.stage(), RequestReader::Stage::kFailed) << request << piece;
      EXPECT_EQ(reader.failure().status, whole.failure().status) << request << piece;
      EXPECT_EQ(reader.failure().message, whole.failure().message) << request << piece;
    }
  }
}

TEST(RequestReader, NamesTheLimit) {
  RequestReader reader(kLimits);
  feed_in_pieces(reader, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10001\r\n\r\n", 1000);
  EXPECT_EQ(reader.failure().message, "the request's body is larger than the limit of 10000 bytes");
  RequestReader other(kLimits);
  feed_in_pieces(other, "GET / HTTP/1.1\r\nX: " + std::string(5000, 'x'), 1000);
  EXPECT_EQ(other.failure().status, 431);
  EXPECT_EQ(other.failure().message,
            "the request line and header fields are longer than the limit of 4096 bytes");
}

}  // namespace
}  // namespace fathom::http
