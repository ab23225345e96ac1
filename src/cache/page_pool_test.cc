#include "cache/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>

namespace fathom {
namespace {

TEST(PagePool, HandsOutEveryPageOnce) {
  PagePool pool(5);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(3, pages));
  EXPECT_FALSE(pool.allocate(3, pages)) << "only two are left";
  EXPECT_EQ(pages.size(), 3u) << "a failed allocation changes nothing";
  ASSERT_TRUE(pool.allocate(2, pages));
  EXPECT_EQ(pool.free(), 0);
  std::sort(pages.begin(), pages.end());
  EXPECT_EQ(pages, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  for (const int32_t page : pages) pool.release(page);
  EXPECT_EQ(pool.free(), 5);
  pool.check_invariant();
}

TEST(PagePool, SharedPageIsFreeAfterItsLastHolder) {
  PagePool pool(1);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(1, pages));
  pool.share(0);
  pool.release(0);
  EXPECT_EQ(pool.used(), 1);
  pool.release(0);
  EXPECT_EQ(pool.used(), 0);
  pool.check_invariant();
}

TEST(PagePool, KeptPageIsCachedAfterItsLastHolderUntilItIsDropped) {
  PagePool pool(2);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(1, pages));
  pool.keep(pages[0]);
  pool.release(pages[0]);
  EXPECT_EQ(pool.used(), 0);
  EXPECT_EQ(pool.cached(), 1);
  EXPECT_EQ(pool.free(), 1);
  pool.share(pages[0]);
  EXPECT_EQ(pool.cached(), 0);
  pool.drop(pages[0]);
  EXPECT_EQ(pool.used(), 1) << "it is still held";
  pool.release(pages[0]);
  EXPECT_EQ(pool.free(), 2);
  pool.check_invariant();
}

TEST(PagePool, APageInTransferIsNothingElse) {
  PagePool pool(2);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(2, pages));
  // A page is filled while it is held, no longer held, or held again.
  pool.begin_transfer(pages[0]);
  EXPECT_EQ(pool.used(), 1);
  EXPECT_EQ(pool.in_transfer(), 1);
  EXPECT_EQ(pool.leaving(), 0);
  pool.release(pages[0]);
  EXPECT_EQ(pool.leaving(), 1);
  EXPECT_EQ(pool.free(), 0) << "the copy still writes it";
  pool.check_invariant();
  pool.share(pages[0]);
  EXPECT_EQ(pool.leaving(), 0);
  pool.end_transfer(pages[0]);
  EXPECT_EQ(pool.used(), 2);
  // The other page is kept, evicted, and free after it has been saved.
  pool.keep(pages[1]);
  pool.release(pages[1]);
  pool.begin_transfer(pages[1]);
  EXPECT_EQ(pool.cached(), 0);
  EXPECT_EQ(pool.leaving(), 1);
  pool.check_invariant();
  std::vector<int32_t> more;
  EXPECT_FALSE(pool.allocate(1, more));
  pool.end_transfer(pages[1]);
  EXPECT_EQ(pool.free(), 1);
  pool.release(pages[0]);
  EXPECT_EQ(pool.free(), 2);
  pool.check_invariant();
}

TEST(PagePool, AQuarantinedPageIsNothingElse) {
  PagePool pool(3);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(2, pages));
  for (const int32_t page : pages) pool.begin_quarantine(page);
  EXPECT_EQ(pool.used(), 0);
  EXPECT_EQ(pool.quarantined(), 2);
  EXPECT_TRUE(pool.is_quarantined(pages[0]));
  pool.check_invariant();
  // One ends before its holder goes, the other after.
  pool.end_quarantine(pages[0]);
  EXPECT_EQ(pool.used(), 1);
  pool.release(pages[0]);
  EXPECT_EQ(pool.free(), 2);
  pool.release(pages[1]);
  EXPECT_EQ(pool.free(), 2) << "a sender may still write it";
  EXPECT_EQ(pool.quarantined(), 1);
  pool.check_invariant();
  std::vector<int32_t> more;
  EXPECT_FALSE(pool.allocate(3, more));
  pool.end_quarantine(pages[1]);
  EXPECT_EQ(pool.free(), 3);
  pool.check_invariant();
}

TEST(PagePool, RandomUseAgainstAMap) {
  std::mt19937 random(1);
  PagePool pool(40);
  std::map<int32_t, int> held;
  for (int step = 0; step < 20'000; ++step) {
    const int action = static_cast<int>(random() % 3);
    if (action == 0) {
      std::vector<int32_t> pages;
      const auto count = static_cast<int64_t>(random() % 6);
      const bool fits = count <= 40 - static_cast<int64_t>(held.size());
      ASSERT_EQ(pool.allocate(count, pages), fits);
      for (const int32_t page : pages) ASSERT_TRUE(held.emplace(page, 1).second);
    } else if (!held.empty()) {
      auto it = std::next(held.begin(), static_cast<int64_t>(random() % held.size()));
      if (action == 1) {
        pool.share(it->first);
        ++it->second;
      } else {
        pool.release(it->first);
        if (--it->second == 0) held.erase(it);
      }
    }
    ASSERT_EQ(pool.used(), static_cast<int64_t>(held.size()));
  }
  for (const auto& [page, holders] : held) EXPECT_EQ(pool.holders(page), holders);
  pool.check_invariant();
}

TEST(PagePoolDeathTest, MistakesOfOursAreFatal) {
  PagePool pool(2);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(1, pages));
  EXPECT_DEATH(pool.release(1 - pages[0]), "released once too often");
  EXPECT_DEATH(pool.share(1 - pages[0]), "cannot be shared");
  EXPECT_DEATH(pool.release(7), "page 7 of 2");
  EXPECT_DEATH(pool.keep(1 - pages[0]), "cannot be kept");
  EXPECT_DEATH(pool.drop(pages[0]), "was not kept");
  EXPECT_DEATH(pool.begin_transfer(1 - pages[0]), "cannot be copied");
  EXPECT_DEATH(pool.end_transfer(pages[0]), "is not in transfer");
  EXPECT_DEATH(pool.begin_quarantine(1 - pages[0]), "cannot be quarantined");
  EXPECT_DEATH(pool.end_quarantine(pages[0]), "is not quarantined");
  pool.begin_quarantine(pages[0]);
  EXPECT_DEATH(pool.share(pages[0]), "cannot be shared");
  EXPECT_DEATH(pool.keep(pages[0]), "cannot be kept");
  EXPECT_DEATH(pool.begin_transfer(pages[0]), "cannot be copied");
}

}  // namespace
}  // namespace fathom
