// The prefix tree against a plain list of texts with the times at which they were last held.
#include "cache/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "cache/latent_layout.h"

namespace fathom {
namespace {

constexpr auto kNow = PrefixTree::Room::kNow;

// A text, a page for each letter, and a sequence's use of it.
struct Text {
  Text(const PrefixTree& tree, const std::string& letters, std::string_view salt = "",
       uint64_t scope = 0)
      : chain(tree.chain(scope, salt)) {
    for (const char letter : letters) {
      for (int64_t i = 0; i < kPageSize; ++i) tokens.push_back(letter * 1000 + static_cast<int>(i));
    }
    tree.extend(chain, tokens);
  }
  int64_t num_pages() const { return std::ssize(chain.keys); }

  // Acts as a sequence: takes the cached prefix, computes the rest. Returns the number of pages
  // taken, -1 if the pool is too small.
  int64_t run(PrefixTree& tree) {
    EXPECT_FALSE(tree.take(chain, tokens, num_pages(), pages));
    EXPECT_TRUE(tree.settle(pages));
    const int64_t taken = std::ssize(pages);
    if (tree.allocate(num_pages() - taken, pages) != kNow) {
      tree.release_all(pages);
      return -1;
    }
    for (int64_t i = taken; i < num_pages(); ++i) {
      EXPECT_TRUE(tree.insert(chain, tokens, i, pages));
    }
    return taken;
  }

