// tokenizer.json from an untrusted directory: whatever it says, it is loaded or refused, and what
// is loaded encodes and decodes without a fault.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/utf8.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/tokenizer.h"

namespace {

// Every character class of the usual patterns, and some added tokens of the corpus.
constexpr std::string_view kText =
    "Hello  world\n\t1234 it's été 你好・の한국어 🙂\u0301 <think><thinking><｜bos｜> "
    "\u3000!? "
    "\n";

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = fathom::Tokenizer::from_json(json, "tokenizer.json");
  if (!tokenizer) {
    FATHOM_CHECK(tokenizer.error().message.starts_with("tokenizer.json: "), "{}",
                 tokenizer.error().message);
    return 0;
  }
  const auto ids = (*tokenizer)->encode(kText);
  fathom::IncrementalDetokenizer stream(**tokenizer, false);
  std::string streamed;
  for (const int32_t id : ids) {
    FATHOM_CHECK(id >= 0 && id < (*tokenizer)->vocab_size(), "id {}", id);
    streamed += stream.push(id);
  }
  streamed += stream.flush();
  FATHOM_CHECK(streamed == kText, "\"{}\"", streamed);
  FATHOM_CHECK((*tokenizer)->decode(ids) == kText, "decode");
  return 0;
}
