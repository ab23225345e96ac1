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

// The first index in [0, end) for which `holds` is false. Requires a monotonic predicate.
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

PrefixTree::PrefixTree(PagePool& pool, bool retain, PageStore* store, const PrefixHasher& hasher)
    : hasher_(hasher),
      pool_(&pool),
      store_(store),
      retain_(retain),
      nodes_(kNumLists),
      tokens_(kNumLists * kPageSize),
      node_of_page_(static_cast<size_t>(pool.total()), -1),
      coming_(static_cast<size_t>(pool.total()), -1),
      copies_(store == nullptr ? 0 : static_cast<size_t>(store->num_memory_slots())) {
  FATHOM_CHECK(retain || store == nullptr, "a store for what is not kept");
  for (int32_t list = 0; list < kNumLists; ++list) {
    nodes_[list].previous = nodes_[list].next = list;
  }
  // Reserved, so that no reallocation pauses serving.
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

// A page in the tree has its parent there, in no lower place, and a held page has its parent held.
// All of these are properties of a prefix of the text, so its end is found by binary search.
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

bool PrefixTree::take(const PrefixChain& chain, std::span<const int32_t> tokens, int64_t max_pages,
                      std::vector<int32_t>& pages) {
  const size_t held = pages.size();
  matched_.clear();
  // Allocations come before holding pages: if they fail, nothing more is held.
  matched_.reserve(static_cast<size_t>(max_pages));
  pages.reserve(static_cast<size_t>(max_pages));
  int32_t parent = held > 0 ? node_of_page_[pages.back()] : -1;
  for (auto i = static_cast<int64_t>(held); i < max_pages; ++i) {
    const int32_t id = node_of(chain.keys[i]);
    if (id < 0 || !spells(id, chain, tokens, i, parent)) break;
    matched_.push_back(parent = id);
  }
  // Returning pages take room from others: so the rest of the hit is held first, or becomes the
  // last to be evicted.
  size_t in_pool = 0;
  for (; in_pool < matched_.size() && nodes_[matched_[in_pool]].place == Place::kPool; ++in_pool) {
    hold(matched_[in_pool]);
    pages.push_back(nodes_[matched_[in_pool]].slot);
  }
  for (size_t i = matched_.size(); i > in_pool; --i) {
    if (!is_listed(matched_[i - 1])) continue;
    take_from_list(matched_[i - 1]);
    append_to_list(matched_[i - 1]);
  }
  for (size_t i = in_pool; i < matched_.size(); ++i) {
    const Coming coming = bring_back(matched_[i], pages);
    if (coming == Coming::kNo) return false;
    if (coming == Coming::kYes) continue;
    // Makes room for all the rest at once: their copies are in flight together.
    make_room(std::min(static_cast<int64_t>(matched_.size() - i), available()));
    return true;
  }
  return false;
}

void PrefixTree::find_pages(const PrefixChain& chain, std::span<const int32_t> tokens,
                            int64_t max_pages, std::vector<int32_t>& pages) const {
  pages.clear();
  int32_t parent = -1;
  for (int64_t i = 0; i < max_pages; ++i) {
    const int32_t id = node_of(chain.keys[i]);
    if (id < 0 || !spells(id, chain, tokens, i, parent)) return;
    if (nodes_[id].place != Place::kPool) return;
    pages.push_back(nodes_[id].slot);
    parent = id;
  }
}

bool PrefixTree::settle(std::vector<int32_t>& pages) {
  take_ended(false);
  for (size_t i = 0; i < pages.size(); ++i) {
    const int32_t page = pages[i];
    if (node_of_page_[page] >= 0) continue;
    if (pool_->is_in_transfer(page)) return false;
    if (coming_[page] < 0) {  // the copy failed, or an equal page has been inserted meanwhile
      release_from(pages, i);
      break;
    }
    commit(coming_[page]);
  }
  return true;
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
      if (is_moving(equal)) detach(equal);
      leave_place(equal);
      place_in_pool(equal, page);
    }
    return true;
  }
  // First the allocations that may fail; new_node() cannot fail, its memory is reserved.
  std::string salt = parent < 0 ? chain.salt : std::string();
  const auto key = by_key_.emplace(chain.keys[index], -1).first;
  const int32_t id = new_node();
  key->second = id;
  Node& node = nodes_[id];
  node.key = chain.keys[index];
  node.parent = parent;
  node.is_public = chain.salt.empty() && chain.scope == 0;
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

