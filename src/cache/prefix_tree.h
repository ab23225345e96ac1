// Full pages by the text that leads to them, so that a sequence takes what an earlier one computed.
//
// A radix tree whose edges are pages: a node is one page of text, its parent the page before it,
// and the path from the root spells all tokens up to its end. Equal pages exist once.
//
// A node's rows are in a page of the pool; when the pool runs out, those that nobody holds go to
// the page store, to host memory and from there to files, or are forgotten where there is none.
// Each of these places gives up first what was last held longest ago. A sequence holds its pages
// from the root on and lets go of them from the end, so in each place a page goes before its
// parent, and the first of a list always is the one to go: O(1). A page is never in a higher place
// than its parent.
//
// Owns which rows are worth keeping and where they are, not the holders' lists of pages. The
// scheduler takes and returns all pages through it. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/page_pool.h"
#include "cache/page_store.h"
#include "cache/prefix_key.h"

namespace fathom {

// The keys of one text's full pages, worked out as far as they were needed. Texts share pages if
// scope and salt are equal: a tenant's secret, or one request's number.
struct PrefixChain {
  uint64_t scope = 0;
  std::string salt;
  PageKey root;
  std::vector<PageKey> keys;
};

class PrefixTree {
 public:
  // retain: pages stay when nobody holds them; otherwise they are shared while somebody does. The
  // store, where there is one, needs retain.
  PrefixTree(PagePool& pool, bool retain, PageStore* store = nullptr);

  PrefixChain chain(uint64_t scope, std::string_view salt) const;

  // Keys for all full pages of `tokens`, of which those that have keys already are unchanged.
  void extend(PrefixChain& chain, std::span<const int32_t> tokens) const;

  // How many of the chain's first `max_pages` pages are in the pool, by their keys alone, how many
  // of those nobody holds, and how many more are in the store. O(log max_pages).
  struct Found {
    int64_t pages = 0;
    int64_t unheld = 0;
    int64_t stored = 0;

    int64_t all() const { return pages + stored; }
  };
  Found find(const PrefixChain& chain, int64_t max_pages) const;

  // Holds the longest beginning of the text that is here, at most max_pages, and appends it to the
  // (empty) list; what is in the store comes back into pages that must be available. Tokens are
  // compared, not only keys. The number of pages taken.
  int64_t take(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t max_pages,
               std::vector<int32_t>& pages);

  // Page `index` of the text has been computed and pages[index] is held; pages[0 … index) are in
  // the tree. If an equal page is here, it is held instead and the computed one released. False,
  // and nothing changed, if another text has the same key: nothing of this text may be inserted
  // then.
  bool insert(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t index,
              std::vector<int32_t>& pages);

  // Pages that allocate() can hand out: free ones, and those that nobody holds.
  int64_t available() const { return pool_->free() + pool_->cached(); }

  // Appends `count` pages, each held once; false, and nothing changed, if fewer are available.
  bool allocate(int64_t count, std::vector<int32_t>& pages);

  // Lets go of a text's pages, the last first, and clears the list.
  void release_all(std::vector<int32_t>& pages);

  // Forgets every page that nobody holds, the stored ones too.
  void clear();

  const PagePool& pool() const { return *pool_; }
  int64_t num_evictions() const { return num_evictions_; }  // from the pool
  int64_t num_returns() const { return num_returns_; }      // from the store
  int64_t num_stored() const { return std::ssize(by_key_) - num_in_pool_; }

  // Recounts everything, the pool too. For tests and an idle engine.
  void check_invariant() const;

 private:
  // From the highest to the lowest.
  enum class Place : uint8_t { kPool, kHost, kDisk, kNowhere };
  static constexpr int32_t kNumLists = 3;  // nodes 0 … 2: of the pool what nobody holds, host, disk

  struct Node {
    PageKey key;
    int32_t parent = -1;  // -1: the root
    int32_t children = 0;
    int32_t previous = -1, next = -1;  // in its place's list
    int32_t slot = -1;                 // the page, or the store's slot
    Place place = Place::kNowhere;
    bool is_lost = false;  // its file could not be written or read: here in name only
    uint64_t scope = 0;    // of nodes below the root, as the next
    std::string salt;
  };

  int32_t node_of(const PageKey& key) const;
  bool spells(int32_t id, const PrefixChain& chain, std::span<const int32_t> tokens, int64_t index,
              int32_t parent) const;
  bool is_held(int32_t id) const;
  int32_t new_node();
  void place_in_pool(int32_t id, int32_t page);
  void hold(int32_t id);
  bool bring_back(int32_t id, std::vector<int32_t>& pages);
  void evict_oldest();
  bool move_to_host(int32_t id);
  bool move_to_disk(int32_t id);
  void leave_place(int32_t id);
  void forget(int32_t id);
  int32_t oldest(Place place) const { return nodes_[static_cast<size_t>(place)].next; }
  void append_to_list(int32_t id);
  void take_from_list(int32_t id);

  const PrefixHasher hasher_;
  PagePool* pool_;
  PageStore* store_;
  const bool retain_;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;        // [nodes_, kPageSize]
  std::vector<int32_t> free_nodes_;    // a stack
  std::vector<int32_t> node_of_page_;  // [pool's total], -1: not in the tree
  std::vector<int32_t> matched_;       // for take()
  std::unordered_map<PageKey, int32_t, PageKeyHash> by_key_;
  int64_t num_in_pool_ = 0, num_evictions_ = 0, num_returns_ = 0;
};

}  // namespace fathom
