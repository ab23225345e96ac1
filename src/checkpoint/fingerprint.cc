#include "checkpoint/fingerprint.h"

#define XXH_INLINE_ALL  // header only: nothing to link
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/json.h"
#include "checkpoint/file_reader.h"

namespace fathom {
namespace {

constexpr int64_t kSampledTensors = 64, kSampleBytes = 4096;
constexpr int64_t kMostConfigBytes = 16 << 20;

class Hash {
 public:
  void add(const void* data, int64_t bytes) {
    const XXH128_hash_t next =
        XXH3_128bits_withSeed(data, static_cast<size_t>(bytes), low_ ^ (high_ << 1));
    low_ = next.low64;
    high_ = next.high64;
  }
  void add(std::string_view text) { add(text.data(), std::ssize(text)); }
  std::string text() const { return fmt::format("{:016x}{:016x}", high_, low_); }

 private:
  uint64_t low_ = 0, high_ = 0;
};

// Bytes from the middle of a tensor: its ends may be padding that all trainings share.
Result<> add_sample(const Checkpoint& checkpoint, const TensorEntry& tensor,
                    std::map<int, FileReader>& files, Hash& hash) {
  auto file = files.find(tensor.file);
  if (file == files.end()) {
    FATHOM_TRY(FileReader opened, FileReader::open(checkpoint.file_of(tensor)));
    file = files.emplace(tensor.file, std::move(opened)).first;
  }
  std::array<std::byte, kSampleBytes> bytes;
  const int64_t size = std::min(tensor.bytes, kSampleBytes);
  FATHOM_RETURN_IF_ERROR(
      file->second.read(bytes.data(), size, tensor.offset + (tensor.bytes - size) / 2));
  hash.add(bytes.data(), size);
  return {};
}

}  // namespace

Result<std::string> fingerprint(const Checkpoint& checkpoint) {
  Hash hash;
  FATHOM_TRY(const std::string config,
             read_text_file(checkpoint.directory() + "/config.json", kMostConfigBytes));
  hash.add(config);
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    hash.add(name);
    hash.add(name_of(tensor.dtype));
    hash.add(tensor.shape.data(), std::ssize(tensor.shape) * static_cast<int64_t>(sizeof(int64_t)));
  }
  if (checkpoint.is_dummy()) return hash.text();
  std::map<int, FileReader> files;
  const auto count = std::ssize(checkpoint.tensors());
  int64_t index = 0, sampled = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    // Evenly over all tensors.
    if (index++ * kSampledTensors < sampled * count) continue;
    ++sampled;
    FATHOM_RETURN_IF_ERROR(add_sample(checkpoint, tensor, files, hash));
  }
  return hash.text();
}

}  // namespace fathom
