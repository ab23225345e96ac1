// Prefix cache: full pages by the text that leads to them, so that a sequence reuses what an
// earlier one computed.
//
// A radix tree whose edges are pages: a node is one page of text, its parent the page before it,
// and the path from the root spells all tokens up to its end. Equal pages exist once.
//
// A node's rows are in a page of the pool; when the pool runs out, pages at refcount 0 are moved to
// the page store, to host memory and from there to files, or are dropped without a store. Each
// place evicts the least recently held first. A sequence holds its pages from the root on and
// releases them from the end, so in each place a page goes before its parent, and the next to evict
// is always the first of a list: O(1). A page is never in a higher place than its parent.
//
// Copies between the pool and host memory are asynchronous. A node being saved is in its new place,
// and its old page in transfer until the copy has ended; a loading node stays in its place until
// its rows are known to have arrived and its parent is in the pool. Both are in no list meanwhile.
// A copy that fails leaves a node without rows, for its descendants.
//
// Owns which rows are kept and where they are, not the holders' lists of pages. The scheduler takes
// and returns all pages through it. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cache/cache_observer.h"
#include "cache/page_pool.h"
#include "cache/page_store.h"
#include "cache/prefix_key.h"

namespace fathom {

// The keys of one text's full pages, computed as far as they were needed. Texts share pages if
// scope and salt are equal: a tenant's secret, or one request's number.
struct PrefixChain {
  uint64_t scope = 0;
  std::string salt;
  PageKey root;
  std::vector<PageKey> keys;
};

class PrefixTree {
 public:
  // retain: pages stay cached at refcount 0; otherwise they are shared only while held. A store
  // requires retain. Trees with copies of one hasher have equal keys for equal texts.
  PrefixTree(PagePool& pool, bool retain, PageStore* store = nullptr,
             const PrefixHasher& hasher = PrefixHasher());

  // The tree is empty at the call. The observer, which may be null, outlives the tree.
  void watch(CacheObserver* observer) { observer_ = observer; }

  PrefixChain chain(uint64_t scope, std::string_view salt) const;

  // Computes keys for all full pages of `tokens`; existing keys are unchanged.
  void extend(PrefixChain& chain, std::span<const int32_t> tokens) const;

  // Counts of the chain's first `max_pages` pages that are in the pool, by their keys alone, of
  // those at refcount 0, and of those in the store. O(log max_pages).
  struct Found {
    int64_t pages = 0;
    int64_t unheld = 0;
    int64_t stored = 0;

    int64_t all() const { return pages + stored; }
  };
  Found find(const PrefixChain& chain, int64_t max_pages) const;

  // Holds the longest prefix of the text that is in the tree, at most max_pages, and appends it to
  // the list, which holds the pages of an earlier call; pages in the store begin to load into pool
  // pages that must be available. Tokens are compared, not only keys. The pages may be read only
  // after settle() has returned true. Returns true if more can be loaded when copies in flight have
  // ended; call again.
  bool take(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t max_pages,
            std::vector<int32_t>& pages);

  // Replaces `pages` by the pool's pages of the text's longest prefix there, at most max_pages;
  // holds none. They stay what they are until the tree changes.
  void find_pages(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t max_pages,
                  std::vector<int32_t>& pages) const;

  // Whether no page that take() gave is still in flight. Pages after one whose copy failed are
  // released.
  bool settle(std::vector<int32_t>& pages);

  // Inserts page `index` of the text, which has been computed; pages[index] is held, and pages[0 …
  // index) are in the tree. If an equal page exists, it is held instead and the computed one
  // released. Returns false and changes nothing if another text has the same key: then nothing of
  // this text may be inserted.
  bool insert(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t index,
              std::vector<int32_t>& pages);

  // Pages that allocate() can return, now or when copies have ended: free ones, and those at
  // refcount 0.
  int64_t available() const { return pool_->free() + pool_->cached() + pool_->leaving(); }

  // Makes `count` pages free. kLater: they will be when copies in flight have ended. kNever: fewer
  // are available, and nothing has changed.
  enum class Room { kNow, kLater, kNever };
  Room make_room(int64_t count);

  // Appends `count` pages, each held once, if there is room for them now.
  Room allocate(int64_t count, std::vector<int32_t>& pages);

  // Begins to make `count` pages free ahead of use, where that is asynchronous.
  void make_room_ahead(int64_t count);