  std::vector<int32_t> tokens;
  PrefixChain chain;
  std::vector<int32_t> pages;
};

TEST(PrefixTree, FindsTheLongestBeginning) {
  PagePool pool(10);
  PrefixTree tree(pool, true);
  Text first(tree, "abc"), second(tree, "abd"), other(tree, "bbc");
  EXPECT_EQ(first.run(tree), 0);
  tree.release_all(first.pages);
  EXPECT_EQ(pool.cached(), 3);
  EXPECT_EQ(tree.find(second.chain, 3).pages, 2);
  EXPECT_EQ(tree.find(second.chain, 3).unheld, 2);
  EXPECT_EQ(tree.find(second.chain, 1).pages, 1) << "no more than asked for";
  EXPECT_EQ(second.run(tree), 2);
  EXPECT_EQ(tree.find(first.chain, 3).unheld, 1);
  EXPECT_EQ(other.run(tree), 0) << "the same page after another one is another page";
  EXPECT_EQ(pool.used(), 6);
  tree.check_invariant();
  tree.release_all(second.pages);
  tree.release_all(other.pages);
  EXPECT_EQ(pool.cached(), 7);
  tree.clear();
  EXPECT_EQ(pool.free(), 10);
  tree.check_invariant();
}

TEST(PrefixTree, SaltsAndScopesShareNothing) {
  PagePool pool(10);
  PrefixTree tree(pool, true);
  Text plain(tree, "ab");
  plain.run(tree);
  for (Text text : {Text(tree, "ab", "tenant"), Text(tree, "ab", "", 7)}) {
    EXPECT_EQ(text.run(tree), 0);
    EXPECT_EQ(tree.find(text.chain, 2).pages, 2);
    tree.release_all(text.pages);
  }
  EXPECT_EQ(pool.used() + pool.cached(), 6);
  tree.release_all(plain.pages);
  tree.check_invariant();
}

// Every key made equal: only the tokens, the parent and the salt can tell texts apart.
TEST(PrefixTree, EqualKeysAreNoHits) {
  PagePool pool(10);
  PrefixTree tree(pool, true);
  Text held(tree, "ab", "one");
  EXPECT_EQ(held.run(tree), 0);
  Text other_tokens(tree, "cd", "one"), other_salt(tree, "ab", "two"),
      other_parent(tree, "xb", "one");
  other_tokens.chain.keys = other_salt.chain.keys = held.chain.keys;
  other_parent.chain.keys[1] = held.chain.keys[1];
  for (Text* text : {&other_tokens, &other_salt}) {
    EXPECT_EQ(tree.find(text->chain, 2).pages, 2) << "by keys alone";
    EXPECT_FALSE(tree.take(text->chain, text->tokens, 2, text->pages));
    EXPECT_TRUE(text->pages.empty());
    ASSERT_EQ(tree.allocate(2, text->pages), kNow);
    const std::vector<int32_t> own = text->pages;
    EXPECT_FALSE(tree.insert(text->chain, text->tokens, 0, text->pages));
    EXPECT_EQ(text->pages, own);
    tree.release_all(text->pages);
  }
  ASSERT_EQ(tree.allocate(2, other_parent.pages), kNow);
  EXPECT_TRUE(tree.insert(other_parent.chain, other_parent.tokens, 0, other_parent.pages));
  EXPECT_FALSE(tree.insert(other_parent.chain, other_parent.tokens, 1, other_parent.pages));
  tree.release_all(other_parent.pages);
  tree.check_invariant();
}

TEST(PrefixTree, EqualPagesComputedTwiceExistOnce) {
  PagePool pool(10);
  PrefixTree tree(pool, true);
  Text first(tree, "abc"), second(tree, "abc");
  ASSERT_EQ(tree.allocate(3, first.pages), kNow);
  ASSERT_EQ(tree.allocate(3, second.pages), kNow);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(tree.insert(first.chain, first.tokens, i, first.pages));
    EXPECT_TRUE(tree.insert(second.chain, second.tokens, i, second.pages));
  }
  EXPECT_EQ(first.pages, second.pages);
  EXPECT_EQ(pool.used(), 3);
  EXPECT_EQ(pool.free(), 7);
  tree.release_all(first.pages);
  EXPECT_EQ(pool.used(), 3);
  tree.release_all(second.pages);
  tree.check_invariant();
}

TEST(PrefixTree, WithoutRetentionPagesGoWithTheirLastHolder) {
  PagePool pool(10);
  PrefixTree tree(pool, false);
  Text first(tree, "abc"), second(tree, "abd");
  first.run(tree);
  EXPECT_EQ(second.run(tree), 2);
  tree.release_all(first.pages);
  EXPECT_EQ(pool.used(), 3);
  EXPECT_EQ(pool.free(), 7);
  tree.release_all(second.pages);
  EXPECT_EQ(pool.free(), 10);
  EXPECT_EQ(tree.find(first.chain, 3).pages, 0);
  tree.check_invariant();
}

TEST(PrefixTree, KeysAreAnothersInAnotherTree) {
  PagePool pool(1);
  const PrefixTree one(pool, true), two(pool, true);
  EXPECT_NE(Text(one, "a").chain.keys[0], Text(two, "a").chain.keys[0]);
}

// Pages whose bytes are a number each; each text's page has a number of its own. Copies end at
// once.
class NumberedPages : public PageTransfer {
 public:
  explicit NumberedPages(int64_t num_pages) : numbers(static_cast<size_t>(num_pages), 0) {}
  int64_t page_bytes() const override { return sizeof(uint64_t); }
  void save(int32_t page, std::byte* host, int32_t id) override {
    std::memcpy(host, &numbers[page], sizeof(uint64_t));
    ended_.push_back({id, true});
  }
  void load(const std::byte* host, int32_t page, int32_t id) override {
    std::memcpy(&numbers[page], host, sizeof(uint64_t));
    ended_.push_back({id, true});
  }
  void take_ended(std::vector<EndedCopy>& ended, bool) override {
    ended.clear();
    std::swap(ended, ended_);
  }
  bool is_asynchronous() const override { return false; }
  std::vector<uint64_t> numbers;

 private:
  std::vector<EndedCopy> ended_;
};

uint64_t number_of(const std::string& text) { return std::hash<std::string>()(text); }

// The expected state: every prefix of every text (salt and letters) in one of three places of
// limited size, in each ordered by age or by the time it was last held.
class Model {
 public:
  explicit Model(std::array<int64_t, 3> room) : room_(room) {}

