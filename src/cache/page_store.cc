#include "cache/page_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include "base/check.h"

namespace fathom {
namespace {

struct FileHeader {
  uint64_t low = 0, high = 0;  // of the key and the bytes
};

// A checksum against damage, not against an attacker: one who can write to this process's directory
// can do worse. The key is a secret of the process, so an old or exchanged file never matches.
FileHeader checksum(const PageKey& key, const std::byte* bytes, int64_t count) {
  const XXH128_hash_t hash =
      XXH3_128bits_withSeed(bytes, static_cast<size_t>(count), key.low ^ (key.high << 1));
  return {hash.low64 ^ key.low, hash.high64 ^ key.high};
}

// Reads or writes everything, or returns false.
template <typename Call, typename Byte>
bool transfer_all(Call call, int file, Byte* bytes, size_t count) {
  while (count > 0) {
    const ssize_t done = call(file, bytes, count);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes += done;
    count -= static_cast<size_t>(done);
  }
  return true;
}

// Pages in flight between the pool and files.
constexpr int64_t kStagingSlots = 16;

int64_t slots_in(int64_t bytes, int64_t page_bytes) {
  return std::min<int64_t>(bytes / page_bytes, std::numeric_limits<int32_t>::max() / 4);
}

// Names what was asked for, not a store's part of it.
tl::unexpected<Status> less_than_a_page(const char* field, int64_t bytes, int64_t page_bytes,
                                        int num_stores) {
  if (num_stores == 1) {
    return invalid("{} is {}, less than one page of {} bytes", field, bytes, page_bytes);
  }
  return invalid("{} is {}, less than one page of {} bytes in each of {} lanes", field, bytes,
                 page_bytes, num_stores);
}

}  // namespace

SlotList::SlotList(int32_t first, int64_t count) : total_(count) {
  free_.reserve(static_cast<size_t>(count));
  for (int64_t i = count - 1; i >= 0; --i) free_.push_back(first + static_cast<int32_t>(i));
}

int32_t SlotList::take() {
  FATHOM_CHECK(!free_.empty(), "none of {} slots is free", total_);
  const int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

PageStore::PageStore(const PageStoreOptions& options, PageTransfer& transfer)
    : transfer_(&transfer),
      page_bytes_(transfer.page_bytes()),
      host_(0, slots_in(options.host_bytes / options.num_stores, page_bytes_)),
      staging_(static_cast<int32_t>(host_.total()), options.directory.empty() ? 0 : kStagingSlots),
      disk_(0, options.directory.empty()
                   ? 0
                   : slots_in(options.disk_bytes / options.num_stores, page_bytes_)) {}

Result<std::unique_ptr<PageStore>> PageStore::create(const PageStoreOptions& options,
                                                     PageTransfer& transfer) {
  std::unique_ptr<PageStore> store(new PageStore(options, transfer));
  if (options.host_bytes > 0 && store->host_.total() == 0) {
    return less_than_a_page("kv_offload_bytes", options.host_bytes, store->page_bytes_,
                            options.num_stores);
  }
  if (!options.directory.empty()) {
    if (store->disk_.total() == 0) {
      return less_than_a_page("kv_offload_disk_bytes", options.disk_bytes, store->page_bytes_,
                              options.num_stores);
    }
    FATHOM_TRY(store->directory_, PageDirectory::create(options.directory));
  }
  store->ended_.reserve(static_cast<size_t>(store->num_memory_slots()));
  FATHOM_TRY(store->memory_, transfer.allocate_slots(store->num_memory_slots()));
  return store;
}

PageStore::~PageStore() {
  while (in_flight_ > 0) take_ended(/*wait=*/true);
}

std::byte* PageStore::slot_data(int32_t memory_slot) const {
  return memory_->data() + memory_slot * page_bytes_;
}

void PageStore::save(int32_t page, int32_t memory_slot) {
  ++in_flight_;
  transfer_->save(page, slot_data(memory_slot), memory_slot);
}

void PageStore::load(int32_t memory_slot, int32_t page) {
  ++in_flight_;
  transfer_->load(slot_data(memory_slot), page, memory_slot);
}

const std::vector<EndedCopy>& PageStore::take_ended(bool wait) {
  ended_.clear();
  if (in_flight_ == 0) return ended_;
  transfer_->take_ended(ended_, wait);
  in_flight_ -= std::ssize(ended_);
  return ended_;
}

bool PageStore::write(int32_t memory_slot, int32_t disk_slot, const PageKey& key) {
  const int file = directory_->open_to_write(disk_slot);
  if (file < 0) return false;
  const std::byte* const bytes = slot_data(memory_slot);
  const FileHeader header = checksum(key, bytes, page_bytes_);
  const auto* head = reinterpret_cast<const std::byte*>(&header);
  const bool written = transfer_all(::write, file, head, sizeof header) &&
                       transfer_all(::write, file, bytes, static_cast<size_t>(page_bytes_));
  return close(file) == 0 && written;
}

bool PageStore::read(int32_t disk_slot, const PageKey& key, int32_t memory_slot) {
  const int file = directory_->open_to_read(disk_slot);
  if (file < 0) return false;
  std::byte* const bytes = slot_data(memory_slot);
  FileHeader header;
  const bool is_read =
      transfer_all(::read, file, reinterpret_cast<std::byte*>(&header), sizeof header) &&
      transfer_all(::read, file, bytes, static_cast<size_t>(page_bytes_));
  close(file);
  if (!is_read) return false;
  const FileHeader expected = checksum(key, bytes, page_bytes_);
  return header.low == expected.low && header.high == expected.high;
}

}  // namespace fathom
