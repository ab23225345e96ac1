// The prefix tree over slow copies: they end late, in any order, or fail. A page that a text may
// read always holds that text's rows.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "cache/latent_layout.h"
#include "cache/prefix_tree.h"

namespace fathom {
namespace {

using Room = PrefixTree::Room;

// Pages whose bytes are a number each. A copy's target holds garbage until the copy ends; a failed
// copy writes nothing.
class SlowPages : public PageTransfer {
 public:
  SlowPages(int64_t num_pages, uint32_t seed) : numbers(num_pages, 0), random_(seed) {}
  int64_t page_bytes() const override { return sizeof(uint64_t); }
  void save(int32_t page, std::byte* host, int32_t id) override {
    std::memset(host, 0xA5, sizeof(uint64_t));
    begun_.push_back({id, page, host, true});
  }
  void load(const std::byte* host, int32_t page, int32_t id) override {
    numbers[page] = 0xA5A5;
    begun_.push_back({id, page, const_cast<std::byte*>(host), false});
  }
  void take_ended(std::vector<EndedCopy>& ended, bool wait) override {
    ended.clear();
    while (!begun_.empty() && (random_() % 3 == 0 || (wait && ended.empty()))) {
      const auto it = begun_.begin() + static_cast<std::ptrdiff_t>(random_() % begun_.size());
      const bool ok = !(fail_share > 0 && random_() % fail_share == 0);
      if (ok && it->is_save) std::memcpy(it->host, &numbers[it->page], sizeof(uint64_t));
      if (ok && !it->is_save) std::memcpy(&numbers[it->page], it->host, sizeof(uint64_t));
      ended.push_back({it->id, ok});
      begun_.erase(it);
    }
  }
  std::vector<uint64_t> numbers;
  uint32_t fail_share = 0;  // one of so many fails; 0: none

 private:
  struct Copy {
    int32_t id, page;
    std::byte* host;
    bool is_save;
  };
  std::vector<Copy> begun_;
  std::mt19937 random_;
};

// A sequence's use of a text, a page for each letter, when copies take time.
struct Reader {
  Reader(const PrefixTree& tree, std::string the_letters)
      : letters(std::move(the_letters)), chain(tree.chain(0, "")) {
    for (const char letter : letters) {
      for (int64_t i = 0; i < kPageSize; ++i) tokens.push_back(letter * 1000 + static_cast<int>(i));
    }
    tree.extend(chain, tokens);
  }
  int64_t num_pages() const { return std::ssize(letters); }
  uint64_t number(int64_t page) const {
    return std::hash<std::string>()(letters.substr(0, page + 1));
  }

  // Goes on as far as possible now; returns false if it can never go on.
  bool go_on(PrefixTree& tree, SlowPages& bytes) {
    if (is_loading) {
      if (wants_more) wants_more = tree.take(chain, tokens, num_pages(), pages);
      if (!tree.settle(pages) || wants_more) return true;
      is_loading = false;
      loaded = readable = std::ssize(pages);
    }
    if (readable == num_pages()) return true;
    const Room room = tree.allocate(num_pages() - readable, pages);
    if (room != Room::kNow) return room == Room::kLater;
    for (int64_t i = readable; i < num_pages(); ++i) bytes.numbers[pages[i]] = number(i);
    for (int64_t i = readable; i < num_pages(); ++i) {
      EXPECT_TRUE(tree.insert(chain, tokens, i, pages));
    }
    readable = num_pages();
    return true;
  }