  int64_t longest(const std::string& text) const {
    int64_t pages = 0;
    while (pages < std::ssize(text) - 1 && is_here(text.substr(0, pages + 2))) ++pages;
    return pages;
  }
  void hold(const std::string& text) {
    const int64_t found = longest(text);
    for (int64_t i = found; i > 0; --i) {
      const std::string page = text.substr(0, i + 1);
      for (auto& list : lists_) {
        if (std::erase(list, page) > 0) list.push_back(page);
      }
    }
    // Those in the pool first, so that returning pages do not evict them.
    for (int64_t i = 1; i <= found; ++i) {
      const std::string page = text.substr(0, i + 1);
      if (holders_[page] > 0 || std::erase(lists_[0], page) > 0) {
        ++holders_[page];
      } else {
        make_room(0);
        for (auto& list : lists_) std::erase(list, page);
        ++holders_[page];
      }
    }
    for (int64_t i = found + 1; i < std::ssize(text); ++i) {
      make_room(0);
      ++holders_[text.substr(0, i + 1)];
    }
  }
  void release(const std::string& text) {
    for (size_t end = text.size(); end >= 2; --end) {
      const std::string page = text.substr(0, end);
      if (--holders_[page] == 0) lists_[0].push_back(page);
    }
  }
  // What is held or cached anywhere of the texts without a salt.
  std::set<std::string> unsalted() const {
    std::set<std::string> pages;
    for (const auto& [page, holders] : holders_) {
      if (holders > 0) pages.insert(page);
    }
    for (const auto& list : lists_) pages.insert(list.begin(), list.end());
    std::erase_if(pages, [](const std::string& page) { return page.front() != '-'; });
    return pages;
  }
  int64_t held() const {
    return std::count_if(holders_.begin(), holders_.end(), [](const auto& h) { return h.second; });
  }

 private:
  bool is_here(const std::string& page) const {
    const auto held = holders_.find(page);
    return (held != holders_.end() && held->second > 0) ||
           std::any_of(lists_.begin(), lists_.end(), [&](const auto& list) {
             return std::find(list.begin(), list.end(), page) != list.end();
           });
  }
  void make_room(size_t place) {
    if (std::ssize(lists_[place]) + (place == 0 ? held() : 0) < room_[place]) return;
    const std::string oldest = lists_[place].front();
    lists_[place].erase(lists_[place].begin());
    while (++place < 3 && room_[place] == 0) {
    }
    if (place == 3) return;
    make_room(place);
    lists_[place].push_back(oldest);
  }

  std::array<int64_t, 3> room_;
  std::array<std::vector<std::string>, 3> lists_;
  std::map<std::string, int> holders_;
};

// Keeps what a tree says that it has, by text.
class Mirror : public CacheObserver {
 public:
  void stored(const PageKey& key, const PageKey* parent,
              std::span<const int32_t> tokens) noexcept override {
    EXPECT_EQ(std::ssize(tokens), kPageSize);
    EXPECT_FALSE(texts.contains(key.low)) << "told twice";
    EXPECT_TRUE(parent == nullptr || texts.contains(parent->low)) << "before its parent";
    const std::string before = parent == nullptr ? "-" : texts[parent->low];
    texts[key.low] = before + static_cast<char>(tokens.front() / 1000);
  }
  void removed(const PageKey& key) noexcept override { EXPECT_EQ(texts.erase(key.low), 1u); }
  void cleared() noexcept override {
    EXPECT_TRUE(texts.empty());
    ++num_cleared;
  }
  std::set<std::string> all() const {
    std::set<std::string> found;
    for (const auto& [key, text] : texts) found.insert(text);
    return found;
  }

