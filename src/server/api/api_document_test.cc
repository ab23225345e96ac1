// The document against the routes of a real server.
#include "server/api/api_document.h"

#include <gtest/gtest.h>

#include <cctype>
#include <map>

#include "server/api/api_server.h"

namespace fathom {
namespace {

// Returns the document's path for a pattern: "/v1/models/{id}" for "/v1/models/{id...}".
std::string documented_path(std::string pattern) {
  if (const size_t rest = pattern.find("...}"); rest != std::string::npos) pattern.erase(rest, 3);
  return pattern;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::unique_ptr<ApiServer> some_server() {
  ApiOptions options;
  options.http.port = 0;
  auto server = ApiServer::create(std::move(options));
  EXPECT_TRUE(server) << server.error().message;
  return std::move(*server);
}

TEST(ApiDocument, HasEveryRouteAndNoOther) {
  const auto server = some_server();
  std::map<std::pair<std::string, std::string>, bool> routes, operations;  // value: needs a key
  for (const http::Route& route : server->routes().routes()) {
    routes[{lower(http::name_of(route.method)), documented_path(route.pattern)}] =
        route.access != http::Access::kPublic;
  }
  const json::object document = api_document("1.2.3", RequestLimits(), true);
  for (const auto& [path, methods] : document.at("paths").as_object()) {
    for (const auto& [method, operation] : methods.as_object()) {
      operations[{std::string(method), std::string(path)}] =
          !operation.as_object().contains("security");
    }
  }
  EXPECT_EQ(operations, routes);
  EXPECT_GT(routes.size(), 25u);
}

// A page can send anything but JSON without a preflight. Enumerates the routes, so that new ones
// are tested too.
TEST(ApiServer, EveryRouteThatTakesABodyWantsJson) {
  const auto server = some_server();
  int64_t wanting = 0;
  for (const http::Route& route : server->routes().routes()) {
    const bool is_missing =
        std::any_of(std::begin(kMissingEndpoints), std::end(kMissingEndpoints),
                    [&](const MissingEndpoint& one) { return one.path == route.pattern; });
    const bool expected = route.method != http::Method::kGet && !is_missing;
    EXPECT_EQ(route.options.wants_json, expected) << route.pattern;
    wanting += expected ? 1 : 0;
  }
  EXPECT_GE(wanting, 10);
}

TEST(ApiDocument, SaysWhatEveryOperationAnswers) {
  const json::object document = api_document("1.2.3", RequestLimits(), true);
  const json::object& schemas = document.at("components").at("schemas").as_object();
  for (const auto& [path, methods] : document.at("paths").as_object()) {
    for (const auto& [method, operation] : methods.as_object()) {
      const json::object& replies = operation.at("responses").as_object();
      EXPECT_TRUE(replies.contains("200") || replies.contains("404")) << path;
      EXPECT_TRUE(replies.contains("503")) << path;
      EXPECT_EQ(replies.contains("401"), !operation.as_object().contains("security")) << path;
      for (const auto& [status, reply] : replies) {
        for (const auto& [type, content] : reply.at("content").as_object()) {
          const json::object& schema = content.at("schema").as_object();
          ASSERT_FALSE(schema.empty()) << path << " " << status;
          const json::value* reference = schema.if_contains("$ref");
          if (reference == nullptr) continue;
          const std::string target(reference->as_string());
          EXPECT_TRUE(schemas.contains(target.substr(target.rfind('/') + 1))) << target;
        }
      }
    }
  }
}

TEST(ApiDocument, AsksForAKeyOnlyWhereTheServerDoes) {
  EXPECT_TRUE(api_document("1", RequestLimits(), true).contains("security"));
  EXPECT_FALSE(api_document("1", RequestLimits(), false).contains("security"));
}

}  // namespace
}  // namespace fathom