PrefixTree::Room PrefixTree::make_room(int64_t count) {
  if (count > available()) return Room::kNever;
  if (count <= pool_->free()) return Room::kNow;
  take_ended(false);
  while (pool_->free() + pool_->leaving() < count && evict_oldest()) {
  }
  take_ended(false);
  return count <= pool_->free() ? Room::kNow : Room::kLater;
}

PrefixTree::Room PrefixTree::allocate(int64_t count, std::vector<int32_t>& pages) {
  const Room room = make_room(count);
  if (room == Room::kNow) pool_->allocate(count, pages);
  return room;
}

void PrefixTree::make_room_ahead(int64_t count) {
  if (store_ != nullptr && store_->is_asynchronous()) make_room(std::min(count, available()));
}

void PrefixTree::take_ended(bool wait) {
  if (copies_in_flight() == 0) return;
  for (const EndedCopy& copy : store_->take_ended(wait)) end_copy(copy.id, copy.ok);
}

void PrefixTree::release_all(std::vector<int32_t>& pages) { release_from(pages, 0); }

void PrefixTree::release_from(std::vector<int32_t>& pages, size_t first) {
  for (size_t i = pages.size(); i > first; --i) {
    const int32_t page = pages[i - 1];
    pool_->release(page);
    if (const int32_t id = node_of_page_[page]; id >= 0) {
      if (is_held(id)) continue;
      append_to_list(id);
      if (!retain_) forget(id);
    } else if (coming_[page] >= 0 && !pool_->is_in_transfer(page) && pool_->holders(page) == 0) {
      detach(coming_[page]);  // it has arrived and has no holder
    }
  }
  pages.resize(first);
}

void PrefixTree::clear() {
  for (auto id = kNumLists; id < std::ssize(nodes_); ++id) {
    if (is_moving(id)) detach(id);
  }
  for (const Place place : {Place::kDisk, Place::kHost, Place::kPool}) {
    while (oldest(place) >= kNumLists) forget(oldest(place));
  }
  if (observer_ != nullptr && by_key_.empty()) observer_->cleared();
}

