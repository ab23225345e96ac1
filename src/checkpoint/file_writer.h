// Atomic file writes: written as NAME.partial, synced to disk, then renamed. An interrupted run
// leaves NAME.partial, which the next run overwrites.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

inline constexpr std::string_view kPartialSuffix = ".partial";

class FileWriter {
 public:
  // Reserves space for `bytes` where the file system supports it: a full disk is an error here,
  // kTooLarge.
  static Result<FileWriter> create(const std::string& path, int64_t bytes);

  FileWriter(FileWriter&& other) noexcept;
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();  // removes the file if finish() has not completed

  // Writes all of `data` at `offset`, or returns an error. Any number of threads may call it at
  // once.
  Result<> write(const void* data, int64_t bytes, int64_t offset) const;

  // Call once, after all writes: syncs and renames. After it the file survives a power failure.
  Result<> finish();

 private:
  FileWriter(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;  // its final name
  int descriptor_ = -1;
};

// Writes a text in memory the same way.
Result<> write_whole_file(const std::string& path, std::string_view text);

}  // namespace fathom
