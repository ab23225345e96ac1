// Writes the part of MessagePack that cache events need:
// https://github.com/msgpack/msgpack/blob/master/spec.md
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace fathom {

class MsgpackWriter {
 public:
  explicit MsgpackWriter(std::string& out) : out_(out) {}

  void nil() { byte(0xc0); }
  void real(double value) { tagged(0xcb, std::bit_cast<uint64_t>(value)); }
  void integer(uint64_t value) {
    if (value < 0x80) {
      byte(static_cast<uint8_t>(value));
    } else if (value <= 0xff) {
      tagged(0xcc, static_cast<uint8_t>(value));
    } else if (value <= 0xffff) {
      tagged(0xcd, static_cast<uint16_t>(value));
    } else if (value <= 0xffff'ffff) {
      tagged(0xce, static_cast<uint32_t>(value));
    } else {
      tagged(0xcf, value);
    }
  }
  // At most 31 bytes.
  void text(std::string_view value) {
    byte(static_cast<uint8_t>(0xa0 | value.size()));
    out_ += value;
  }
  // So many values follow, at most 2^32 - 1.
  void array(size_t count) {
    if (count < 16) {
      byte(static_cast<uint8_t>(0x90 | count));
    } else if (count <= 0xffff) {
      tagged(0xdc, static_cast<uint16_t>(count));
    } else {
      tagged(0xdd, static_cast<uint32_t>(count));
    }
  }

 private:
  void byte(uint8_t value) { out_ += static_cast<char>(value); }
  // The most significant byte first.
  template <typename T>
  void tagged(uint8_t tag, T value) {
    byte(tag);
    for (int shift = 8 * (static_cast<int>(sizeof(T)) - 1); shift >= 0; shift -= 8) {
      byte(static_cast<uint8_t>(value >> shift));
    }
  }

  std::string& out_;
};

}  // namespace fathom
