#include "engine/fake_tokenizer.h"

#include "base/check.h"
#include "base/json.h"
#include "tokenizer/byte_level.h"

namespace fathom {
namespace {

constexpr int32_t kFirstWord = 256;
const char* const kWords[] = {"ab",   "bc", "cab", "abc",      " a",
                              "STOP", "ST", "OP",  "\xE4\xBD", "\n\n"};

}  // namespace

std::vector<int32_t> fake_likely_ids() {
  std::vector<int32_t> ids = {'a', 'b', 'c',  'd',  'S',  'T',     'O',
                              'P', ' ', 0xC3, 0xA9, 0xA0, kFakeEos};
  for (int32_t i = 0; i < std::ssize(kWords); ++i) ids.push_back(kFirstWord + i);
  return ids;
}

std::shared_ptr<const Tokenizer> fake_tokenizer() {
  json::object vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab[glyphs_of_bytes(std::string(1, static_cast<char>(byte)))] = byte;
  }
  int32_t next = kFirstWord;
  for (const char* word : kWords) vocab[glyphs_of_bytes(word)] = next++;
  const json::value document = {
      {"added_tokens",
       {{{"id", kFakeEos},
         {"content", "<eos>"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", json::array()}}}};
  auto tokenizer = Tokenizer::from_json(json::serialize(document), "the tests' tokenizer");
  FATHOM_CHECK(tokenizer.has_value(), "{}", tokenizer.error().message);
  return std::move(*tokenizer);
}

}  // namespace fathom
