#include "tokenizer/byte_level.h"

#include <array>

#include "base/utf8.h"

namespace fathom {
namespace {

constexpr char32_t kFirstMovedGlyph = 0x100;
constexpr int kMovedGlyphs = 68;
constexpr char32_t kGlyphEnd = kFirstMovedGlyph + kMovedGlyphs;

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<char32_t, 256> glyph{};
  std::array<int16_t, kGlyphEnd> byte{};  // -1: no glyph

  constexpr Alphabet() {
    byte.fill(-1);
    char32_t moved = kFirstMovedGlyph;
    for (int b = 0; b < 256; ++b) {
      glyph[b] = stands_for_itself(b) ? static_cast<char32_t>(b) : moved++;
      byte[glyph[b]] = static_cast<int16_t>(b);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

char32_t byte_glyph(uint8_t byte) { return kAlphabet.glyph[byte]; }

std::optional<std::string> bytes_of_glyphs(std::string_view glyphs) {
  std::string bytes;
  bytes.reserve(glyphs.size());
  for (size_t i = 0; i < glyphs.size();) {
    const Utf8Char c = decode_utf8(glyphs, i);
    if (!c.valid || c.code_point >= kGlyphEnd || kAlphabet.byte[c.code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kAlphabet.byte[c.code_point]));
    i += c.length;
  }
  return bytes;
}

std::string glyphs_of_bytes(std::string_view bytes) {
  std::string glyphs;
  for (const char byte : bytes) append_utf8(glyphs, byte_glyph(static_cast<uint8_t>(byte)));
  return glyphs;
}

}  // namespace fathom
