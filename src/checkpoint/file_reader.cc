#include "checkpoint/file_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace fathom {

Result<FileReader> FileReader::open(const std::string& path) {
  // O_NONBLOCK: open() must not wait for a pipe's writer; pipes are refused below.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    const int code = errno;
    return error(code == ENOENT ? Code::kNotFound : Code::kInvalidArgument,
                 "{}: cannot be read: {}", path, std::strerror(code));
  }
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor);
    return invalid("{}: not a regular file", path);
  }
  // Doubles the kernel's read-ahead. A hint, so its result is ignored.
  posix_fadvise(descriptor, 0, 0, POSIX_FADV_SEQUENTIAL);
  return FileReader(path, descriptor, static_cast<int64_t>(status.st_size));
}

FileReader::FileReader(FileReader&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

FileReader& FileReader::operator=(FileReader&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

FileReader::~FileReader() {
  if (descriptor_ >= 0) close(descriptor_);
}

Result<> FileReader::read(void* destination, int64_t bytes, int64_t offset) const {
  auto* target = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, target, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return error(Code::kInternal, "{}: reading {} bytes at {} failed: {}", path_, bytes, offset,
                   std::strerror(errno));
    }
    if (got == 0) {
      return invalid(
          "{}: ended at byte {} while {} more were to be read (truncated since it was "
          "opened?)",
          path_, offset, bytes);
    }
    target += got;
    offset += got;
    bytes -= got;
  }
  return {};
}

}  // namespace fathom
