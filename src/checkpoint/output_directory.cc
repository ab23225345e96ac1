#include "checkpoint/output_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include "base/json.h"
#include "base/log.h"
#include "checkpoint/file_writer.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

// DeepSeek-V3 has 163 files.
constexpr int64_t kMaxRecordBytes = 16 << 20;
// The largest vocabulary's tokenizer.json has 9 MB. Larger files are not copied.
constexpr int64_t kMaxCopiedBytes = 64 << 20;

// The first line in which two records differ, from each record.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream lines_a(a), lines_b(b);
  std::string line_a, line_b;
  do {
    if (!std::getline(lines_a, line_a)) line_a = "nothing more";
    if (!std::getline(lines_b, line_b)) line_b = "nothing more";
  } while (line_a == line_b && lines_a && lines_b);
  return {line_a, line_b};
}

Result<> check_record(const std::string& directory, const std::string& path,
                      const std::string& record) {
  FATHOM_TRY(const std::string found, read_text_file(path, kMaxRecordBytes));
  if (found == record) return {};
  const auto [then, now] = first_difference(found, record);
  return invalid(
      "{}: an unfinished run is here that was begun otherwise: \"{}\", now \"{}\"; give the same "
      "source and flags again, or remove the directory",
      directory, then, now);
}

// The first file that prevents a new run; empty if there is none. An unfinished record file, left
// by a run that was interrupted while writing it, does not count.
std::string found_in(const std::string& directory, const std::string& record_name) {
  std::error_code failure;
  std::string first;
  for (fs::directory_iterator it(directory, failure), end; !failure && it != end;
       it.increment(failure)) {
    const std::string name = it->path().filename().string();
    if (name == record_name + std::string(kPartialSuffix)) continue;
    if (first.empty() || name < first) first = name;
  }
  return first;
}

}  // namespace

Result<std::string> describe_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    return invalid("{}: cannot be read: {}", path, std::strerror(errno));
  }
  return fmt::format("{} has {} bytes of time {}.{:09}\n", fs::path(path).filename().string(),
                     status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

Result<OutputDirectory> OutputDirectory::open(const std::string& directory,
                                              const std::string& command,
                                              const std::string& record) {
  std::error_code failure;
  fs::create_directories(directory, failure);
  if (failure) return invalid("{}: cannot be made: {}", directory, failure.message());
  const int lock = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock < 0) return invalid("{}: cannot be opened: {}", directory, std::strerror(errno));
  OutputDirectory output(directory, ".fathom-" + command, lock);
  // On a file system without locks a concurrent run is not detected.
  if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return error(Code::kUnavailable, "{}: another `fathom {}` is writing there", directory,
                 command);
  }
  if (fs::exists(output.path(output.record_), failure)) {
    FATHOM_RETURN_IF_ERROR(check_record(directory, output.path(output.record_), record));
    return output;
  }
  if (const std::string name = found_in(directory, output.record_); !name.empty()) {
    return invalid("{}: is not empty, there is {:?}; the output is a new directory", directory,
                   name);
  }
  FATHOM_RETURN_IF_ERROR(write_whole_file(output.path(output.record_), record));
  return output;
}

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept
    : directory_(std::move(other.directory_)),
      record_(std::move(other.record_)),
      lock_(std::exchange(other.lock_, -1)) {}

OutputDirectory::~OutputDirectory() {
  if (lock_ >= 0) close(lock_);  // unlocks
}

Result<> OutputDirectory::finish() {
  if (unlink(path(record_).c_str()) != 0) {
    return error(Code::kInternal, "{}: cannot be removed: {}", path(record_), std::strerror(errno));
  }
  return {};
}

Result<> copy_small_files(const Checkpoint& checkpoint, const OutputDirectory& output) {
  std::error_code failure;
  for (fs::directory_iterator it(checkpoint.directory(), failure), end; !failure && it != end;
       it.increment(failure)) {
    const std::string name = it->path().filename().string();
    const std::string extension = it->path().extension().string();
    if (name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".index.json") ||
        name.starts_with('.') || extension == ".bin" || extension == ".pt" || extension == ".pth" ||
        extension == ".gguf") {
      continue;
    }
    std::error_code unreadable;
    if (!fs::is_regular_file(it->path(), unreadable)) continue;
    if (static_cast<int64_t>(fs::file_size(it->path(), unreadable)) > kMaxCopiedBytes) {
      log_warning("{}: larger than {} MiB, not copied", it->path().string(), kMaxCopiedBytes >> 20);
      continue;
    }
    FATHOM_TRY(const std::string text, read_text_file(it->path().string(), kMaxCopiedBytes));
    FATHOM_RETURN_IF_ERROR(write_whole_file(output.path(name), text));
  }
  if (failure) {
    return invalid("{}: cannot be listed: {}", checkpoint.directory(), failure.message());
  }
  return {};
}

}  // namespace fathom
