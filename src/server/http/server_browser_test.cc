// Requests that a web page can make a browser send, and which of them are refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <climits>

#include "base/json.h"
#include "server/http/browser_guard.h"
#include "server/http/server_fixture.h"

namespace fathom::http {
namespace {

class ServerBrowser : public ServerTest {
 protected:
  static ServerOptions options_for(std::string host) {
    ServerOptions options = test_options();
    options.allowed_hosts.clear();
    options.host = std::move(host);
    return options;
  }
  // Serves GET and POST at "/json", which wants JSON, and at "/any".
  void serve_with(ServerOptions options) {
    RouteTable routes;
    for (const bool wants_json : {false, true}) {
      for (const Method method : {Method::kGet, Method::kPost}) {
        routes.add(method, wants_json ? "/json" : "/any", Access::kKey,
                   [](Request, std::shared_ptr<Responder> responder) {
                     responder->send({.body = "served"});
                   },
                   {.wants_json = wants_json});
      }
    }
    serve(std::move(options), std::move(routes));
  }
  RawResponse with_host(const std::string& host, std::string_view more = "") {
    RawClient one = client();
    one.send("GET /any HTTP/1.1\r\nHost: " + host + "\r\n" + std::string(more) + "\r\n");
    return one.read_response();
  }
  int post(std::string_view fields, std::string_view body = "", std::string_view path = "/any") {
    return request("POST", path, fields, body).status;
  }
};

std::string machine_name() {
  char name[HOST_NAME_MAX + 1] = {};
  gethostname(name, HOST_NAME_MAX);
  return name;
}

TEST_F(ServerBrowser, HostIsANameOfTheServer) {
  serve_with(options_for("127.0.0.1"));
  for (const std::string& good :
       {std::string("localhost"), std::string("LOCALHOST:8000"), std::string("localhost.:80"),
        std::string("page.localhost"), std::string("127.0.0.1"), std::string("127.0.0.1:8000"),
        std::string("10.1.2.3:8000"), std::string("[::1]"), std::string("[::1]:8000"),
        machine_name(), machine_name() + ":8000"}) {
    EXPECT_EQ(with_host(good).status, 200) << good;
  }
  for (const char* bad :
       {"evil.example", "evil.example:8000", "localhost.evil.example", "evil-localhost", "fathom",
        "127.0.0.1.evil.example", "127.0.0.1:8000:evil", "[::1]evil", "[evil]", "evil.example:x",
        "localhost:80@evil.example", ".", ""}) {
    const RawResponse refused = with_host(bad);
    EXPECT_EQ(refused.status, 421) << bad;
    const auto body = parse_json(refused.body, "body");
    ASSERT_TRUE(body) << bad;
    EXPECT_EQ(body->at("error").at("code"), "host_not_allowed");
    EXPECT_NE(refused.body.find("--allowed-hosts"), std::string::npos);
  }
  // Only browsers always send Host.
  RawClient old = client();
  old.send("GET /any HTTP/1.0\r\n\r\n");
  EXPECT_EQ(old.read_response().status, 200);
}

TEST_F(ServerBrowser, FurtherHostsAreAllowed) {
  ServerOptions options = options_for("127.0.0.1");
  options.allowed_hosts = {"Chat.Example", "fathom"};
  serve_with(options);
  for (const char* good : {"chat.example", "CHAT.example:443", "fathom:8000", "localhost"}) {
    EXPECT_EQ(with_host(good).status, 200) << good;
  }
  EXPECT_EQ(with_host("other.chat.example").status, 421);
}

TEST_F(ServerBrowser, AStarAllowsAllHosts) {
  ServerOptions options = options_for("127.0.0.1");
  options.allowed_hosts = {"*"};
  serve_with(options);
  EXPECT_EQ(with_host("evil.example").status, 200);
}

// A page does not know the key, and behind a proxy any host name may arrive.
TEST_F(ServerBrowser, WithAKeyHostsAreCheckedOnlyIfGiven) {
  ServerOptions options = options_for("127.0.0.1");
  options.api_keys = {"sk"};
  serve_with(options);
  EXPECT_EQ(with_host("chat.example", "X-Api-Key: sk\r\n").status, 200);
  EXPECT_EQ(with_host("chat.example").status, 401);
  options.allowed_hosts = {"chat.example"};
  serve_with(options);
  EXPECT_EQ(with_host("chat.example", "X-Api-Key: sk\r\n").status, 200);
  EXPECT_EQ(with_host("evil.example", "X-Api-Key: sk\r\n").status, 421);
}

// Runs without a server, so that no test listens on all addresses.
bool takes_host(const std::string& listens_on, const std::string& host) {
  ServerOptions options;
  options.host = listens_on;
  return !BrowserGuard(options).refuse_host({{"Host", host}});
}

// Names without a dot belong to containers and services; nobody can register one.
TEST(BrowserGuard, NamesWithoutADotAreTakenOnOtherAddresses) {
  for (const char* address : {"0.0.0.0", "192.168.1.5", "::", "[::]"}) {
    EXPECT_TRUE(takes_host(address, "fathom:8000")) << address;
    EXPECT_FALSE(takes_host(address, "evil.example:8000")) << address;
  }
  for (const char* loopback : {"127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"}) {
    EXPECT_FALSE(takes_host(loopback, "fathom:8000")) << loopback;
  }
}

TEST(BrowserGuard, TheNameThatItListensOnIsItsOwn) {
  EXPECT_TRUE(takes_host("Box.Example", "box.example:8000"));
  EXPECT_FALSE(takes_host("box.example", "example"));
}

TEST_F(ServerBrowser, PagesOfOtherOriginsMayNotPost) {
  serve_with(test_options());  // its requests carry "Host: x"
  EXPECT_EQ(post(""), 200);
  for (const char* good :
       {"Origin: http://x\r\n", "Origin: https://X\r\n", "Sec-Fetch-Site: same-origin\r\n",
        "Sec-Fetch-Site: none\r\n",
        // A proxy changed Host; the browser states that the page is of the same origin.
        "Origin: https://chat.example\r\nSec-Fetch-Site: same-origin\r\n"}) {
    EXPECT_EQ(post(good), 200) << good;
  }
  for (const char* bad :
       {"Origin: http://evil.example\r\n", "Origin: null\r\n", "Origin: http://x:8080\r\n",
        "Origin: x\r\n", "Origin:\r\n", "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n", "Sec-Fetch-Site:\r\n",
        "Origin: http://x\r\nSec-Fetch-Site: cross-site\r\n",
        "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\n"}) {
    EXPECT_EQ(post(bad), 403) << bad;
    // Safe methods pass: links to the page work, and no other page can read the response.
    const RawResponse read = get("/any", bad);
    EXPECT_EQ(read.status, 200) << bad;
    EXPECT_EQ(read.head.find("Access-Control"), std::string::npos) << bad;
  }
  const RawResponse refused = request("POST", "/any", "Origin: http://evil.example\r\n", "");
  EXPECT_EQ(parse_json(refused.body, "body")->at("error").at("code"), "origin_not_allowed");
}

TEST_F(ServerBrowser, PagesOfListedOriginsMayPost) {
  ServerOptions options = test_options();
  options.cors_origins = {"https://chat.example"};
  serve_with(options);
  EXPECT_EQ(post("Origin: https://chat.example\r\nSec-Fetch-Site: cross-site\r\n"), 200);
  EXPECT_EQ(post("Origin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"), 403);
  // The page must be able to read the reason.
  const RawResponse refused =
      request("POST", "/json", "Origin: https://chat.example\r\nContent-Type: text/plain\r\n", "x");
  EXPECT_EQ(refused.status, 415);
  EXPECT_EQ(refused.field("Access-Control-Allow-Origin"), "https://chat.example");
}

TEST_F(ServerBrowser, AStarLetsAllPagesPost) {
  ServerOptions options = test_options();
  options.cors_origins = {"*"};
  serve_with(options);
  EXPECT_EQ(post("Origin: https://any.example\r\nSec-Fetch-Site: cross-site\r\n"), 200);
}

// No body that a page can send without a preflight is JSON.
TEST_F(ServerBrowser, JsonRoutesWantJson) {
  serve_with(test_options());
  for (const char* good : {"application/json", "Application/JSON",
                           "application/json; charset=utf-8", "application/json ;charset=utf-8"}) {
    EXPECT_EQ(post("Content-Type: " + std::string(good) + "\r\n", "{}", "/json"), 200) << good;
  }
  for (const char* bad : {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                          "application/jsonp", "text/plain; application/json", "", "*/*",
                          "application/json, text/plain"}) {
    const std::string field = "Content-Type: " + std::string(bad) + "\r\n";
    EXPECT_EQ(post(field, "{}", "/json"), 415) << bad;
    EXPECT_EQ(post(field, "{}", "/any"), 200) << bad;
  }
  EXPECT_EQ(post("", "{}", "/json"), 415);
  EXPECT_EQ(post("", "", "/json"), 200);  // no body to check
  const RawResponse refused = request("POST", "/json", "Content-Type: text/plain\r\n", "{}");
  EXPECT_EQ(parse_json(refused.body, "body")->at("error").at("code"), "unsupported_content_type");
  EXPECT_NE(refused.body.find("application/json"), std::string::npos);
}

TEST_F(ServerBrowser, EncodedBodiesAreRefused) {
  serve_with(test_options());
  const std::string json = "Content-Type: application/json\r\n";
  for (const char* bad : {"gzip", "deflate", "br", "identity, gzip", ""}) {
    const RawResponse refused =
        request("POST", "/json", json + "Content-Encoding: " + bad + "\r\n", "{}");
    EXPECT_EQ(refused.status, 415) << bad;
    EXPECT_EQ(refused.field("Accept-Encoding"), "identity");
  }
  EXPECT_EQ(post(json + "Content-Encoding: identity\r\n", "{}", "/json"), 200);
  EXPECT_EQ(post("Content-Encoding: gzip\r\n", "{}", "/any"), 415);
}

}  // namespace
}  // namespace fathom::http