  std::map<uint64_t, std::string> texts;
  int num_cleared = 0;
};

void expect_as_in_the_model(std::array<int64_t, 3> room) {
  SCOPED_TRACE(testing::Message() << room[0] << ", " << room[1] << ", " << room[2]);
  std::mt19937 random(1);
  PagePool pool(room[0]);
  NumberedPages bytes(room[0]);
  std::unique_ptr<PageStore> store;
  if (room[1] + room[2] > 0) {
    store = std::move(*PageStore::create({.host_bytes = room[1] * bytes.page_bytes(),
                                          .directory = room[2] > 0 ? testing::TempDir() : "",
                                          .disk_bytes = room[2] * bytes.page_bytes()},
                                         bytes));
  }
  Mirror mirror;
  PrefixTree tree(pool, true, store.get());
  tree.watch(&mirror);
  Model model(room);
  std::vector<std::pair<std::string, Text>> running;
  int64_t hits = 0;
  const int num_steps = room[2] > 0 ? 600 : 3000;  // files take their time
  for (int step = 0; step < num_steps; ++step) {
    if (running.size() < 4 && random() % 2 == 0) {
      std::string letters(1 + random() % 7, 'a');
      for (char& letter : letters) letter = static_cast<char>('a' + random() % 2);
      const char salt = random() % 4 == 0 ? 't' : '-';
      Text text(tree, letters, salt == '-' ? "" : "t");
      const int64_t expected = model.longest(salt + letters);
      if (std::ssize(letters) > room[0] - model.held()) continue;  // not enough room to run
      ASSERT_EQ(tree.find(text.chain, text.num_pages()).all(), expected);
      ASSERT_EQ(text.run(tree), expected);
      model.hold(salt + letters);
      for (int64_t i = 0; i < text.num_pages(); ++i) {
        uint64_t& number = bytes.numbers[text.pages[i]];
        const uint64_t right = number_of(salt + letters.substr(0, i + 1));
        if (i >= expected) number = right;  // computed
        ASSERT_EQ(number, right) << "page " << i << " of " << letters;
      }
      hits += expected;
      running.emplace_back(salt + letters, std::move(text));
    } else if (!running.empty()) {
      const auto it = running.begin() + static_cast<std::ptrdiff_t>(random() % running.size());
      tree.release_all(it->second.pages);
      model.release(it->first);
      running.erase(it);
    }
    ASSERT_EQ(pool.used(), model.held());
    ASSERT_EQ(mirror.all(), model.unsalted());
    tree.check_invariant();
  }
  EXPECT_GT(hits, num_steps / 8);
  EXPECT_GT(tree.num_evictions(), 20);
  EXPECT_TRUE(!store || tree.num_returns() > num_steps / 20) << tree.num_returns();
  for (auto& [name, text] : running) tree.release_all(text.pages);
  tree.clear();
  tree.check_invariant();
  EXPECT_EQ(pool.free(), room[0]);
  EXPECT_EQ(mirror.num_cleared, 1);
  EXPECT_TRUE(mirror.texts.empty());
}

TEST(PrefixTree, RandomTextsAgainstAModel) {
  for (const int64_t num_pages : {7, 20, 60}) expect_as_in_the_model({num_pages, 0, 0});
}

TEST(PrefixTree, RandomTextsOverHostAndDiskAgainstAModel) {
  expect_as_in_the_model({7, 12, 0});
  expect_as_in_the_model({7, 0, 12});
  expect_as_in_the_model({8, 9, 20});
  expect_as_in_the_model({20, 10, 40});
}

// A tree of 4 pages over 10 files, into which the pages of "abcd" have gone.
struct OnDisk {
  OnDisk() {
    Text text(tree, "abcd"), other(tree, "wxyz");
    text.run(tree);
    for (size_t i = 0; i < 4; ++i) bytes.numbers[text.pages[i]] = 100 + i;
    tree.release_all(text.pages);
    other.run(tree);
    tree.release_all(other.pages);
    EXPECT_EQ(tree.num_stored(), 4);
  }
  // Pages of "abcd" that are loaded again.
  int64_t come_back() {
    Text text(tree, "abcd");
    EXPECT_FALSE(tree.take(text.chain, text.tokens, 4, text.pages));
    EXPECT_TRUE(tree.settle(text.pages));
    const int64_t taken = std::ssize(text.pages);
    for (int64_t i = 0; i < taken; ++i) {
      EXPECT_EQ(bytes.numbers[text.pages[i]], static_cast<uint64_t>(100 + i));
    }
    tree.check_invariant();
    if (taken < 4) {
      // The rest is computed again, and the pages below it are valid again.
      EXPECT_EQ(tree.allocate(1, text.pages), kNow);
      EXPECT_TRUE(tree.insert(text.chain, text.tokens, taken, text.pages));
      tree.check_invariant();
      bytes.numbers[text.pages[taken]] = static_cast<uint64_t>(100 + taken);
    }
    tree.release_all(text.pages);
    return taken;
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(store->directory())) {
      paths.push_back(entry.path());
    }
    return paths;
  }

