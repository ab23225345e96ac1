// Positional reads from a file, by any number of threads at once. Uses read calls instead of a
// memory map: a file that shrinks or a disk that fails is then an error that names the file, not a
// signal.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace fathom {

class FileReader {
 public:
  // Opens a regular file (links are followed). Errors name the path.
  static Result<FileReader> open(const std::string& path);

  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&& other) noexcept;
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened

  // Reads all of [offset, offset + bytes), or returns an error.
  Result<> read(void* destination, int64_t bytes, int64_t offset) const;

 private:
  FileReader(std::string path, int descriptor, int64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace fathom
