// UTF-8: decoding, validation, and incomplete characters at the end of a stream.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fathom {

// U+FFFD, which replaces ill-formed bytes.
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Utf8Char {
  char32_t code_point = 0;  // 0xFFFD when the bytes are ill-formed
  int length = 0;           // bytes consumed; 1 for an ill-formed byte
  bool valid = false;
};

// Decodes the character at text[position]; requires position < text.size(). Overlong forms,
// surrogates and values above U+10FFFF are ill-formed (Unicode 15, table 3-7).
Utf8Char decode_utf8(std::string_view text, size_t position);

void append_utf8(std::string& out, char32_t code_point);

bool is_valid_utf8(std::string_view text);

// The length of the longest prefix of `text` that does not end inside a character that more bytes
// could complete. Ill-formed bytes that nothing can complete count as complete.
size_t complete_utf8_prefix(std::string_view text);

// Returns `text` with each maximal ill-formed part replaced by U+FFFD, as the Unicode standard
// recommends (and as Rust's from_utf8_lossy and Python's errors="replace" do).
std::string replace_ill_formed(std::string_view text);

}  // namespace fathom
