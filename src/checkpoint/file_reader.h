// A file that is read at given places, by any number of threads at once. Plain reads and no memory
// map: a file that shrinks or a disk that fails is then an error with the file's name, not a
// signal.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace fathom {

class FileReader {
 public:
  // Regular files only (links are followed); errors name the path.
  static Result<FileReader> open(const std::string& path);

  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&& other) noexcept;
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened

  // All of [offset, offset + bytes), or an error.
  Result<> read(void* destination, int64_t bytes, int64_t offset) const;

 private:
  FileReader(std::string path, int descriptor, int64_t size)
      : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace fathom
