// Atomic file writes: written under another name, synced to disk, then renamed. An interrupted run
// leaves NAME.partial, which the next one overwrites.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

inline constexpr std::string_view kPartialSuffix = ".partial";

class FileWriter {
 public:
  // Room for `bytes` is reserved where the file system can: a full disk is an error here.
  static Result<FileWriter> create(const std::string& path, int64_t bytes);

  FileWriter(FileWriter&& other) noexcept;
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();  // removes what finish() has not completed

  // All of it at `offset`, or an error. May be called by any number of threads at once.
  Result<> write(const void* data, int64_t bytes, int64_t offset) const;

  // Once, after all writes: from here on the file is there, also after a loss of power.
  Result<> finish();

 private:
  FileWriter(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;  // its final name
  int descriptor_ = -1;
};

// The same for a text in memory.
Result<> write_whole_file(const std::string& path, std::string_view text);

}  // namespace fathom