  PagePool pool{4};
  NumberedPages bytes{4};
  std::unique_ptr<PageStore> store = std::move(*PageStore::create(
      {.directory = testing::TempDir(), .disk_bytes = 10 * bytes.page_bytes()}, bytes));
  PrefixTree tree{pool, true, store.get()};
};

TEST(PrefixTree, OnlyPagesInThePoolAreCountedAsUnheld) {
  OnDisk disk;
  Text text(disk.tree, "abcd"), beginning(disk.tree, "ab");
  const auto expect = [&](int64_t pages, int64_t unheld, int64_t stored) {
    const PrefixTree::Found found = disk.tree.find(text.chain, 4);
    EXPECT_EQ(found.pages, pages);
    EXPECT_EQ(found.unheld, unheld);
    EXPECT_EQ(found.stored, stored);
  };
  expect(0, 0, 4);
  EXPECT_EQ(beginning.run(disk.tree), 2) << "comes back from the files";
  expect(2, 0, 2);
  disk.tree.release_all(beginning.pages);
  expect(2, 2, 2);
}

TEST(PrefixTree, DamagedFilesAreMisses) {
  EXPECT_EQ(OnDisk().come_back(), 4);
  const auto damage = [](auto change) {
    OnDisk disk;
    for (const auto& file : disk.files()) change(file);
    EXPECT_EQ(disk.come_back(), 0);
    EXPECT_EQ(disk.come_back(), 1) << "what has been computed again";
  };
  damage([](const auto& file) { std::filesystem::remove(file); });
  damage([](const auto& file) { std::filesystem::resize_file(file, 20); });
  damage([](const auto& file) { std::filesystem::resize_file(file, 0); });
  damage([](const auto& file) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(17);
    stream.put('x');
  });
  OnDisk exchanged;
  const auto files = exchanged.files();
  std::filesystem::rename(files[0], files[1]);
  EXPECT_LT(exchanged.come_back(), 4) << "a whole file in another's place";
}

TEST(PrefixTree, ADirectoryThatTakesNoMoreIsNoError) {
  OnDisk disk;
  std::filesystem::remove_all(disk.store->directory());
  Text text(disk.tree, "opqr");
  EXPECT_EQ(text.run(disk.tree), 0) << "what it pushes out is lost";
  disk.tree.release_all(text.pages);
  disk.tree.check_invariant();
  EXPECT_EQ(disk.come_back(), 0);
  EXPECT_EQ(disk.come_back(), 1);
}

