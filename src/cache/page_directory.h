// A directory of this process's own for page files, below the one that the option names.
//
// It is locked (flock) as long as the process lives and removed with its files when it ends.
// Directories of killed processes are unlocked: the next start removes them here. Files are opened
// relative to the directory, without following links and without blocking on a FIFO, and only
// regular files are used. Used by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace fathom {

class PageDirectory {
 public:
  // kInvalidArgument: no directory can be created there.
  static Result<std::unique_ptr<PageDirectory>> create(const std::string& parent);
  ~PageDirectory();
  PageDirectory(const PageDirectory&) = delete;
  PageDirectory& operator=(const PageDirectory&) = delete;

  const std::string& path() const { return path_; }

  // Returns a descriptor of the page's regular file, which the caller closes; -1 if there is none.
  // For writing, the file is created or truncated.
  int open_to_read(int32_t slot) const;
  int open_to_write(int32_t slot) const;

 private:
  PageDirectory(std::string path, int descriptor)
      : path_(std::move(path)), descriptor_(descriptor) {}

  std::string path_;
  int descriptor_;  // of the directory; holds the lock
};

}  // namespace fathom
