// The embedded page equals the repository's file, is small and conforms to its policy. tests/page
// proves that browsers accept the policy's hashes.
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

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Returns the page without KaTeX.
std::string own_text() { return read(FATHOM_SOURCE_DIR "/web/index.html"); }

TEST(Page, IsTheFileByteForByteWithKatexInItsPlace) {
  constexpr std::string_view kMarker = "/*{KaTeX}*/";
  const std::string text = own_text();
  const size_t at = text.find(kMarker);
  ASSERT_NE(at, std::string::npos);
  const std::string katex = FATHOM_KATEX;
  if (katex.empty()) {
    EXPECT_EQ(page_html(), text);
    return;
  }
  const std::string before = text.substr(0, at), behind = text.substr(at + kMarker.size());
  ASSERT_GT(page_html().size(), text.size());
  EXPECT_TRUE(page_html().starts_with(before));
  EXPECT_TRUE(page_html().ends_with(behind));
  const std::string_view embedded =
      page_html().substr(before.size(), page_html().size() - before.size() - behind.size());
  std::string library = read(katex);
  while (!library.empty() && library.back() == '\n') library.pop_back();
  EXPECT_NE(embedded.find("MIT licence"), std::string_view::npos);
  EXPECT_NE(embedded.find(library), std::string_view::npos);
}

TEST(Page, IsSmall) {
  EXPECT_LT(own_text().size(), 130'000u);
  EXPECT_LT(page_html().size(), 400'000u);
}

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
    EXPECT_EQ(own_text().find(forbidden), std::string::npos) << forbidden;
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
