#include "server/http/target.h"

#include <gtest/gtest.h>

namespace fathom::http {
namespace {

using Segments = std::vector<std::string>;

TEST(Target, SplitsBeforeItDecodes) {
  const auto target = parse_target("/v1/models/org%2Fname%20x?a=1%262&b+c=%2B");
  ASSERT_TRUE(target) << target.error().message;
  EXPECT_EQ(target->path, "/v1/models/org%2Fname%20x");
  EXPECT_EQ(target->segments, (Segments{"v1", "models", "org/name x"}));
  ASSERT_EQ(target->query.size(), 2u);
  EXPECT_EQ(target->query[0].value, "1&2");
  EXPECT_EQ(target->query[1].name, "b c");
  EXPECT_EQ(target->query[1].value, "+");
}

TEST(Target, KnowsItsForms) {
  EXPECT_EQ(parse_target("/")->segments, Segments{""});
  EXPECT_EQ(parse_target("//a/")->segments, (Segments{"", "a", ""}));
  EXPECT_EQ(parse_target("*")->path, "*");
  EXPECT_TRUE(parse_target("*")->segments.empty());
  EXPECT_EQ(parse_target("http://host:1")->path, "/");
  EXPECT_EQ(parse_target("HTTPS://host/a?b")->path, "/a");
  EXPECT_EQ(parse_target("http://host?b=c")->path, "/");
  EXPECT_EQ(parse_target("http://host?b=c")->query.at(0).value, "c");
  EXPECT_EQ(parse_target("/http://x/y")->segments, (Segments{"http:", "", "x", "y"}));
  EXPECT_EQ(parse_target("/a+b")->segments, Segments{"a+b"});
  EXPECT_TRUE(parse_target("/?&&a&=b")->query.size() == 2);
}

TEST(Target, RefusesWhatItCannotMean) {
  for (const char* bad :
       {"",          "a",          "?a",      "ftp://host/a", "http:///a", "http://",
        "/%",        "/%4",        "/%4g",    "/%00",         "/%0a",      "/%7f",
        "/%ff",      "/%c0%ae",    "/.",      "/..",          "/a/../b",   "/%2e%2e/b",
        "/a b",      "/a\tb",      "/a#b",    "/a\"",         "/{a}",      "/a\\b",
        "/\xC3\xA4", "/?a=%0d%0a", "/?a=%ff", "/?%",          "**"}) {
    const auto target = parse_target(bad);
    ASSERT_FALSE(target) << bad;
    EXPECT_EQ(target.error().code, Code::kInvalidArgument);
    EXPECT_TRUE(target.error().message.starts_with("the request target ")) << bad;
  }
  EXPECT_TRUE(parse_target("/...") && parse_target("/.a") && parse_target("/%C3%A4"));
}

TEST(Target, BoundsTheQuery) {
  std::string text = "/?";
  for (int i = 0; i < kMaxQueryParameters; ++i) text += "a&";
  EXPECT_EQ(std::ssize(parse_target(text)->query), kMaxQueryParameters);
  EXPECT_FALSE(parse_target(text + "a"));
}

}  // namespace
}  // namespace fathom::http
