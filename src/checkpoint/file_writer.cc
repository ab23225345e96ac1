#include "checkpoint/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

namespace fathom {
namespace {

std::string partial_name(const std::string& path) { return path + std::string(kPartialSuffix); }

tl::unexpected<Status> failed(const std::string& path, std::string_view what, int code) {
  const bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
  return error(full ? Code::kTooLarge : Code::kInternal, "{}: {} failed: {}", path, what,
               std::strerror(code));
}

// A rename is durable only when its directory is synced.
Result<> sync_directory_of(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  const int descriptor =
      ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return failed(directory, "opening the directory", errno);
  const int code = fsync(descriptor) == 0 ? 0 : errno;
  close(descriptor);
  // Some file systems do not support this and return EINVAL.
  if (code != 0 && code != EINVAL) return failed(directory, "syncing the directory", code);
  return {};
}

}  // namespace

Result<FileWriter> FileWriter::create(const std::string& path, int64_t bytes) {
  const std::string partial = partial_name(path);
  const int descriptor =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (descriptor < 0) return failed(partial, "creating it", errno);
  FileWriter writer(path, descriptor);
  if (bytes > 0 && fallocate(descriptor, 0, 0, bytes) != 0 && errno != EOPNOTSUPP) {
    return failed(partial, fmt::format("reserving {} bytes", bytes), errno);
  }
  return writer;
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

FileWriter::~FileWriter() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(partial_name(path_).c_str());
}

Result<> FileWriter::write(const void* data, int64_t bytes, int64_t offset) const {
  const auto* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = pwrite(descriptor_, source, static_cast<size_t>(bytes), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      return failed(partial_name(path_), fmt::format("writing {} bytes at {}", bytes, offset),
                    put < 0 ? errno : ENOSPC);
    }
    source += put;
    offset += put;
    bytes -= put;
  }
  return {};
}

Result<> FileWriter::finish() {
  const std::string partial = partial_name(path_);
  if (fsync(descriptor_) != 0) return failed(partial, "syncing it", errno);
  if (std::rename(partial.c_str(), path_.c_str()) != 0) {
    return failed(partial, fmt::format("renaming it to {}", path_), errno);
  }
  close(std::exchange(descriptor_, -1));
  return sync_directory_of(path_);
}

Result<> write_whole_file(const std::string& path, std::string_view text) {
  const auto bytes = static_cast<int64_t>(text.size());
  FATHOM_TRY(FileWriter writer, FileWriter::create(path, bytes));
  FATHOM_RETURN_IF_ERROR(writer.write(text.data(), bytes, 0));
  return writer.finish();
}

}  // namespace fathom
