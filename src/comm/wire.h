// Records between processes of one cluster: little-endian numbers and texts with their lengths.
// A reader never reads past the end; what is malformed sets failed().
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

static_assert(std::endian::native == std::endian::little);

class WireWriter {
 public:
  void u32(uint32_t value) { raw(&value, sizeof value); }
  void u64(uint64_t value) { raw(&value, sizeof value); }
  void text(std::string_view value) {
    u32(static_cast<uint32_t>(value.size()));
    raw(value.data(), value.size());
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  void raw(const void* data, size_t size) {
    const size_t before = bytes_.size();
    bytes_.resize(before + size);
    if (size > 0) std::memcpy(bytes_.data() + before, data, size);
  }
  std::vector<std::byte> bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint32_t u32() {
    uint32_t value = 0;
    raw(&value, sizeof value);
    return value;
  }
  uint64_t u64() {
    uint64_t value = 0;
    raw(&value, sizeof value);
    return value;
  }
  std::string text() {
    const uint32_t size = u32();
    if (failed_ || size > bytes_.size()) {
      failed_ = true;
      return {};
    }
    std::string value(size, '\0');
    raw(value.data(), size);
    return value;
  }
  // Whether something was missing.
  bool failed() const { return failed_; }
  // Whether all was there and nothing is left.
  bool ended() const { return !failed_ && bytes_.empty(); }

 private:
  void raw(void* to, size_t size) {
    if (failed_ || size > bytes_.size()) {
      failed_ = true;
      return;
    }
    if (size > 0) std::memcpy(to, bytes_.data(), size);
    bytes_ = bytes_.subspan(size);
  }
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

}  // namespace fathom
