#include "cache/prefix_tree.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cache/latent_layout.h"

namespace fathom {
namespace {

std::span<const int32_t> page_tokens(std::span<const int32_t> tokens, int64_t index) {
  return tokens.subspan(static_cast<size_t>(index * kPageSize), kPageSize);
}

// The first index in [0, end) for which `holds` is false; it is true before and false after.
template <typename Predicate>
int64_t partition(int64_t end, Predicate holds) {
  int64_t begin = 0;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (holds(middle)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, bool retain, PageStore* store)
    : pool_(&pool),
      store_(store),
      retain_(retain),
      nodes_(kNumLists),
      tokens_(kNumLists * kPageSize),
      node_of_page_(static_cast<size_t>(pool.total()), -1) {
  FATHOM_CHECK(retain || store == nullptr, "a store for what is not kept");
  for (int32_t list = 0; list < kNumLists; ++list) {
    nodes_[list].previous = nodes_[list].next = list;
  }
  // No pause to grow while serving.
  const int64_t stored = store == nullptr ? 0 : store->host().total() + store->disk().total();
  const auto most = static_cast<size_t>(kNumLists + pool.total() + stored);
  nodes_.reserve(most);
  tokens_.reserve(most * kPageSize);
  by_key_.reserve(most);
  free_nodes_.reserve(most);
}

PrefixChain PrefixTree::chain(uint64_t scope, std::string_view salt) const {
  return {.scope = scope, .salt = std::string(salt), .root = hasher_.root(scope, salt), .keys = {}};
}

void PrefixTree::extend(PrefixChain& chain, std::span<const int32_t> tokens) const {
  const size_t full = tokens.size() / kPageSize;
  chain.keys.reserve(full);
  for (size_t i = chain.keys.size(); i < full; ++i) {
    const PageKey& parent = i > 0 ? chain.keys[i - 1] : chain.root;
    chain.keys.push_back(hasher_.extend(parent, page_tokens(tokens, static_cast<int64_t>(i))));
  }
}

// A page that is here has its parent here, in no lower place, and one that is held has its parent
// held: all of them are properties of a beginning of the text, so its end is found by halving.
PrefixTree::Found PrefixTree::find(const PrefixChain& chain, int64_t max_pages) const {
  const int64_t all = partition(max_pages, [&](int64_t i) { return node_of(chain.keys[i]) >= 0; });
  Found found;
  found.pages = partition(
      all, [&](int64_t i) { return nodes_[node_of(chain.keys[i])].place == Place::kPool; });
  found.unheld = found.pages -
                 partition(found.pages, [&](int64_t i) { return is_held(node_of(chain.keys[i])); });
  found.stored = all - found.pages;
  return found;
}

int64_t PrefixTree::take(const PrefixChain& chain, std::span<const int32_t> tokens,
                         int64_t max_pages, std::vector<int32_t>& pages) {
  FATHOM_CHECK(pages.empty(), "{} pages are held already", pages.size());
  matched_.clear();
  // What needs memory comes before what is held: who is refused it holds nothing.
  matched_.reserve(static_cast<size_t>(max_pages));
  pages.reserve(static_cast<size_t>(max_pages));
  for (int64_t i = 0; i < max_pages; ++i) {
    const int32_t id = node_of(chain.keys[i]);
    if (id < 0 || !spells(id, chain, tokens, i, i > 0 ? matched_.back() : -1)) break;
    matched_.push_back(id);
  }
  // What comes back takes room from others: so the rest is held first, or made the last to go.
  size_t in_pool = 0;
  for (; in_pool < matched_.size() && nodes_[matched_[in_pool]].place == Place::kPool; ++in_pool) {
    hold(matched_[in_pool]);
    pages.push_back(nodes_[matched_[in_pool]].slot);
  }
  for (size_t i = matched_.size(); i > in_pool; --i) {
    take_from_list(matched_[i - 1]);
    append_to_list(matched_[i - 1]);
  }
  for (size_t i = in_pool; i < matched_.size() && bring_back(matched_[i], pages); ++i) {
  }
  return std::ssize(pages);
}

bool PrefixTree::insert(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t index,
                        std::vector<int32_t>& pages) {
  const int32_t parent = index > 0 ? node_of_page_[pages[index - 1]] : -1;
  FATHOM_CHECK(index == 0 || parent >= 0, "page {} of a text before page {}", index, index - 1);
  const int32_t page = pages[index];
  FATHOM_CHECK(node_of_page_[page] < 0, "page {} is inserted twice", page);
  if (const int32_t equal = node_of(chain.keys[index]); equal >= 0) {
    if (!spells(equal, chain, tokens, index, parent)) return false;
    if (nodes_[equal].place == Place::kPool) {
      hold(equal);
      pool_->release(page);
      pages[index] = nodes_[equal].slot;
    } else {
      leave_place(equal);
      place_in_pool(equal, page);
    }
    return true;
  }
  // First what may find no memory; new_node() needs none, there is room for all from the start.
  std::string salt = parent < 0 ? chain.salt : std::string();
  const auto key = by_key_.emplace(chain.keys[index], -1).first;
  const int32_t id = new_node();
  key->second = id;
  Node& node = nodes_[id];
  node.key = chain.keys[index];
  node.parent = parent;
  if (parent >= 0) {
    ++nodes_[parent].children;
  } else {
    node.scope = chain.scope;
    node.salt = std::move(salt);
  }
  const std::span<const int32_t> text = page_tokens(tokens, index);
  std::copy(text.begin(), text.end(), tokens_.begin() + id * kPageSize);
  place_in_pool(id, page);
  return true;
}

bool PrefixTree::allocate(int64_t count, std::vector<int32_t>& pages) {
  if (count > available()) return false;
  while (pool_->free() < count) evict_oldest();
  return pool_->allocate(count, pages);
}

void PrefixTree::release_all(std::vector<int32_t>& pages) {
  for (auto it = pages.rbegin(); it != pages.rend(); ++it) {
    pool_->release(*it);
    const int32_t id = node_of_page_[*it];
    if (id < 0 || is_held(id)) continue;
    append_to_list(id);
    if (!retain_) forget(id);
  }
  pages.clear();
}

void PrefixTree::clear() {
  for (const Place place : {Place::kDisk, Place::kHost, Place::kPool}) {
    while (oldest(place) >= kNumLists) forget(oldest(place));
  }
}

void PrefixTree::check_invariant() const {
  int64_t in_place[] = {0, 0, 0, 0}, listed = 0, should_be_listed = 0, children = 0, parents = 0;
  for (auto id = kNumLists; id < std::ssize(nodes_); ++id) {
    const Node& node = nodes_[id];
    ++in_place[static_cast<size_t>(node.place)];
    if (node.place == Place::kNowhere) continue;
    FATHOM_CHECK(node_of(node.key) == id, "node {} is not found by its key", id);
    children += node.children;
    should_be_listed += node.place != Place::kPool || !is_held(id);
    if (node.place == Place::kPool) {
      FATHOM_CHECK(node_of_page_[node.slot] == id, "node {} has lost page {}", id, node.slot);
    }
    if (node.parent < 0) continue;
    ++parents;
    const Node& parent = nodes_[node.parent];
    FATHOM_CHECK(parent.children > 0 && parent.place <= node.place &&
                     (node.place != Place::kPool || !is_held(id) || is_held(node.parent)),
                 "node {} in place {} below one in place {}", id, static_cast<int>(node.place),
                 static_cast<int>(parent.place));
  }
  for (int32_t list = 0; list < kNumLists; ++list) {
    for (int32_t id = nodes_[list].next; id != list; id = nodes_[id].next) {
      FATHOM_CHECK(nodes_[id].place == static_cast<Place>(list), "node {} is in list {}", id, list);
      ++listed;
    }
  }
  const auto keys = std::ssize(by_key_);
  FATHOM_CHECK(in_place[0] == num_in_pool_ && in_place[1] + in_place[2] == num_stored() &&
                   in_place[3] == std::ssize(free_nodes_) && children == parents,
               "{}, {} and {} nodes, {} keys, {} in the pool", in_place[0], in_place[1],
               in_place[2], keys, num_in_pool_);
  FATHOM_CHECK(listed == should_be_listed && listed == pool_->cached() + num_stored(),
               "{} of {} nodes are listed, {} pages cached", listed, keys, pool_->cached());
  pool_->check_invariant();
}

int32_t PrefixTree::node_of(const PageKey& key) const {
  const auto it = by_key_.find(key);
  return it == by_key_.end() ? -1 : it->second;
}

// Whether the node stands for page `index` of this text, given that its parent does for the page
// before: by induction the whole text is compared.
bool PrefixTree::spells(int32_t id, const PrefixChain& chain, std::span<const int32_t> tokens,
                        int64_t index, int32_t parent) const {
  const Node& node = nodes_[id];
  if (node.parent != parent) return false;
  if (parent < 0 && (node.scope != chain.scope || node.salt != chain.salt)) return false;
  const std::span<const int32_t> text = page_tokens(tokens, index);
  return std::equal(text.begin(), text.end(), tokens_.begin() + id * kPageSize);
}

// Of a node in the pool.
bool PrefixTree::is_held(int32_t id) const { return pool_->holders(nodes_[id].slot) > 0; }

int32_t PrefixTree::new_node() {
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
    tokens_.resize(nodes_.size() * kPageSize);
    return static_cast<int32_t>(nodes_.size()) - 1;
  }
  const int32_t id = free_nodes_.back();
  free_nodes_.pop_back();
  return id;
}

// The page is held.
void PrefixTree::place_in_pool(int32_t id, int32_t page) {
  nodes_[id].place = Place::kPool;
  nodes_[id].slot = page;
  node_of_page_[page] = id;
  pool_->keep(page);
  ++num_in_pool_;
}

void PrefixTree::hold(int32_t id) {
  if (!is_held(id)) take_from_list(id);
  pool_->share(nodes_[id].slot);
}

// From the store into a page of the pool, which the caller then holds.
bool PrefixTree::bring_back(int32_t id, std::vector<int32_t>& pages) {
  if (nodes_[id].is_lost || !allocate(1, pages)) return false;
  const int32_t page = pages.back();
  // The page's room may have come at the price of the node's own, where the store is very small.
  Node& node = nodes_[id];
  bool is_back = node.place != Place::kNowhere && !node.is_lost;
  if (is_back && node.place == Place::kHost) {
    store_->load(node.slot, page);
  } else if (is_back) {
    is_back = store_->read(node.slot, node.key, page);
    node.is_lost = !is_back;
  }
  if (!is_back) {
    pool_->release(page);
    pages.pop_back();
    return false;
  }
  leave_place(id);
  place_in_pool(id, page);
  ++num_returns_;
  return true;
}

void PrefixTree::evict_oldest() {
  const int32_t id = oldest(Place::kPool);
  FATHOM_CHECK(id >= kNumLists, "nothing to evict, {} pages cached", pool_->cached());
  ++num_evictions_;
  if (!move_to_host(id) && !move_to_disk(id)) forget(id);
}

// Out of the pool; false if there is no such place.
bool PrefixTree::move_to_host(int32_t id) {
  if (store_ == nullptr || store_->host().total() == 0) return false;
  if (store_->host().empty()) {
    const int32_t other = oldest(Place::kHost);
    if (!move_to_disk(other)) forget(other);
  }
  const int32_t slot = store_->host().take();
  store_->save(nodes_[id].slot, slot);
  leave_place(id);
  nodes_[id].place = Place::kHost;
  nodes_[id].slot = slot;
  append_to_list(id);
  return true;
}

// Out of the pool or host memory; false if there is no such place. A node that cannot be written
// stays in name, for those below it, until its turn comes.
bool PrefixTree::move_to_disk(int32_t id) {
  if (store_ == nullptr || store_->disk().total() == 0) return false;
  if (store_->disk().empty()) forget(oldest(Place::kDisk));
  const int32_t slot = store_->disk().take();
  Node& node = nodes_[id];
  const bool is_written = node.place == Place::kPool
                              ? store_->write_page(node.slot, slot, node.key)
                              : store_->write_slot(node.slot, slot, node.key);
  leave_place(id);
  node.place = Place::kDisk;
  node.slot = slot;
  node.is_lost = !is_written;
  append_to_list(id);
  return true;
}

// Of a listed node: gives back its page or slot, and is nowhere.
void PrefixTree::leave_place(int32_t id) {
  Node& node = nodes_[id];
  take_from_list(id);
  switch (node.place) {
    case Place::kPool:
      node_of_page_[node.slot] = -1;
      pool_->drop(node.slot);
      --num_in_pool_;
      break;
    case Place::kHost:
      store_->host().give_back(node.slot);
      break;
    case Place::kDisk:
      store_->disk().give_back(node.slot);
      break;
    case Place::kNowhere:
      FATHOM_CHECK(false, "node {} leaves no place", id);
  }
  node.place = Place::kNowhere;
  node.slot = -1;
  node.is_lost = false;
}

void PrefixTree::forget(int32_t id) {
  Node& node = nodes_[id];
  FATHOM_CHECK(node.children == 0, "node {} goes before its {} children", id, node.children);
  leave_place(id);
  if (node.parent >= 0) --nodes_[node.parent].children;
  by_key_.erase(node.key);
  node.parent = -1;
  node.salt.clear();
  free_nodes_.push_back(id);
}

void PrefixTree::append_to_list(int32_t id) {
  Node& node = nodes_[id];
  const auto list = static_cast<int32_t>(node.place);
  Node& head = nodes_[list];
  node.previous = head.previous;
  node.next = list;
  nodes_[head.previous].next = id;
  head.previous = id;
}

void PrefixTree::take_from_list(int32_t id) {
  Node& node = nodes_[id];
  nodes_[node.previous].next = node.next;
  nodes_[node.next].previous = node.previous;
  node.previous = node.next = -1;
}

}  // namespace fathom