// Pool, host memory and files of two pages each. No file can be written, so a page that leaves host
// memory has no rows any more, and a text that ends with it takes no room for it.
TEST(PrefixTree, APageThatCouldNotBeWrittenTakesNoRoom) {
  PagePool pool(2);
  NumberedPages bytes(2);
  const auto store = std::move(*PageStore::create({.host_bytes = 2 * bytes.page_bytes(),
                                                   .directory = testing::TempDir(),
                                                   .disk_bytes = 2 * bytes.page_bytes()},
                                                  bytes));
  PrefixTree tree(pool, true, store.get());
  std::filesystem::remove_all(store->directory());
  Text lost(tree, "a");
  for (const char* const letters : {"a", "b", "c", "d", "e"}) {
    Text text(tree, letters);
    EXPECT_EQ(text.run(tree), 0);
    tree.release_all(text.pages);
  }
  EXPECT_EQ(tree.num_stored(), 3);
  EXPECT_EQ(tree.find(lost.chain, 1).stored, 1) << "its node is still there";
  const int64_t evictions = tree.num_evictions();
  EXPECT_FALSE(tree.take(lost.chain, lost.tokens, 1, lost.pages));
  EXPECT_TRUE(lost.pages.empty());
  EXPECT_EQ(tree.num_evictions(), evictions);
  EXPECT_EQ(pool.cached(), 2);
  tree.check_invariant();
}

TEST(PageTransfer, MovesAllLayersOfAPage) {
  const auto cache = LatentCache::allocate({CacheFormat::kBF16, 16, 4}, 3, 4);
  ASSERT_TRUE(cache);
  LatentPageTransfer transfer(*cache);
  const int64_t layer_bytes = cache->layout().page_bytes();
  EXPECT_EQ(transfer.page_bytes(), 3 * layer_bytes);
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (int64_t page = 0; page < 4; ++page) {
      std::memset(cache->layer(layer).row(page, 0), static_cast<int>(10 * layer + page),
                  static_cast<size_t>(layer_bytes));
    }
  }
  std::vector<std::byte> host(static_cast<size_t>(transfer.page_bytes()));
  std::vector<EndedCopy> ended;
  transfer.save(2, host.data(), 7);
  transfer.load(host.data(), 1, 8);
  transfer.take_ended(ended, false);
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_TRUE(ended[0].id == 7 && ended[0].ok && ended[1].id == 8 && ended[1].ok);
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (const auto& [page, from] : {std::pair<int64_t, int64_t>{0, 0}, {1, 2}, {2, 2}, {3, 3}}) {
      for (const int64_t slot : {0, 63}) {
        EXPECT_EQ(*cache->layer(layer).row(page, slot), std::byte(10 * layer + from));
      }
    }
  }
}

// An index key left behind would change nothing below the sparse threshold and everything above.
TEST(PageTransfer, MovesIndexKeysAndStateWithThePage) {
  const auto cache = LatentCache::allocate({CacheFormat::kBF16, 16, 4}, 2, 3, 40,
                                           IndexKeyLayout{IndexKeyFormat::kE4M3, 32});
  ASSERT_TRUE(cache);
  LatentPageTransfer transfer(*cache);
  const auto bytes = static_cast<size_t>(transfer.page_bytes());
  for (int page = 0; page < 3; ++page) std::memset(cache->page(page), 100 + page, bytes);
  std::vector<std::byte> host(bytes);
  std::vector<EndedCopy> ended;
  transfer.save(2, host.data(), 7);
  transfer.load(host.data(), 0, 8);
  transfer.take_ended(ended, false);
  for (const auto& [page, from] : {std::pair{0, 2}, {1, 1}, {2, 2}}) {
    for (int layer = 0; layer < 2; ++layer) {
      for (const int slot : {0, 63}) {
        EXPECT_EQ(*cache->index_keys(layer).row(page, slot), std::byte(100 + from));
        EXPECT_EQ(cache->index_keys(layer).row(page, slot)[35], std::byte(100 + from));
      }
    }
    EXPECT_EQ(cache->state(page)[39], std::byte(100 + from));
  }
}

TEST(PrefixTreeDeathTest, MistakesOfOursAreFatal) {
  PagePool pool(4);
  PrefixTree tree(pool, true);
  Text text(tree, "ab");
  ASSERT_EQ(tree.allocate(2, text.pages), kNow);
  EXPECT_DEATH(tree.insert(text.chain, text.tokens, 1, text.pages), "before page 0");
}

}  // namespace
}  // namespace fathom
