// The embedded page is the repository's file, small, and within the policy that it is sent under.
// That browsers accept the policy's hashes is what tests/page proves.
#include "server/page/page.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>

namespace fathom {
namespace {

std::string markup() {
  const std::string page(page_html());
  const size_t script = page.find("<script>");
  return page.substr(0, script) + page.substr(page.find("</script>", script));
}

TEST(Page, IsTheFileByteForByte) {
  std::ifstream file(FATHOM_SOURCE_DIR "/web/index.html", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  ASSERT_FALSE(text.empty());
  EXPECT_EQ(page_html(), text);
}

TEST(Page, IsSmall) { EXPECT_LT(page_html().size(), 100'000u); }

TEST(Page, LoadsNothingFromElsewhere) {
  for (const std::regex& forbidden :
       {std::regex("<link[^>]*href=\"(?!data:)"), std::regex("<(img|iframe|object|embed|base)\\b"),
        std::regex("\\bsrc="), std::regex("url\\("), std::regex("@import")}) {
    EXPECT_FALSE(std::regex_search(markup(), forbidden));
  }
}

TEST(Page, HasNothingThatThePolicyWouldRefuse) {
  EXPECT_FALSE(std::regex_search(markup(), std::regex("<[a-z][^>]*\\s(on[a-z]+|style)=")));
  for (const char* forbidden : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                                "eval(", "new Function", "setAttribute('style'"}) {
    EXPECT_EQ(page_html().find(forbidden), std::string_view::npos) << forbidden;
  }
}

TEST(Page, PolicyNamesTheScriptAndTheStyleByHash) {
  EXPECT_TRUE(std::regex_match(
      std::string(page_csp()),
      std::regex("default-src 'none'; script-src 'sha256-[A-Za-z0-9+/]{43}='; style-src "
                 "'sha256-[A-Za-z0-9+/]{43}='; connect-src 'self'; img-src data:; base-uri "
                 "'none'; form-action 'none'; frame-ancestors 'none'")))
      << page_csp();
}

}  // namespace
}  // namespace fathom
