#include "router/text_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace fathom::router {
namespace {

std::map<int64_t, int64_t> matches(TextTree& tree, std::string_view text) {
  std::map<int64_t, int64_t> found;
  for (const auto& match : tree.match(text)) found[match.holder] = match.bytes;
  return found;
}
using Found = std::map<int64_t, int64_t>;

TEST(TextTree, FindsEachHoldersLongestPrefix) {
  TextTree tree(1 << 20);
  tree.insert("the quick fox", 1);
  tree.insert("the quiet cat", 2);
  tree.insert("the", 3);
  EXPECT_EQ(matches(tree, "the quick dog"), (Found{{1, 10}, {2, 7}, {3, 3}}));
  EXPECT_EQ(matches(tree, "th"), (Found{{1, 2}, {2, 2}, {3, 2}}));
  EXPECT_EQ(matches(tree, "a"), Found());
  EXPECT_EQ(matches(tree, ""), Found());
  tree.forget(1);
  EXPECT_EQ(matches(tree, "the quick dog"), (Found{{2, 7}, {3, 3}}));
}

TEST(TextTree, EqualsAListOfTextsWhileNothingIsEvicted) {
  std::mt19937 random(7);
  TextTree tree(64 << 20);
  std::vector<std::pair<int64_t, std::string>> texts;
  const auto text = [&] {
    std::string made(random() % 12, 'a');
    for (char& c : made) c = static_cast<char>('a' + random() % 3);
    return made;
  };
  for (int i = 0; i < 4000; ++i) {
    if (random() % 50 == 0) {
      const auto gone = static_cast<int64_t>(random() % 4);
      tree.forget(gone);
      std::erase_if(texts, [&](const auto& entry) { return entry.first == gone; });
    }
    texts.emplace_back(random() % 4, text());
    tree.insert(texts.back().second, texts.back().first);
    const std::string asked = text();
    Found expected;
    for (const auto& [holder, known] : texts) {
      const auto common = std::mismatch(known.begin(), known.end(), asked.begin(), asked.end());
      const int64_t bytes = common.first - known.begin();
      if (bytes > 0) expected[holder] = std::max(expected[holder], bytes);
    }
    ASSERT_EQ(matches(tree, asked), expected) << i << " " << asked;
  }
  for (int64_t holder = 0; holder < 4; ++holder) tree.forget(holder);
  EXPECT_EQ(tree.bytes(), 0);
  EXPECT_EQ(tree.nodes(), 0);
}

TEST(TextTree, EvictsTheLeastRecentlyUsedLeaves) {
  TextTree tree(16 << 10);
  const std::string shared(1000, 's');
  tree.insert(shared + "kept" + std::string(500, 'k'), 1);
  for (int i = 0; i < 1000; ++i) {
    tree.insert(std::to_string(i) + std::string(400, 'x'), 2);
    EXPECT_EQ(matches(tree, shared + "kept"), (Found{{1, 1004}}));
    ASSERT_LE(tree.bytes(), 16 << 10);
  }
  EXPECT_GT(tree.evictions(), 900);
  EXPECT_EQ(matches(tree, "0" + std::string(400, 'x')), Found());
  EXPECT_EQ(matches(tree, "999" + std::string(400, 'x')), (Found{{2, 403}}));
}

TEST(TextTree, ATextLongerThanTheBoundIsCut) {
  TextTree tree(16 << 10);
  tree.insert(std::string(1 << 20, 'x'), 1);
  EXPECT_LE(tree.bytes(), 16 << 10);
  EXPECT_GT(matches(tree, std::string(1 << 20, 'x'))[1], 1000);
}

}  // namespace
}  // namespace fathom::router
