// Records between processes of one cluster: little-endian numbers, and texts and arrays with their
// lengths. A reader never reads past the end; what is malformed sets failed().
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace fathom {

static_assert(std::endian::native == std::endian::little);

class WireWriter {
 public:
  void u32(uint32_t value) { raw(&value, sizeof value); }
  void u64(uint64_t value) { raw(&value, sizeof value); }
  void i32(int32_t value) { raw(&value, sizeof value); }
  void i64(int64_t value) { raw(&value, sizeof value); }
  void f32(float value) { raw(&value, sizeof value); }
  void f64(double value) { raw(&value, sizeof value); }
  // T: a number.
  template <typename T>
  void array(std::span<const T> values) {
    static_assert(std::is_arithmetic_v<T>);
    u64(values.size());
    raw(values.data(), values.size_bytes());
  }
  void text(std::string_view value) {
    u32(static_cast<uint32_t>(value.size()));
    raw(value.data(), value.size());
  }
  std::span<const std::byte> bytes() const { return bytes_; }
  // Forgets what was written and keeps the memory.
  void clear() { bytes_.clear(); }

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
  int32_t i32() { return static_cast<int32_t>(u32()); }
  int64_t i64() { return static_cast<int64_t>(u64()); }
  float f32() { return std::bit_cast<float>(u32()); }
  double f64() { return std::bit_cast<double>(u64()); }
  // Replaces `values`; allocates no more than the record has bytes.
  template <typename T>
  void array(std::vector<T>& values) {
    static_assert(std::is_arithmetic_v<T>);
    values.resize(count(sizeof(T)));
    raw(values.data(), values.size() * sizeof(T));
  }
  // A number of entries of at least `entry_bytes` bytes each that follow; 0 if there are not as
  // many bytes left.
  size_t count(size_t entry_bytes) {
    const uint64_t entries = u64();
    if (!failed_ && entries > bytes_.size() / entry_bytes) failed_ = true;
    return failed_ ? 0 : static_cast<size_t>(entries);
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
