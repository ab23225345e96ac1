#include "cache/page_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

namespace fathom {
namespace {

constexpr std::string_view kPrefix = "fathom-pages-", kSuffix = ".page";
constexpr int kRandomLetters = 6;  // mkdtemp's
constexpr int kAttempts = 8;       // another process may sweep a new directory

using Directory = std::unique_ptr<DIR, int (*)(DIR*)>;

// Null if it cannot be read. The caller keeps the descriptor.
Directory entries_of(int descriptor) {
  const int copy = openat(descriptor, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  Directory entries(copy < 0 ? nullptr : fdopendir(copy), closedir);
  if (!entries && copy >= 0) close(copy);
  return entries;
}

bool is_page_file(std::string_view name) {
  return name.ends_with(kSuffix) &&
         name.find_first_not_of("0123456789") == name.size() - kSuffix.size();
}

// Foreign files stay, and the directory with them.
void remove_directory(int parent, const char* name, int descriptor) {
  if (const Directory entries = entries_of(descriptor)) {
    while (const dirent* entry = readdir(entries.get())) {
      if (is_page_file(entry->d_name)) unlinkat(descriptor, entry->d_name, 0);
    }
  }
  unlinkat(parent, name, AT_REMOVEDIR);
}

int open_directory(int parent, const char* name) {
  return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
}

// Removes directories of processes that have ended: a lock ends with its holder.
void sweep(int parent) {
  const Directory entries = entries_of(parent);
  if (!entries) return;
  while (const dirent* entry = readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + kRandomLetters) continue;
    const int descriptor = open_directory(parent, entry->d_name);
    if (descriptor < 0) continue;
    struct stat status = {};
    if (fstat(descriptor, &status) == 0 && status.st_uid == geteuid() &&
        flock(descriptor, LOCK_EX | LOCK_NB) == 0) {
      remove_directory(parent, entry->d_name, descriptor);
    }
    close(descriptor);
  }
}

// "123.page", without an allocation: this runs while serving.
std::array<char, 24> file_name(int32_t slot) {
  std::array<char, 24> name = {};
  char* const end = std::to_chars(name.data(), name.data() + 12, slot).ptr;
  std::memcpy(end, kSuffix.data(), kSuffix.size());
  return name;
}

int open_page(int directory, int32_t slot, int flags) {
  const int file =
      openat(directory, file_name(slot).data(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  if (file < 0) return -1;
  struct stat status = {};
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode)) return file;
  close(file);
  return -1;
}

}  // namespace

Result<std::unique_ptr<PageDirectory>> PageDirectory::create(const std::string& parent) {
  const auto failed = [&] {
    return invalid("kv_offload_dir {}: {}", parent, std::strerror(errno));
  };
  const int above = open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
  if (above < 0) return failed();
  sweep(above);
  close(above);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::string path =
        fmt::format("{}{}{}XXXXXX", parent, parent.ends_with('/') ? "" : "/", kPrefix);
    if (mkdtemp(path.data()) == nullptr) return failed();
    const int descriptor = open_directory(AT_FDCWD, path.c_str());
    if (descriptor < 0) {
      if (errno == ENOENT) continue;
      return failed();
    }
    // Before it was locked another process may have taken it for a dead one's and swept it.
    struct stat status = {};
    if (flock(descriptor, LOCK_EX) == 0 && fstat(descriptor, &status) == 0 && status.st_nlink > 0) {
      return std::unique_ptr<PageDirectory>(new PageDirectory(std::move(path), descriptor));
    }
    const int why = errno;
    close(descriptor);
    errno = why;
    if (status.st_nlink > 0) return failed();
  }
  return invalid("kv_offload_dir {}: other processes remove what is made there", parent);
}

PageDirectory::~PageDirectory() {
  remove_directory(AT_FDCWD, path_.c_str(), descriptor_);  // remaining files are never read again
  close(descriptor_);
}

int PageDirectory::open_to_read(int32_t slot) const {
  return open_page(descriptor_, slot, O_RDONLY);
}

int PageDirectory::open_to_write(int32_t slot) const {
  const int file = open_page(descriptor_, slot, O_WRONLY | O_CREAT);
  if (file < 0) return -1;
  if (ftruncate(file, 0) == 0) return file;
  close(file);
  return -1;
}

}  // namespace fathom
