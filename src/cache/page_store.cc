#include "cache/page_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <utility>

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include "base/check.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

struct FileHeader {
  uint64_t low = 0, high = 0;  // of the key and the bytes
};

// A checksum against damage, not against an enemy: who can write to the directory of this process
// can do worse. The key is a secret of the process, so an old or exchanged file never fits.
FileHeader checksum(const PageKey& key, const std::byte* bytes, int64_t count) {
  const XXH128_hash_t hash =
      XXH3_128bits_withSeed(bytes, static_cast<size_t>(count), key.low ^ (key.high << 1));
  return {hash.low64 ^ key.low, hash.high64 ^ key.high};
}

// Reads or writes all of it, or says false.
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

int64_t slots_in(int64_t bytes, int64_t page_bytes) {
  return std::min<int64_t>(bytes / page_bytes, std::numeric_limits<int32_t>::max() / 4);
}

}  // namespace

SlotList::SlotList(int64_t count) : total_(count) {
  for (int64_t slot = count - 1; slot >= 0; --slot) free_.push_back(static_cast<int32_t>(slot));
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
      host_(slots_in(options.host_bytes, page_bytes_)),
      disk_(options.directory.empty() ? 0 : slots_in(options.disk_bytes, page_bytes_)) {}

Result<std::unique_ptr<PageStore>> PageStore::create(const PageStoreOptions& options,
                                                     PageTransfer& transfer) {
  std::unique_ptr<PageStore> store(new PageStore(options, transfer));
  if (options.host_bytes > 0 && store->host_.total() == 0) {
    return invalid("kv_offload_bytes is {}, less than one page of {} bytes", options.host_bytes,
                   store->page_bytes_);
  }
  FATHOM_TRY(store->memory_, Buffer::allocate((store->host_.total() + 1) * store->page_bytes_,
                                              "pages in host memory"));
  if (options.directory.empty()) return store;
  if (store->disk_.total() == 0) {
    return invalid("kv_offload_disk_bytes is {}, less than one page of {} bytes",
                   options.disk_bytes, store->page_bytes_);
  }
  std::string name = (fs::path(options.directory) / "fathom-pages-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    return invalid("kv_offload_dir {}: {}", options.directory, std::strerror(errno));
  }
  store->directory_ = name;
  return store;
}

PageStore::~PageStore() {
  transfer_->finish();
  if (directory_.empty()) return;
  std::error_code failure;
  fs::remove_all(directory_, failure);  // what stays is never read again
}

std::byte* PageStore::slot_data(int32_t host_slot) {
  return memory_.data() + host_slot * page_bytes_;
}

void PageStore::save(int32_t page, int32_t host_slot) {
  transfer_->save(page, slot_data(host_slot));
}

void PageStore::load(int32_t host_slot, int32_t page) {
  transfer_->load(slot_data(host_slot), page);
}

bool PageStore::write_page(int32_t page, int32_t disk_slot, const PageKey& key) {
  std::byte* bytes = slot_data(static_cast<int32_t>(host_.total()));
  transfer_->finish();  // it may still be on its way into a page
  transfer_->save(page, bytes);
  transfer_->finish();
  return write(bytes, disk_slot, key);
}

bool PageStore::write_slot(int32_t host_slot, int32_t disk_slot, const PageKey& key) {
  transfer_->finish();
  return write(slot_data(host_slot), disk_slot, key);
}

std::string PageStore::file_of(int32_t disk_slot) const {
  return fmt::format("{}/{}.page", directory_, disk_slot);
}

int PageStore::open_file(int32_t disk_slot, int flags) const {
  try {
    return open(file_of(disk_slot).c_str(), flags | O_CLOEXEC, 0600);
  } catch (const std::bad_alloc&) {  // no memory for its name: a file like others that fail
    return -1;
  }
}

bool PageStore::write(const std::byte* bytes, int32_t disk_slot, const PageKey& key) {
  const int file = open_file(disk_slot, O_WRONLY | O_CREAT | O_TRUNC);
  if (file < 0) return false;
  const FileHeader header = checksum(key, bytes, page_bytes_);
  const auto* head = reinterpret_cast<const std::byte*>(&header);
  const bool written = transfer_all(::write, file, head, sizeof header) &&
                       transfer_all(::write, file, bytes, static_cast<size_t>(page_bytes_));
  return close(file) == 0 && written;
}

bool PageStore::read(int32_t disk_slot, const PageKey& key, int32_t page) {
  const int file = open_file(disk_slot, O_RDONLY);
  if (file < 0) return false;
  transfer_->finish();
  std::byte* bytes = slot_data(static_cast<int32_t>(host_.total()));
  FileHeader header;
  const bool is_read =
      transfer_all(::read, file, reinterpret_cast<std::byte*>(&header), sizeof header) &&
      transfer_all(::read, file, bytes, static_cast<size_t>(page_bytes_));
  close(file);
  if (!is_read) return false;
  const FileHeader expected = checksum(key, bytes, page_bytes_);
  if (header.low != expected.low || header.high != expected.high) return false;
  transfer_->load(bytes, page);
  return true;
}

}  // namespace fathom
