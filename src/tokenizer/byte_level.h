// The byte-level alphabet of GPT-2: each byte is written as one printable character, so that a
// vocabulary of byte strings fits in JSON. Printable Latin-1 bytes stand for themselves, the other
// 68 are U+0100 and up in byte order (a space is U+0120, "Ġ").
// Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", their code's
// bytes_to_unicode.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fathom {

// The character that represents a byte.
char32_t byte_glyph(uint8_t byte);

// The bytes that a vocabulary entry represents, or nothing if it is not written in this alphabet
// (including ill-formed UTF-8).
std::optional<std::string> bytes_of_glyphs(std::string_view glyphs);

// Bytes as written in a vocabulary: for messages and tests.
std::string glyphs_of_bytes(std::string_view bytes);

}  // namespace fathom
