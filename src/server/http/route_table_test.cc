#include "server/http/route_table.h"

#include <gtest/gtest.h>

#include <type_traits>

namespace fathom::http {
namespace {

void nothing(Request, std::shared_ptr<Responder>) {}

// A route without an access class does not compile.
template <typename Table>
concept AddsWithoutAccess = requires(Table table) {
  table.add(Method::kGet, std::string("/"), &nothing);
};
static_assert(!AddsWithoutAccess<RouteTable>);

std::string pattern_of(const RouteTable::Match& match) {
  return match.route == nullptr ? "none" : match.route->pattern;
}

TEST(RouteTable, PrefersTheMoreExact) {
  RouteTable table;
  for (const char* pattern : {"/a/{rest...}", "/a/{one}", "/a/b", "/{one}/b", "/"}) {
    table.add(Method::kGet, pattern, Access::kPublic, nothing);
  }
  EXPECT_EQ(pattern_of(table.find("GET", {"a", "b"})), "/a/b");
  EXPECT_EQ(pattern_of(table.find("GET", {"a", "c"})), "/a/{one}");
  EXPECT_EQ(pattern_of(table.find("GET", {"a", "c", "d"})), "/a/{rest...}");
  EXPECT_EQ(pattern_of(table.find("GET", {"c", "b"})), "/{one}/b");
  EXPECT_EQ(pattern_of(table.find("GET", {""})), "/");
  EXPECT_EQ(pattern_of(table.find("GET", {"a"})), "none");
  EXPECT_EQ(pattern_of(table.find("GET", {"a", ""})), "none");
  EXPECT_EQ(table.find("GET", {"a", "c", "d"}).path_parameters.at(0).value, "c/d");
  EXPECT_EQ(table.find("GET", {"a", "c/d"}).path_parameters.at(0).name, "one");
}

TEST(RouteTable, TellsMethodsApart) {
  RouteTable table;
  table.add(Method::kGet, "/a", Access::kPublic, nothing);
  table.add(Method::kPost, "/a", Access::kKey, nothing);
  table.add(Method::kDelete, "/{x}", Access::kAdmin, nothing);
  EXPECT_EQ(table.find("POST", {"a"}).route->access, Access::kKey);
  EXPECT_EQ(table.find("HEAD", {"a"}).route->method, Method::kGet);
  EXPECT_EQ(table.find("DELETE", {"a"}).route->access, Access::kAdmin);
  const RouteTable::Match put = table.find("PUT", {"a"});
  EXPECT_EQ(put.route, nullptr);
  EXPECT_EQ(put.allowed, (std::vector{Method::kGet, Method::kPost, Method::kDelete}));
  EXPECT_TRUE(table.find("get", {"a"}).route == nullptr);
  EXPECT_TRUE(table.find("GET", {"b", "c"}).allowed.empty());
}

TEST(RouteTableDeathTest, TakesNoRouteThatIsWrong) {
  RouteTable table;
  table.add(Method::kGet, "/a", Access::kPublic, nothing);
  const auto add = [&](const char* pattern) {
    table.add(Method::kGet, pattern, Access::kPublic, nothing);
  };
  EXPECT_DEATH(add("/a"), "twice");
  EXPECT_DEATH(add("a"), "slash");
  EXPECT_DEATH(add("/{}"), "not");
  EXPECT_DEATH(add("/{a"), "not");
  EXPECT_DEATH(add("/a}"), "brace");
  EXPECT_DEATH(add("/{a...}/b"), "last");
  EXPECT_DEATH(table.add(Method::kGet, "/b", Access::kPublic, nullptr), "no handler");
}

}  // namespace
}  // namespace fathom::http