  // Processes copies that have ended; with `wait` it waits for one, if any is in flight.
  void take_ended(bool wait);
  int64_t copies_in_flight() const { return store_ == nullptr ? 0 : store_->copies_in_flight(); }

  // Releases a text's pages, the last first, and clears the list.
  void release_all(std::vector<int32_t>& pages);

  // Drops every page at refcount 0, the stored ones too, and those that are loading.
  void clear();

  const PagePool& pool() const { return *pool_; }
  bool retains() const { return retain_; }
  int64_t num_evictions() const { return num_evictions_; }  // from the pool
  int64_t num_returns() const { return num_returns_; }      // from the store
  int64_t num_copies_ended() const { return num_copies_ended_; }
  int64_t num_stored() const { return std::ssize(by_key_) - num_in_pool_; }

  // Recounts everything, the pool too. For tests and an idle engine.
  void check_invariant() const;

 private:
  // From the highest to the lowest.
  enum class Place : uint8_t { kPool, kHost, kDisk, kNowhere };
  static constexpr int32_t kNumLists = 3;  // nodes 0 … 2: pool pages at refcount 0, host, disk

  struct Node {
    PageKey key;
    int32_t parent = -1;  // -1: the root
    int32_t children = 0;
    int32_t previous = -1, next = -1;  // in its place's list
    int32_t slot = -1;                 // the page, or the store's slot
    int32_t coming = -1;               // the pool page that it is loading into
    int32_t copy = -1;                 // the copy in flight, by its slot of host memory
    int32_t moving_children = 0;       // being saved or loading
    Place place = Place::kNowhere;
    bool is_saving = false;  // into its place
    bool is_lost = false;    // its copy, write or read failed: a node without rows
    bool is_public = false;  // of a text that any request may share
    bool is_told = false;    // the observer was told that it is there
    uint64_t scope = 0;      // for nodes below the root, as the next
    std::string salt;
  };

  // The copy of a slot of host memory.
  struct Copy {
    int32_t page = -1;
    int32_t node = -1;  // -1: no longer needed
    bool is_save = false;
  };

  enum class Coming { kYes, kNo, kLater };

  int32_t node_of(const PageKey& key) const;
  bool spells(int32_t id, const PrefixChain& chain, std::span<const int32_t> tokens, int64_t index,
              int32_t parent) const;
  bool is_held(int32_t id) const;
  int32_t new_node();
  void place_in_pool(int32_t id, int32_t page);
  void tell_stored(int32_t id);
  void tell_removed(int32_t id);
  void hold(int32_t id);
  Coming bring_back(int32_t id, std::vector<int32_t>& pages);
  bool load(int32_t id, int32_t page);
  void commit(int32_t id);
  void end_copy(int32_t memory_slot, bool ok);
  bool evict_oldest();
  void save(int32_t id, int32_t memory_slot, Place place, int32_t slot);
  bool free_host_slot();
  bool free_staging_slot();
  bool free_disk_slot();
  bool move_to_disk(int32_t id);
  bool is_moving(int32_t id) const { return nodes_[id].is_saving || nodes_[id].coming >= 0; }
  void begin_moving(int32_t id);
  void end_moving(int32_t id);
  void detach(int32_t id);
  void release_from(std::vector<int32_t>& pages, size_t first);
  void leave_place(int32_t id);
  void forget(int32_t id);
  int32_t oldest(Place place) const { return nodes_[static_cast<size_t>(place)].next; }
  bool is_listed(int32_t id) const { return nodes_[id].previous >= 0; }
  void append_to_list(int32_t id) { insert_before(static_cast<int32_t>(nodes_[id].place), id); }
  void insert_before(int32_t next, int32_t id);
  void take_from_list(int32_t id);

  const PrefixHasher hasher_;
  PagePool* pool_;
  PageStore* store_;
  const bool retain_;
  CacheObserver* observer_ = nullptr;
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;        // [nodes_, kPageSize]
  std::vector<int32_t> free_nodes_;    // a stack
  std::vector<int32_t> node_of_page_;  // [pool's total], -1: not in the tree
  std::vector<int32_t> coming_;        // [pool's total], the node loading into it; -1: none
  std::vector<Copy> copies_;           // [the store's slots of host memory]
  std::vector<int32_t> matched_;       // for take()
  std::unordered_map<PageKey, int32_t, PageKeyHash> by_key_;
  int64_t num_in_pool_ = 0, num_evictions_ = 0, num_returns_ = 0, num_copies_ended_ = 0;
};

}  // namespace fathom
