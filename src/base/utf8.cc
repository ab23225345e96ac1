#include "base/utf8.h"

namespace fathom {
namespace {

// What may follow a lead byte: the number of continuation bytes, and the range of the first one
// (Unicode 15, table 3-7).
struct Lead {
  int continuations;
  uint8_t low, high;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {0, 0, 0};
  if (byte >= 0xC2 && byte <= 0xDF) return {1, 0x80, 0xBF};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2, 0x80, 0xBF};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {3, 0x80, 0xBF};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {-1, 0, 0};
}

// The number of bytes from `position` on that form a well-formed beginning of a character; 0 if the
// lead byte cannot begin one. Sets `needed` to the character's length.
int well_formed_bytes(std::string_view text, size_t position, int* needed) {
  const auto byte_at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const Lead lead = lead_of(byte_at(position));
  *needed = lead.continuations + 1;
  if (lead.continuations < 0) return 0;
  int have = 1;
  while (have < *needed && position + have < text.size()) {
    const uint8_t byte = byte_at(position + have);
    const uint8_t low = have == 1 ? lead.low : 0x80;
    const uint8_t high = have == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) break;
    ++have;
  }
  return have;
}

}  // namespace

Utf8Char decode_utf8(std::string_view text, size_t position) {
  int needed = 0;
  const int have = well_formed_bytes(text, position, &needed);
  if (have == 0 || have < needed) return {0xFFFD, 1, false};
  const auto bits = [&](int i) { return static_cast<char32_t>(text[position + i] & 0x3F); };
  const auto lead = static_cast<uint8_t>(text[position]);
  switch (needed) {
    case 1:
      return {lead, 1, true};
    case 2:
      return {static_cast<char32_t>(lead & 0x1F) << 6 | bits(1), 2, true};
    case 3:
      return {static_cast<char32_t>(lead & 0x0F) << 12 | bits(1) << 6 | bits(2), 3, true};
    default:
      return {static_cast<char32_t>(lead & 0x07) << 18 | bits(1) << 12 | bits(2) << 6 | bits(3), 4,
              true};
  }
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

bool is_valid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text, i);
    if (!c.valid) return false;
    i += c.length;
  }
  return true;
}

size_t complete_utf8_prefix(std::string_view text) {
  const size_t first = text.size() > 3 ? text.size() - 3 : 0;
  for (size_t i = first; i < text.size(); ++i) {
    int needed = 0;
    const int have = well_formed_bytes(text, i, &needed);
    if (have > 0 && have < needed && i + have == text.size()) return i;
  }
  return text.size();
}

std::string replace_ill_formed(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    int needed = 0;
    const int have = well_formed_bytes(text, i, &needed);
    if (have > 0 && have == needed) {
      out.append(text.substr(i, have));
    } else {
      out.append(kReplacement);
    }
    i += have > 0 ? have : 1;
  }
  return out;
}

}  // namespace fathom
