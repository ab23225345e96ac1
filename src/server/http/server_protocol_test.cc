// Valid and invalid HTTP/1.1, byte for byte over a socket.
#include <gtest/gtest.h>

#include "base/json.h"
#include "server/http/server_fixture.h"

namespace fathom::http {
namespace {

using namespace std::chrono_literals;

class ServerProtocol : public ServerTest {
 protected:
  void SetUp() override { serve(); }

  // Counts status lines.
  static int answers(std::string_view text) {
    int count = 0;
    for (size_t at = 0; (at = text.find("HTTP/1.1 ", at)) != std::string_view::npos; ++at) ++count;
    return count;
  }
};

TEST_F(ServerProtocol, AnswersAndKeepsTheConnection) {
  RawClient one = client();
  for (int i = 0; i < 3; ++i) {
    one.send("GET /hello HTTP/1.1\r\nHost: x\r\nX-Request-Id: my-id.7\r\n\r\n");
    const RawResponse response = one.read_response();
    EXPECT_EQ(response.status, 200);
    EXPECT_EQ(response.body, "hello");
    EXPECT_EQ(response.field("Content-Length"), "5");
    EXPECT_EQ(response.field("Content-Type"), "text/plain");
    EXPECT_EQ(response.field("X-Request-Id"), "my-id.7");
    EXPECT_EQ(response.field("Connection"), "");
    EXPECT_TRUE(response.field("Date").ends_with(" GMT")) << response.head;
  }
}

TEST_F(ServerProtocol, ReplacesARequestIdThatIsNone) {
  for (const char* id : {"", "a b", "a\"b", "<script>", "\xC3\xA4"}) {
    const RawResponse response = get("/hello", "X-Request-Id: " + std::string(id) + "\r\n");
    EXPECT_TRUE(response.field("X-Request-Id").starts_with("req-")) << id;
  }
  const RawResponse response = get("/hello", "X-Request-Id: " + std::string(129, 'a') + "\r\n");
  EXPECT_EQ(response.field("X-Request-Id").size(), 36u);
}

TEST_F(ServerProtocol, ReadsBodiesHoweverTheyAreCut) {
  const std::string with_length =
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\nhello world";
  const std::string in_chunks =
      "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
      "5;note=\"x\"\r\nhello\r\n006\r\n world\r\n0\r\nTrailer: dropped\r\n\r\n";
  for (const std::string& text : {with_length, in_chunks}) {
    RawClient one = client();
    one.send(text);
    EXPECT_EQ(one.read_response().body, "hello world");
    for (const char byte : text) {  // on the same connection, byte by byte
      one.send({&byte, 1});
      usleep(100);
    }
    EXPECT_EQ(one.read_response().body, "hello world");
  }
}

TEST_F(ServerProtocol, AnswersPipelinedRequestsInOrder) {
  RawClient one = client();
  std::string text;
  for (int i = 0; i < 300; ++i) {
    const std::string body = std::to_string(i);
    text += i % 3 == 0 ? "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
                       : "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                             std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  one.send(text);
  for (int i = 0; i < 300; ++i) {
    ASSERT_EQ(one.read_response().body, i % 3 == 0 ? "hello" : std::to_string(i));
  }
  EXPECT_TRUE(one.silent_for(50ms));
}

TEST_F(ServerProtocol, ClosesWhenAsked) {
  const std::string text = exchange(
      "GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET /hello HTTP/1.1\r\n");
  EXPECT_EQ(answers(text), 1);
  EXPECT_NE(text.find("\r\nConnection: close\r\n"), std::string::npos);
  RawClient old = client();
  old.send("GET /hello HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(old.read_to_end().ends_with("\r\n\r\nhello"));
  EXPECT_TRUE(old.ended());
}

// Invalid requests with their status. The connection closes, and nothing after the error is parsed
// as a request.
TEST_F(ServerProtocol, RefusesWhatItMustNotGuess) {
  struct Case {
    const char* text;
    int status;
  };
  const Case cases[] = {
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0x3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length:\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
       "chunked\r\n\r\n",
       400},
      {"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nz\r\nabc\r\n0\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffff\r\n", 413},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3 \t;\x01\r\nabc\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: "
       "3\r\n\r\n",
       400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nX-Folded: a\r\n b\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\n Host: x\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\nHost : x\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\n: empty\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nX: a\x01\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\nHost: x\n\n", 400},
      {"GET /hello HTTP/1.1\r\nHost: x\rX: y\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\n\r\n", 400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400},
      {"GET  /hello HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"GET /hello\r\n\r\n", 400},
      {"GET /hel\tlo HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"G{T /hello HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"\x16\x03\x01\x02", 400},
      {"GET /hello HTTP/2.0\r\nHost: x\r\n\r\n", 505},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nExpect: much\r\n\r\n", 417},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer "
       "b\r\n\r\n",
       400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\nx-api-key: a\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Type: "
       "text/plain\r\n\r\n",
       400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nOrigin: http://y\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: identity\r\nContent-Encoding: "
       "gzip\r\n\r\n",
       400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nSec-Fetch-Site: same-origin\r\nSec-Fetch-Site: "
       "cross-site\r\n\r\n",
       400},
      {"GET /hello HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n "
       "c\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: "
       "b\r\n\tc\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\x01\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
       "00000000000000003\r\nabc\r\n0\r\n\r\n",
       400},
  };
  for (const Case& item : cases) {
    const std::string text =
        exchange(std::string(item.text) + "GET /hello HTTP/1.1\r\nHost: smuggled\r\n\r\n");
    EXPECT_EQ(answers(text), 1) << item.text << text;
    EXPECT_EQ(text.substr(0, 12), "HTTP/1.1 " + std::to_string(item.status)) << item.text << text;
    EXPECT_NE(text.find("\r\nConnection: close\r\n"), std::string::npos) << item.text;
    const auto body = parse_json(text.substr(text.find("\r\n\r\n") + 4), "body");
    ASSERT_TRUE(body) << text;
    EXPECT_TRUE(body->at("error").at("message").is_string()) << text;
  }
}

// Small chunk extensions and trailers are read and dropped.
TEST_F(ServerProtocol, RefusesLargeExtensionsAndTrailers) {
  const std::string begin = "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  const auto answer = [&](const std::string& chunks) {
    RawClient one = client();
    one.send(begin + chunks);
    return one.read_response();
  };
  const auto extension = [](size_t size) { return ";" + std::string(size - 1, 'x'); };
  const std::string end = "\r\n0\r\n\r\n";
  EXPECT_EQ(answer("3" + extension(4096) + "\r\nabc" + end).body, "abc");
  EXPECT_EQ(answer("3" + extension(4097) + "\r\nabc" + end).status, 400);
  EXPECT_EQ(answer("3" + extension(20'000) + "\r\nabc" + end).status, 400);
  // Extensions of all chunks count together, including the last chunk's.
  std::string chunks;
  for (int i = 0; i < 41; ++i) chunks += "1" + extension(100) + "\r\na\r\n";
  EXPECT_EQ(answer(chunks + end.substr(2)).status, 400);
  EXPECT_EQ(answer("3\r\nabc\r\n0" + extension(4097) + "\r\n\r\n").status, 400);
  const auto trailer = [](size_t size) { return "A: " + std::string(size - 5, 'x') + "\r\n"; };
  EXPECT_EQ(answer("3\r\nabc\r\n0\r\n" + trailer(4096) + "\r\n").body, "abc");
  EXPECT_EQ(answer("3\r\nabc\r\n0\r\n" + trailer(4097) + "\r\n").status, 400);
  EXPECT_EQ(answer("3\r\nabc\r\n0\r\n" + trailer(20'000)).status, 400);
}

TEST_F(ServerProtocol, RefusesAZeroByteInTheHead) {
  std::string text = "GET /hello HTTP/1.1\r\nHost: x\r\nX: a?b\r\n\r\n";
  text[text.find('?')] = '\0';
  EXPECT_TRUE(exchange(text).starts_with("HTTP/1.1 400 "));
}

TEST_F(ServerProtocol, TakesTargetsApart) {
  EXPECT_EQ(get("http://elsewhere:80/hello").status, 200);
  EXPECT_EQ(get("/hello?a=b%20c&d").status, 200);
  EXPECT_EQ(get("/items/org%2Fname").body, "org/name");
  EXPECT_EQ(get("/rest/org/name").body, "org/name");
  EXPECT_EQ(get("/rest/a%2Fb/c").body, "a/b/c");
  EXPECT_EQ(get("/%68ello").status, 200);
  for (const char* bad :
       {"/items/..", "/../hello", "/items/%2e%2E", "/items/%zz", "/items/%", "hello",
        "/items/a%00b", "/items/%ff", "/items/a#b", "/items/\xC3\xA4", "//x:y@/../"}) {
    EXPECT_EQ(get(bad).status, 400) << bad;
  }
  for (const char* absent : {"/", "/hello/", "//hello", "/items/", "/items", "/Hello"}) {
    EXPECT_EQ(get(absent).status, 404) << absent;
  }
  EXPECT_EQ(get("/" + std::string(8191, 'a')).status, 404);
}

TEST_F(ServerProtocol, SaysWhichMethodsThereAre) {
  const RawResponse wrong = request("DELETE", "/hold", "", "");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.field("Allow"), "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(parse_json(wrong.body, "body")->at("error").at("code"), "method_not_allowed");
  EXPECT_EQ(request("TRACE", "/hello", "", "").status, 405);
  EXPECT_EQ(request("QUERY", "/hello", "", "").status, 405);
  EXPECT_EQ(request("BREW", "/hello", "", "").status, 501);
  const RawResponse options = request("OPTIONS", "/echo", "", "");
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(options.field("Allow"), "POST, OPTIONS");
  EXPECT_EQ(options.field("Content-Length"), "");
  EXPECT_EQ(request("OPTIONS", "*", "", "").status, 204);
  EXPECT_EQ(get("*").status, 404);
  EXPECT_EQ(request("CONNECT", "x:443", "", "").status, 400);
  const RawResponse absent = get("/absent");
  const auto body = parse_json(absent.body, "body");
  EXPECT_EQ(body->at("error").at("type"), "not_found_error");
  EXPECT_TRUE(body->at("error").at("param").is_null());
}

TEST_F(ServerProtocol, AnswersHeadWithoutABody) {
  RawClient one = client();
  one.send("HEAD /hello HTTP/1.1\r\nHost: x\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  const RawResponse head = one.read_response(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.field("Content-Length"), "5");
  EXPECT_EQ(one.read_response().body, "hello");  // pipelined
  EXPECT_EQ(request("HEAD", "/echo", "", "").status, 405);
  one.send("HEAD /absent HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(one.read_to_end().ends_with("\r\n\r\n"));
}

TEST_F(ServerProtocol, SendsContinueToWhoWaitsForIt) {
  RawClient one = client();
  one.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(one.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  one.send("abc");
  EXPECT_EQ(one.read_response().body, "abc");
  // A body that has already arrived gets no 100 Continue.
  one.send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc");
  EXPECT_EQ(one.read_response().body, "abc");
  // A refusal comes before the body is sent, and only once.
  one.send("POST /absent HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  const std::string text = one.read_to_end();
  EXPECT_TRUE(text.starts_with("HTTP/1.1 404 ")) << text;
  EXPECT_EQ(answers(text), 1);
}

TEST_F(ServerProtocol, IgnoresUpgradesAndEmptyLines) {
  EXPECT_EQ(get("/hello", "Connection: Upgrade\r\nUpgrade: websocket\r\n").body, "hello");
  EXPECT_EQ(get("/hello", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n").body, "hello");
  RawClient one = client();
  one.send(
      "\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n\r\n\r\nGET /hello HTTP/1.1\r\nHost: "
      "x\r\n\r\n");
  EXPECT_EQ(one.read_response().body, "hello");
  EXPECT_EQ(one.read_response().body, "hello");
}

// A handler's exception fails its request only; the connection goes on.
TEST_F(ServerProtocol, AnswersForHandlersThatDoNot) {
  RawClient one = client();
  one.send("GET /throw HTTP/1.1\r\nHost: x\r\n\r\n");
  const RawResponse thrown = one.read_response();
  EXPECT_EQ(thrown.status, 500);
  EXPECT_EQ(thrown.body.find("secret"), std::string::npos);
  one.send("GET /drop HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 500);
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 200);
}

TEST_F(ServerProtocol, SendsOneAnswerWhateverTheHandlerDoes) {
  RawClient one = client();
  one.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  const Held::Item item = held.take();
  EXPECT_TRUE(item.responder->send({.body = "first"}));
  EXPECT_FALSE(item.responder->send({.body = "second"}));
  EXPECT_FALSE(item.responder->start_stream({.content_type = "text/plain"}));
  item.responder->write("ignored");
  item.responder->end();
  EXPECT_EQ(one.read_response().body, "first");
  EXPECT_TRUE(one.silent_for(50ms));
}

// No header value, wherever it comes from, can inject another field.
TEST_F(ServerProtocol, LetsNoValueBreakItsLine) {
  RawClient one = client();
  one.send("GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
  held.take().responder->send(
      {.headers = {{"X-Text", "a\r\nInjected: b"}, {"Content-Length", "99"}}, .body = "{}"});
  const RawResponse response = one.read_response();
  EXPECT_EQ(response.field("X-Text"), "a  Injected: b");
  EXPECT_EQ(response.field("Injected"), "");
  EXPECT_EQ(response.field("Content-Length"), "2");
}

TEST_F(ServerProtocol, TellsAHandlerWhatWasAsked) {
  RawClient one = client();
  one.send(
      "POST /hold?limit=3&name=a+b%2B&flag HTTP/1.1\r\nHost: x\r\nX-Thing: 1\r\nx-thing: 2\r\n"
      "Content-Length: 4\r\n\r\nbody");
  const Held::Item item = held.take();
  EXPECT_EQ(item.request.method, "POST");
  EXPECT_EQ(item.request.path, "/hold");
  EXPECT_EQ(*item.request.query_parameter("limit"), "3");
  EXPECT_EQ(*item.request.query_parameter("name"), "a b+");
  EXPECT_EQ(*item.request.query_parameter("flag"), "");
  EXPECT_EQ(item.request.query_parameter("absent"), nullptr);
  EXPECT_EQ(*item.request.headers.find("X-THING"), "1");
  EXPECT_EQ(item.request.headers.count("X-thing"), 2);
  EXPECT_EQ(item.request.body, "body");
  EXPECT_TRUE(item.request.peer.starts_with("127.0.0.1:")) << item.request.peer;
  EXPECT_LT(std::chrono::steady_clock::now() - item.request.received, 10s);
  item.responder->send({});
}

}  // namespace
}  // namespace fathom::http