  std::string letters;
  std::vector<int32_t> tokens;
  PrefixChain chain;
  std::vector<int32_t> pages;
  bool is_loading = true, wants_more = true;
  int64_t loaded = 0, readable = 0;  // pages
};

struct Outcome {
  int64_t loaded = 0, returns = 0;
};

Outcome expect_right_pages(std::array<int64_t, 3> room, uint32_t fail_share, uint32_t seed) {
  SCOPED_TRACE(testing::Message() << room[0] << ", " << room[1] << ", " << room[2] << ", failing "
                                  << fail_share << ", seed " << seed);
  std::mt19937 random(seed);
  PagePool pool(room[0]);
  SlowPages bytes(room[0], seed);
  bytes.fail_share = fail_share;
  auto store = std::move(*PageStore::create({.host_bytes = room[1] * bytes.page_bytes(),
                                             .directory = room[2] > 0 ? testing::TempDir() : "",
                                             .disk_bytes = room[2] * bytes.page_bytes()},
                                            bytes));
  PrefixTree tree(pool, true, store.get());
  std::vector<Reader> readers;
  Outcome outcome;
  for (int step = 0; step < 1500; ++step) {
    if (readers.size() < 4 && random() % 2 == 0) {
      std::string letters(1 + random() % 6, 'a');
      for (char& letter : letters) letter = static_cast<char>('a' + random() % 2);
      readers.emplace_back(tree, letters);
    } else if (!readers.empty() && random() % 5 == 0) {  // ends, or is aborted while it loads
      const auto it = readers.begin() + static_cast<std::ptrdiff_t>(random() % readers.size());
      tree.release_all(it->pages);
      readers.erase(it);
    }
    for (size_t i = readers.size(); i > 0; --i) {
      Reader& reader = readers[i - 1];
      const int64_t before = reader.loaded;
      if (!reader.go_on(tree, bytes)) {
        tree.release_all(reader.pages);
        readers.erase(readers.begin() + static_cast<std::ptrdiff_t>(i - 1));
        continue;
      }
      outcome.loaded += reader.loaded - before;
    }
    if (random() % 200 == 0) tree.clear();
    if (random() % 20 == 0) tree.make_room_ahead(2);
    for (const Reader& reader : readers) {
      for (int64_t i = 0; i < reader.readable; ++i) {
        EXPECT_EQ(bytes.numbers[reader.pages[i]], reader.number(i))
            << "page " << i << " of " << reader.letters << " in step " << step;
      }
    }
    tree.check_invariant();
    if (testing::Test::HasFailure()) return outcome;
  }
  for (Reader& reader : readers) tree.release_all(reader.pages);
  while (tree.copies_in_flight() > 0) tree.take_ended(/*wait=*/true);
  EXPECT_EQ(pool.free() + pool.cached(), room[0]);
  EXPECT_EQ(pool.used() + pool.in_transfer(), 0);
  tree.clear();
  tree.check_invariant();
  EXPECT_EQ(pool.free(), room[0]);
  outcome.returns = tree.num_returns();
  return outcome;
}

TEST(PageCopies, LateAndOutOfOrder) {
  for (const std::array<int64_t, 3>& room : {std::array<int64_t, 3>{7, 12, 0},
                                             {7, 0, 30},
                                             {8, 3, 20},
                                             {20, 10, 40},
                                             {6, 1, 1},
                                             {9, 30, 9}}) {
    int64_t returns = 0;
    for (uint32_t seed = 1; seed < 6; ++seed) returns += expect_right_pages(room, 0, seed).returns;
    if (room[1] + room[2] > 2) {
      EXPECT_GT(returns, 50);
    }
  }
}

TEST(PageCopies, ThatFail) {
  for (const std::array<int64_t, 3>& room :
       {std::array<int64_t, 3>{7, 12, 0}, {7, 0, 30}, {8, 3, 20}, {6, 1, 1}}) {
    for (uint32_t seed = 1; seed < 6; ++seed) {
      for (const uint32_t share : {1, 2, 7}) expect_right_pages(room, share, seed);
    }
  }
}

// A page being saved is neither free nor cached, and is not allocated before the copy has ended.
TEST(PageCopies, APageInTransferIsNotHandedOut) {
  PagePool pool(2);
  SlowPages bytes(2, 1);
  auto store = std::move(*PageStore::create({.host_bytes = 4 * bytes.page_bytes()}, bytes));
  PrefixTree tree(pool, true, store.get());
  Reader text(tree, "ab"), other(tree, "xy");
  ASSERT_TRUE(text.go_on(tree, bytes));
  tree.release_all(text.pages);
  EXPECT_EQ(pool.cached(), 2);
  int64_t in_transfer = 0;
  while (tree.allocate(2, other.pages) == Room::kLater) {
    EXPECT_EQ(pool.free() + pool.in_transfer(), 2);
    EXPECT_EQ(pool.used() + pool.cached(), 0);
    EXPECT_EQ(pool.leaving(), pool.in_transfer());
    in_transfer += pool.in_transfer();
  }
  EXPECT_GT(in_transfer, 0) << "or the copies were not late";
  EXPECT_EQ(pool.used(), 2);
  tree.release_all(other.pages);
}

}  // namespace
}  // namespace fathom
