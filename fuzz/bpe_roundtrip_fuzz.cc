// Any bytes, encoded with the bundled model's tokenizer and decoded again: the same text with its
// ill-formed parts replaced, in one piece and streamed, with and without added tokens;
// without them the text makes no special token.
// FATHOM_FUZZ_MODEL names another model directory.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/tokenizer.h"

namespace {

const fathom::Tokenizer& tokenizer() {
  static const auto loaded = [] {
    const char* directory = std::getenv("FATHOM_FUZZ_MODEL");
    auto result = fathom::Tokenizer::load(
        directory != nullptr ? directory : FATHOM_SOURCE_DIR "/models/fathom-tiny");
    FATHOM_CHECK(result.has_value(), "{}", result.error().message);
    return std::move(*result);
  }();
  return *loaded;
}

void check_round_trip(const std::vector<int32_t>& ids, const std::string& expected) {
  FATHOM_CHECK(tokenizer().decode(ids) == expected, "decode: {} ids", ids.size());
  fathom::IncrementalDetokenizer stream(tokenizer(), false);
  std::string streamed;
  for (const int32_t id : ids) {
    const std::string piece = stream.push(id);
    FATHOM_CHECK(fathom::is_valid_utf8(piece), "a piece ends inside a character");
    streamed += piece;
  }
  FATHOM_CHECK(streamed + stream.flush() == expected, "stream: {} ids", ids.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string expected = fathom::replace_ill_formed(text);
  check_round_trip(tokenizer().encode(text), expected);
  const std::vector<int32_t> ordinary = tokenizer().encode_ordinary(text);
  for (const int32_t id : ordinary) {
    FATHOM_CHECK(!tokenizer().is_special(id), "ordinary text became special token {}", id);
  }
  check_round_trip(ordinary, expected);
  // The same bytes as ids: most are in the vocabulary, some are not.
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < size; i += 2) ids.push_back(data[i] | data[i + 1] << 8);
  check_round_trip(ids, tokenizer().decode(ids));
  return 0;
}
