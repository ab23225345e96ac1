// The character classes of DeepSeek's pre-tokenizer patterns, one byte per code point. Computed in
// blocks of 256 when first used: all of Unicode would cost more than loading the vocabulary. Any
// thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace fathom {

enum CharClass : uint8_t {
  kLetter = 1,        // \p{L} or \p{M}
  kNumber = 2,        // \p{N}
  kPunctuation = 4,   // \p{P} or \p{S}
  kSpace = 8,         // \s, \r and \n included
  kNewline = 16,      // \r or \n
  kHan = 32,          // U+4E00-9FA5 and the kana blocks; then no other bit is set
  kAsciiLetter = 64,  // [A-Za-z], kLetter too
};

class CharClasses {
 public:
  // Shared by all tokenizers: Unicode is the same for all.
  static const CharClasses& instance();

  // The class of a kHan character for a pattern applied inside a Han run. Nearly all are letters or
  // marks. Three code points of the kana blocks are not assigned (Unicode 16).
  static uint8_t inside_han_run(char32_t code_point) {
    switch (code_point) {
      case 0x309B:
      case 0x309C:
      case 0x30A0:
      case 0x30FB:
        return kPunctuation;
      case 0x3040:
      case 0x3097:
      case 0x3098:
        return 0;
      default:
        return kLetter;
    }
  }

  ~CharClasses();

  uint8_t ascii(uint8_t byte) const { return ascii_[byte]; }
  uint8_t of(char32_t code_point) const {
    const uint8_t* block = blocks_[code_point >> 8].load(std::memory_order_acquire);
    if (block == nullptr) [[unlikely]]
      block = make_block(code_point >> 8);
    return block[code_point & 0xFF];
  }

 private:
  CharClasses();
  const uint8_t* make_block(char32_t index) const;

  std::array<uint8_t, 128> ascii_{};
  // 0x110000 / 256 blocks, null until first used and never changed afterwards.
  mutable std::array<std::atomic<const uint8_t*>, 0x1100> blocks_{};
};

}  // namespace fathom
