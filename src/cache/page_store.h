// Storage for evicted pages: in host memory, and below that in files.
//
// Knows slots, not texts: the prefix tree knows each slot's text and the eviction order. A slot is
// taken, filled, read any number of times, and released. Files lie in a directory of this process's
// own (PageDirectory) and go with it; files of other processes are never read. Pages in flight
// between the pool and a file lie in a staging slot. A file's checksum covers the page's key and
// bytes: one that is damaged, exchanged or gone is a miss. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/page_directory.h"
#include "cache/page_transfer.h"
#include "cache/prefix_key.h"

namespace fathom {

struct PageStoreOptions {
  int64_t host_bytes = 0;      // of all stores together
  std::string directory = {};  // empty: no files
  int64_t disk_bytes = 0;      // of all stores together
  int num_stores = 1;          // that share the two: each has an equal part
};

// Slots that are free, as a stack.
class SlotList {
 public:
  SlotList(int32_t first, int64_t count);
  int64_t total() const { return total_; }
  bool empty() const { return free_.empty(); }
  int32_t take();
  void give_back(int32_t slot) { free_.push_back(slot); }

 private:
  int64_t total_;
  std::vector<int32_t> free_;
};

class PageStore {
 public:
  // The memory is allocated and the directory made here. The transfer outlives the store.
  static Result<std::unique_ptr<PageStore>> create(const PageStoreOptions& options,
                                                   PageTransfer& transfer);
  ~PageStore();  // waits for copies in flight
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  SlotList& host() { return host_; }
  SlotList& staging() { return staging_; }  // in host memory, too, numbered after the others
  SlotList& disk() { return disk_; }
  int64_t num_memory_slots() const { return host_.total() + staging_.total(); }
  bool is_staging(int32_t memory_slot) const { return memory_slot >= host_.total(); }

  // Begins a copy between a page of the pool and a slot of host memory. At most one copy a slot.
  void save(int32_t page, int32_t memory_slot);
  void load(int32_t memory_slot, int32_t page);

  // Copies that have ended since the last call, by their slots of host memory; with `wait` it waits
  // for one, if any is in flight. Valid until the next call.
  const std::vector<EndedCopy>& take_ended(bool wait);
  int64_t copies_in_flight() const { return in_flight_; }
  bool is_asynchronous() const { return transfer_->is_asynchronous(); }

  // Writes a slot of host memory to a file; returns false on failure.
  bool write(int32_t memory_slot, int32_t disk_slot, const PageKey& key);

  // A file into a slot of host memory; false if it is not what was written.
  bool read(int32_t disk_slot, const PageKey& key, int32_t memory_slot);

  // Empty: there are no files.
  std::string directory() const { return directory_ ? directory_->path() : std::string(); }

 private:
  PageStore(const PageStoreOptions& options, PageTransfer& transfer);
  std::byte* slot_data(int32_t memory_slot) const;

  PageTransfer* transfer_;
  const int64_t page_bytes_;
  SlotList host_, staging_, disk_;
  std::unique_ptr<HostMemory> memory_;  // [memory slots, page_bytes]
  std::unique_ptr<PageDirectory> directory_;
  std::vector<EndedCopy> ended_;
  int64_t in_flight_ = 0;
};

}  // namespace fathom