void PrefixTree::check_invariant() const {
  int64_t in_place[] = {0, 0, 0, 0}, listed = 0, should_be_listed = 0, children = 0, parents = 0,
          moving = 0, moving_children = 0;
  for (auto id = kNumLists; id < std::ssize(nodes_); ++id) {
    const Node& node = nodes_[id];
    ++in_place[static_cast<size_t>(node.place)];
    if (node.place == Place::kNowhere) continue;
    FATHOM_CHECK(node_of(node.key) == id, "node {} is not found by its key", id);
    children += node.children;
    moving_children += node.moving_children;
    moving += is_moving(id);
    should_be_listed += !is_moving(id) && (node.place != Place::kPool || !is_held(id));
    FATHOM_CHECK(node.coming < 0 || coming_[node.coming] == id,
                 "node {} does not come into page {}", id, node.coming);
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
  FATHOM_CHECK(listed == should_be_listed && listed == pool_->cached() + num_stored() - moving,
               "{} of {} nodes are listed, {} moving, {} pages cached", listed, keys, moving,
               pool_->cached());
  FATHOM_CHECK(moving_children <= moving && copies_in_flight() == pool_->in_transfer(),
               "{} of {} nodes that move are children, {} copies, {} pages in transfer",
               moving_children, moving, copies_in_flight(), pool_->in_transfer());
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

// Requires a node in the pool.
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

// Requires a held page.
void PrefixTree::place_in_pool(int32_t id, int32_t page) {
  nodes_[id].place = Place::kPool;
  nodes_[id].slot = page;
  node_of_page_[page] = id;
  pool_->keep(page);
  ++num_in_pool_;
  tell_stored(id);
}

void PrefixTree::tell_stored(int32_t id) {
  Node& node = nodes_[id];
  if (observer_ == nullptr || !node.is_public || std::exchange(node.is_told, true)) return;
  observer_->stored(node.key, node.parent < 0 ? nullptr : &nodes_[node.parent].key,
                    std::span(tokens_).subspan(static_cast<size_t>(id * kPageSize), kPageSize));
}

void PrefixTree::tell_removed(int32_t id) {
  if (std::exchange(nodes_[id].is_told, false)) observer_->removed(nodes_[id].key);
}

void PrefixTree::hold(int32_t id) {
  if (!is_held(id)) take_from_list(id);
  pool_->share(nodes_[id].slot);
}

// Loads a node from the store into a page of the pool, which the caller then holds.
PrefixTree::Coming PrefixTree::bring_back(int32_t id, std::vector<int32_t>& pages) {
  if (nodes_[id].is_lost || nodes_[id].is_saving) return Coming::kNo;
  if (const int32_t page = nodes_[id].coming; page >= 0) {  // already loading for another
    pool_->share(page);
    pages.push_back(page);
    return Coming::kYes;
  }
  const Room room = allocate(1, pages);
  if (room != Room::kNow) return room == Room::kLater ? Coming::kLater : Coming::kNo;
  const int32_t page = pages.back();
  // Making room for the page may have evicted the node itself, if the store is very small.
  const Node& node = nodes_[id];
  const bool is_here = node.place != Place::kNowhere && !node.is_lost;
  const bool is_later = is_here && node.place == Place::kDisk && !free_staging_slot();
  if (!is_here || is_later || !load(id, page)) {
    pool_->release(page);
    pages.pop_back();
    return is_later ? Coming::kLater : Coming::kNo;
  }
  take_ended(false);
  const bool is_first = pages.size() == 1 || node_of_page_[pages[pages.size() - 2]] >= 0;
  if (is_first && nodes_[id].coming == page && !pool_->is_in_transfer(page)) commit(id);
  return Coming::kYes;
}

// Begins to copy a node's rows into a held page; returns false if its file is not the one written.
bool PrefixTree::load(int32_t id, int32_t page) {
  Node& node = nodes_[id];
  int32_t memory_slot = node.slot;
  if (node.place == Place::kDisk) {
    memory_slot = store_->staging().take();
    if (!store_->read(node.slot, node.key, memory_slot)) {
      store_->staging().give_back(memory_slot);
      node.is_lost = true;
      return false;
    }
  }
  take_from_list(id);
  node.coming = page;
  node.copy = memory_slot;
  begin_moving(id);
  coming_[page] = id;
  pool_->begin_transfer(page);
  copies_[memory_slot] = {.page = page, .node = id, .is_save = false};
  store_->load(memory_slot, page);
  return true;
}

// Requires a node whose rows have arrived, below one that is in the pool.
void PrefixTree::commit(int32_t id) {
  const int32_t page = nodes_[id].coming;
  coming_[page] = nodes_[id].coming = -1;
  end_moving(id);
  leave_place(id);
  place_in_pool(id, page);
  ++num_returns_;
}

void PrefixTree::end_copy(int32_t memory_slot, bool ok) {
  ++num_copies_ended_;
  const Copy copy = std::exchange(copies_[memory_slot], {});
  pool_->end_transfer(copy.page);
  if (copy.node < 0) {
    (store_->is_staging(memory_slot) ? store_->staging() : store_->host()).give_back(memory_slot);
    return;
  }
  Node& node = nodes_[copy.node];
  node.copy = -1;
  if (store_->is_staging(memory_slot)) {
    if (ok && copy.is_save) ok = store_->write(memory_slot, node.slot, node.key);
    store_->staging().give_back(memory_slot);
  }
  if (!copy.is_save && ok && pool_->holders(copy.page) > 0) return;  // settle() commits it
  node.is_lost = !ok;
  detach(copy.node);
}

// Returns false if a copy has to end first.
bool PrefixTree::evict_oldest() {
  const int32_t id = oldest(Place::kPool);
  FATHOM_CHECK(id >= kNumLists, "nothing to evict, {} pages cached", pool_->cached());
  if (store_ == nullptr) {
    forget(id);
  } else if (store_->host().total() > 0) {
    if (!free_host_slot()) return false;
    const int32_t slot = store_->host().take();
    save(id, slot, Place::kHost, slot);
  } else {
    if (!free_staging_slot() || !free_disk_slot()) return false;
    save(id, store_->staging().take(), Place::kDisk, store_->disk().take());
  }
  ++num_evictions_;
  return true;
}

// Moves a node out of the pool.
void PrefixTree::save(int32_t id, int32_t memory_slot, Place place, int32_t slot) {
  Node& node = nodes_[id];
  const int32_t page = node.slot;
  take_from_list(id);
  node_of_page_[page] = -1;
  --num_in_pool_;
  node.place = place;
  node.slot = slot;
  node.is_saving = true;
  node.copy = memory_slot;
  begin_moving(id);
  pool_->begin_transfer(page);
  copies_[memory_slot] = {.page = page, .node = id, .is_save = true};
  store_->save(page, memory_slot);
}

// These three functions return false if no slot is free before a copy ends. Nodes whose children
// are in flight do not go before those.
bool PrefixTree::free_host_slot() {
  if (store_->host().empty()) take_ended(false);
  if (!store_->host().empty()) return true;
  const int32_t other = oldest(Place::kHost);
  if (other < kNumLists || nodes_[other].moving_children > 0) return false;
  if (store_->disk().total() > 0) return move_to_disk(other);
  forget(other);
  return true;
}

bool PrefixTree::free_staging_slot() {
  if (store_->staging().empty()) take_ended(false);
  return !store_->staging().empty();
}

bool PrefixTree::free_disk_slot() {
  if (!store_->disk().empty()) return true;
  const int32_t other = oldest(Place::kDisk);
  if (other < kNumLists || nodes_[other].moving_children > 0) return false;
  forget(other);
  return true;
}

// Moves a node out of host memory. If it cannot be written, its node stays without rows, for its
// descendants, until it is evicted.
bool PrefixTree::move_to_disk(int32_t id) {
  if (!free_disk_slot()) return false;
  const int32_t slot = store_->disk().take();
  const bool is_written =
      !nodes_[id].is_lost && store_->write(nodes_[id].slot, slot, nodes_[id].key);
  leave_place(id);
  Node& node = nodes_[id];
  node.place = Place::kDisk;
  node.slot = slot;
  node.is_lost = !is_written;
  append_to_list(id);
  return true;
}

void PrefixTree::begin_moving(int32_t id) {
  if (const int32_t parent = nodes_[id].parent; parent >= 0) ++nodes_[parent].moving_children;
}

void PrefixTree::end_moving(int32_t id) {
  if (const int32_t parent = nodes_[id].parent; parent >= 0) --nodes_[parent].moving_children;
}

// A moved node is listed in its new place. A copy in flight continues without a node; it keeps its
// slot of host memory.
void PrefixTree::detach(int32_t id) {
  Node& node = nodes_[id];
  if (node.copy >= 0) {
    copies_[node.copy].node = -1;
    if (!store_->is_staging(node.copy)) node.slot = -1;
    node.is_lost |= node.is_saving || node.slot < 0;
    node.copy = -1;
  }
  if (node.coming >= 0) coming_[node.coming] = -1;
  node.coming = -1;
  node.is_saving = false;
  if (node.is_lost) tell_removed(id);
  end_moving(id);
  // Inserts before the nearest listed ancestor: a page is evicted before its parent.
  int32_t next = static_cast<int32_t>(node.place);
  for (int32_t above = node.parent; above >= 0 && nodes_[above].place == node.place;
       above = nodes_[above].parent) {
    if (!is_listed(above)) continue;
    next = above;
    break;
  }
  insert_before(next, id);
}

// Requires a listed node: releases its page or slot and detaches it.
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
      if (node.slot >= 0) store_->host().give_back(node.slot);
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
  tell_removed(id);
  leave_place(id);
  if (node.parent >= 0) --nodes_[node.parent].children;
  by_key_.erase(node.key);
  node.parent = -1;
  node.salt.clear();
  free_nodes_.push_back(id);
}

// A list's own number stands for its end.
void PrefixTree::insert_before(int32_t next, int32_t id) {
  Node& node = nodes_[id];
  node.next = next;
  node.previous = nodes_[next].previous;
  nodes_[node.previous].next = id;
  nodes_[next].previous = id;
}

// Does nothing for an unlisted node.
void PrefixTree::take_from_list(int32_t id) {
  Node& node = nodes_[id];
  if (node.previous < 0) return;
  nodes_[node.previous].next = node.next;
  nodes_[node.next].previous = node.previous;
  node.previous = node.next = -1;
}

}  // namespace fathom
