// A schema, regex or EBNF grammar from anybody: it is compiled or refused, and what is compiled can
// be walked: every token that a mask allows is taken. The first byte says which of the three it is.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/json.h"
#include "grammar/grammar_compiler.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/tokenizer.h"

namespace {

using fathom::GrammarSpec;

// Every byte, and some words of several.
std::shared_ptr<const fathom::Tokenizer> small_tokenizer() {
  fathom::json::object vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab[fathom::glyphs_of_bytes(std::string(1, static_cast<char>(byte)))] = byte;
  }
  int next = 256;
  for (const char* word : {"{\"", "\": ", "abc", "12", "true", "\", \"", "\"}"}) {
    vocab[fathom::glyphs_of_bytes(word)] = next++;
  }
  const fathom::json::value document = {
      {"added_tokens", fathom::json::array()},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", fathom::json::array()}}}};
  auto tokenizer = fathom::Tokenizer::from_json(fathom::json::serialize(document), "vocabulary");
  FATHOM_CHECK(tokenizer.has_value(), "{}", tokenizer.error().message);
  return std::move(*tokenizer);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Without the cache each input does its own work, and within one thread.
  static fathom::GrammarCompiler compiler(
      small_tokenizer(), 263, {.num_threads = 1, .threads_a_grammar = 1, .cache_bytes = 0});
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  GrammarSpec spec{GrammarSpec::Kind::kJsonSchema, text, {}};
  if (data[0] == 'r') spec.kind = GrammarSpec::Kind::kRegex;
  if (data[0] == 'e') spec.kind = GrammarSpec::Kind::kEbnf;
  const auto compiled = compiler.compile(spec);
  if (!compiled) {
    FATHOM_CHECK(!compiled.error().message.empty(), "an error without a sentence");
    return 0;
  }
  const auto state = (*compiled)->start(std::nullopt);
  uint32_t choice = static_cast<uint32_t>(size);
  for (int step = 0; step < 30; ++step) {
    const auto allowed = state->allowed();
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < std::ssize(allowed) * 32; ++id) {
      if (allowed[id / 32] >> id % 32 & 1) ids.push_back(id);
    }
    if (ids.empty()) break;
    choice = choice * 1664525 + 1013904223;
    const int32_t id = ids[choice / 256 % ids.size()];
    FATHOM_CHECK(state->accept(id), "token {} is allowed and then not taken", id);
  }
  return 0;
}
