// A small tokenizer.json for tests: the 256 bytes, merges to "he", "hell" and "hello", three added
// tokens, GPT-2's split. Tests modify single fields.
#pragma once

#include <string>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/byte_level.h"

namespace fathom {

inline json::value small_tokenizer() {
  json::object vocab;
  for (int byte = 0; byte < 256; ++byte) {
    std::string glyph;
    append_utf8(glyph, byte_glyph(static_cast<uint8_t>(byte)));
    vocab[glyph] = byte;
  }
  vocab["he"] = 256;
  vocab["ll"] = 257;
  vocab["hell"] = 258;
  vocab["hello"] = 259;
  vocab["<｜bos｜>"] = 260;
  return {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"added_tokens",
       {{{"id", 260}, {"content", "<｜bos｜>"}, {"special", true}, {"normalized", false}},
        {{"id", 261}, {"content", "<think>"}, {"special", false}, {"normalized", false}},
        {{"id", 262}, {"content", "<thinking>"}, {"special", false}, {"normalized", true}}}},
      {"normalizer", {{"type", "Sequence"}, {"normalizers", json::array()}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"vocab", vocab},
        {"merges", {"h e", json::array({"l", "l"}), json::array({"he", "ll"}), "hell o"}}}}};
}

}  // namespace fathom
