#include "checkpoint/quantize_record.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include "base/json.h"
#include "checkpoint/file_writer.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecord = ".fathom-quantize";
// DeepSeek-V3 has 163 files.
constexpr int64_t kMaxRecordBytes = 16 << 20;

Result<std::string> file_line(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    return invalid("{}: cannot be read: {}", path, std::strerror(errno));
  }
  return fmt::format("{} has {} bytes of time {}.{:09}\n", fs::path(path).filename().string(),
                     status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

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

Result<> check_record(const std::string& directory, const std::string& record) {
  const std::string path = fmt::format("{}/{}", directory, kRecord);
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
std::string found_in(const std::string& directory) {
  std::error_code failure;
  std::string first;
  for (fs::directory_iterator it(directory, failure), end; !failure && it != end;
       it.increment(failure)) {
    const std::string name = it->path().filename().string();
    if (name == std::string(kRecord) + std::string(kPartialSuffix)) continue;
    if (first.empty() || name < first) first = name;
  }
  return first;
}

}  // namespace

Result<std::string> quantize_record(const Checkpoint& checkpoint, const QuantizeOptions& options) {
  std::string text =
      fmt::format("fathom quantize, form 2\nformat {}\nscale_fmt {}\nmax shard bytes {}\n",
                  name_of(options.format),
                  options.format.scale_form == ScaleForm::kPowerOfTwo ? "ue8m0" : "float",
                  options.max_shard_bytes);
  FATHOM_TRY(const std::string config, file_line(checkpoint.directory() + "/config.json"));
  text += config;
  for (const std::string& path : checkpoint.files()) {
    FATHOM_TRY(const std::string line, file_line(path));
    text += line;
  }
  return text;
}

Result<QuantizeOutput> QuantizeOutput::open(const std::string& directory,
                                            const std::string& record) {
  std::error_code failure;
  fs::create_directories(directory, failure);
  if (failure) return invalid("{}: cannot be made: {}", directory, failure.message());
  const int lock = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock < 0) return invalid("{}: cannot be opened: {}", directory, std::strerror(errno));
  QuantizeOutput output(directory, lock);
  // On a file system without locks a concurrent run is not detected.
  if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return error(Code::kUnavailable, "{}: another `fathom quantize` is writing there", directory);
  }
  if (fs::exists(output.path(kRecord), failure)) {
    FATHOM_RETURN_IF_ERROR(check_record(directory, record));
    return output;
  }
  if (const std::string name = found_in(directory); !name.empty()) {
    return invalid("{}: is not empty, there is {:?}; the output is a new directory", directory,
                   name);
  }
  FATHOM_RETURN_IF_ERROR(write_whole_file(output.path(kRecord), record));
  return output;
}

QuantizeOutput::QuantizeOutput(QuantizeOutput&& other) noexcept
    : directory_(std::move(other.directory_)), lock_(std::exchange(other.lock_, -1)) {}

QuantizeOutput::~QuantizeOutput() {
  if (lock_ >= 0) close(lock_);  // unlocks
}

Result<> QuantizeOutput::finish() {
  if (unlink(path(kRecord).c_str()) != 0) {
    return error(Code::kInternal, "{}: cannot be removed: {}", path(kRecord), std::strerror(errno));
  }
  return {};
}

}  // namespace fathom
