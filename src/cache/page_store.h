// The bytes of pages that the pool has no room for: in host memory, and below that in files.
//
// Knows slots, not texts: which text a slot holds, and which goes first, is the prefix tree's. A
// slot is taken, filled, read as often as wanted, and given back. Files lie in a new directory of
// this process's own under the one that was named, and go with it; what another process left there
// is never read. A file's checksum covers the page's key and bytes: one that is damaged, exchanged
// or gone is a miss. Used by the engine's thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/page_transfer.h"
#include "cache/prefix_key.h"
#include "tensor/buffer.h"

namespace fathom {

struct PageStoreOptions {
  int64_t host_bytes = 0;
  std::string directory = {};  // empty: no files
  int64_t disk_bytes = 0;
};

// Slots that are free, as a stack.
class SlotList {
 public:
  explicit SlotList(int64_t count);
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
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  SlotList& host() { return host_; }
  SlotList& disk() { return disk_; }

  void save(int32_t page, int32_t host_slot);
  void load(int32_t host_slot, int32_t page);

  // A page of the pool, or a host slot, into a file; false if it could not be written.
  bool write_page(int32_t page, int32_t disk_slot, const PageKey& key);
  bool write_slot(int32_t host_slot, int32_t disk_slot, const PageKey& key);

  // A file into a page of the pool; false, and the page as it was, if it is not what was written.
  bool read(int32_t disk_slot, const PageKey& key, int32_t page);

  const std::string& directory() const { return directory_; }  // of this process; empty: none
  std::string file_of(int32_t disk_slot) const;
  int open_file(int32_t disk_slot, int flags) const;  // -1: it cannot be opened

 private:
  PageStore(const PageStoreOptions& options, PageTransfer& transfer);
  std::byte* slot_data(int32_t host_slot);
  bool write(const std::byte* bytes, int32_t disk_slot, const PageKey& key);

  PageTransfer* transfer_;
  const int64_t page_bytes_;
  SlotList host_, disk_;
  Buffer
      memory_;  // [host slots + 1, page_bytes]: the last is for what goes to files and comes back
  std::string directory_;
};

}  // namespace fathom
