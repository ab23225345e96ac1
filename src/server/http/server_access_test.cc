// Access control: every route with every kind of key, and pages of other origins.
#include <gtest/gtest.h>

#include <vector>

#include "base/json.h"
#include "server/http/server_fixture.h"

namespace fathom::http {
namespace {

constexpr std::string_view kApiKey = "sk-test-1", kOtherKey = "sk-test-2", kAdminKey = "admin-1";

class ServerAccess : public ServerTest {
 protected:
  // Two routes of each access class: GET and POST.
  static RouteTable routes_of_all_classes() {
    RouteTable routes;
    for (const Access access : {Access::kPublic, Access::kKey, Access::kOperator, Access::kAdmin}) {
      for (const Method method : {Method::kGet, Method::kPost}) {
        routes.add(method, fmt::format("/{}/{{name}}", name_of(access)), access,
                   [](Request, std::shared_ptr<Responder> responder) {
                     responder->send({.body = "served"});
                   });
      }
    }
    return routes;
  }
  int status(std::string_view method, const std::string& path, std::string_view fields) {
    return request(method, path.substr(0, path.find('{')) + "x", fields, "").status;
  }
  static std::string bearer(std::string_view key) {
    return fmt::format("Authorization: Bearer {}\r\n", key);
  }
};

// Enumerates the route table, so that new routes are tested too.
TEST_F(ServerAccess, EveryRouteWithEveryKey) {
  ServerOptions options = test_options();
  options.api_keys = {std::string(kOtherKey), std::string(kApiKey)};
  options.admin_keys = {std::string(kAdminKey)};
  serve(options, routes_of_all_classes());
  ASSERT_EQ(server->routes().routes().size(), 8u);
  for (const Route& route : server->routes().routes()) {
    const auto with = [&](std::string_view fields) {
      return status(name_of(route.method), route.pattern, fields);
    };
    const bool open = route.access == Access::kPublic, keyed = route.access == Access::kKey;
    EXPECT_EQ(with(""), open ? 200 : 401) << route.pattern;
    EXPECT_EQ(with(bearer("wrong")), open ? 200 : 401) << route.pattern;
    EXPECT_EQ(with(bearer(kApiKey)), open || keyed ? 200 : 403) << route.pattern;
    EXPECT_EQ(with(bearer(kOtherKey)), open || keyed ? 200 : 403) << route.pattern;
    EXPECT_EQ(with(bearer(kAdminKey)), 200) << route.pattern;
  }
}

TEST_F(ServerAccess, FormsOfAKey) {
  ServerOptions options = test_options();
  options.api_keys = {std::string(kApiKey)};
  serve(options, routes_of_all_classes());
  const std::string key(kApiKey);
  for (const std::string& good : std::vector<std::string>{
           "Authorization: Bearer " + key, "authorization: bearer " + key,
           "AUTHORIZATION: BEARER   " + key, "X-Api-Key: " + key, "x-api-key: " + key,
           "X-Api-Key: wrong\r\nAuthorization: Bearer " + key,
           "Authorization: Bearer wrong\r\nX-Api-Key: " + key,
           "Authorization: Bearer " + key + "\r\nX-Api-Key: wrong",
           "X-Api-Key: " + key + "\r\nAuthorization: Bearer wrong"}) {
    EXPECT_EQ(status("GET", "/key/x", good + "\r\n"), 200) << good;
  }
  for (const std::string& bad : std::vector<std::string>{
           "Authorization: " + key, "Authorization: Basic " + key, "Authorization: Bearer" + key,
           "Authorization: Bearer " + key + "x", "Authorization: Bearer sk-test-",
           "X-Api-Key:", "Authorization: Bearer ", "X-Api-Key: " + key + ", " + key,
           "Cookie: key=" + key, "X-Api-Key: SK-TEST-1"}) {
    EXPECT_EQ(status("GET", "/key/x", bad + "\r\n"), 401) << bad;
  }
  EXPECT_EQ(get("/key/x?api_key=" + key).status, 401);
}

TEST_F(ServerAccess, RefusalsSayWhatToDo) {
  ServerOptions options = test_options();
  options.api_keys = {std::string(kApiKey)};
  serve(options, routes_of_all_classes());
  const RawResponse missing = get("/key/x");
  EXPECT_EQ(missing.field("WWW-Authenticate"), "Bearer");
  const auto body = parse_json(missing.body, "body");
  EXPECT_EQ(body->at("error").at("type"), "authentication_error");
  EXPECT_EQ(body->at("error").at("code"), "invalid_api_key");
  const RawResponse wrong = get("/key/x", bearer("wrong-key"));
  EXPECT_EQ(wrong.body.find("wrong-key"), std::string::npos);
  // The server refuses without waiting for the body.
  RawClient one = client();
  one.send("POST /key/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(one.read_response().status, 401);
}

TEST_F(ServerAccess, WithoutKeysAdminRoutesAreOff) {
  serve(test_options(), routes_of_all_classes());
  EXPECT_EQ(get("/key/x").status, 200);
  EXPECT_EQ(get("/operator/x").status, 200);
  EXPECT_EQ(get("/admin/x").status, 403);
  EXPECT_EQ(get("/admin/x", bearer("anything")).status, 403);
}

TEST_F(ServerAccess, WithAdminKeysAloneTheRestIsOpen) {
  ServerOptions options = test_options();
  options.admin_keys = {std::string(kAdminKey)};
  serve(options, routes_of_all_classes());
  EXPECT_EQ(get("/key/x").status, 200);
  EXPECT_EQ(get("/operator/x").status, 401);
  EXPECT_EQ(get("/admin/x").status, 401);
  EXPECT_EQ(get("/admin/x", bearer(kAdminKey)).status, 200);
  EXPECT_EQ(get("/operator/x", bearer(kAdminKey)).status, 200);
}

TEST_F(ServerAccess, WithoutAdminKeysOperatorsRoutesAreForAllKeys) {
  ServerOptions options = test_options();
  options.api_keys = {std::string(kApiKey)};
  serve(options, routes_of_all_classes());
  EXPECT_EQ(get("/operator/x").status, 401);
  EXPECT_EQ(get("/operator/x", bearer(kApiKey)).status, 200);
}

// Handlers learn which key the caller presented.
TEST_F(ServerAccess, CallersAreToldApart) {
  ServerOptions options = test_options();
  options.api_keys = {std::string(kOtherKey), std::string(kApiKey)};
  options.admin_keys = {std::string(kAdminKey)};
  RouteTable routes;
  routes.add(Method::kGet, "/who", Access::kKey,
             [this](Request request, std::shared_ptr<Responder> responder) {
               held.put(std::move(request), std::move(responder));
             });
  serve(options, std::move(routes));
  const auto caller = [&](std::string_view fields) {
    RawClient one = client();
    one.send("GET /who HTTP/1.1\r\nHost: x\r\n" + std::string(fields) + "\r\n");
    const Held::Item item = held.take();
    item.responder->send({});
    return item.request.caller;
  };
  const Caller first = caller(bearer(kOtherKey)), second = caller(bearer(kApiKey));
  const Caller admin = caller(bearer(kAdminKey));
  EXPECT_EQ(first.key, 0);
  EXPECT_EQ(second.key, 1);
  EXPECT_EQ(admin.key, 2);
  EXPECT_FALSE(first.is_admin || second.is_admin);
  EXPECT_TRUE(admin.is_admin);
  EXPECT_TRUE(first.may_touch(first) && admin.may_touch(first) && admin.may_touch(second));
  EXPECT_FALSE(first.may_touch(second) || second.may_touch(first) || first.may_touch(admin));
}

TEST_F(ServerAccess, OtherOriginsAreOffUnlessListed) {
  serve(test_options(), routes_of_all_classes());
  const RawResponse response = get("/public/x", "Origin: https://chat.example\r\n");
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.head.find("Access-Control"), std::string::npos);
}

TEST_F(ServerAccess, ListedOriginsMayCall) {
  ServerOptions options = test_options();
  options.cors_origins = {"https://chat.example"};
  options.api_keys = {std::string(kApiKey)};
  serve(options, routes_of_all_classes());
  const RawResponse good = get("/key/x", bearer(kApiKey) + "Origin: https://chat.example\r\n");
  EXPECT_EQ(good.field("Access-Control-Allow-Origin"), "https://chat.example");
  EXPECT_EQ(good.field("Vary"), "Origin");
  // Errors carry the CORS field too, so that the page can read them.
  const RawResponse unauthorized = get("/key/x", "Origin: https://chat.example\r\n");
  EXPECT_EQ(unauthorized.status, 401);
  EXPECT_EQ(unauthorized.field("Access-Control-Allow-Origin"), "https://chat.example");
  EXPECT_EQ(get("/public/x", "Origin: https://evil.example\r\n").head.find("Access-Control"),
            std::string::npos);
  const RawResponse preflight =
      request("OPTIONS", "/key/x",
              "Origin: https://chat.example\r\nAccess-Control-Request-Method: POST\r\n"
              "Access-Control-Request-Headers: authorization, content-type\r\n",
              "");
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.field("Access-Control-Allow-Methods"), "GET, HEAD, POST, OPTIONS");
  EXPECT_EQ(preflight.field("Access-Control-Allow-Headers"), "authorization, content-type");
  EXPECT_EQ(preflight.field("Access-Control-Allow-Origin"), "https://chat.example");
}

TEST_F(ServerAccess, AStarAllowsAllOrigins) {
  ServerOptions options = test_options();
  options.cors_origins = {"*"};
  serve(options, routes_of_all_classes());
  const RawResponse response = get("/public/x", "Origin: https://any.example\r\n");
  EXPECT_EQ(response.field("Access-Control-Allow-Origin"), "*");
  EXPECT_EQ(response.field("Vary"), "");
}

}  // namespace
}  // namespace fathom::http
