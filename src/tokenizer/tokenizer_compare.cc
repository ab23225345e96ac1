// Encodes strings for tools/compare_tokenizers.py.
//
//   tokenizer_compare TOKENIZER_JSON < strings > ids
//
// Input: per string its length in bytes (uint32, little-endian) and the bytes. Output: per string
// the number of ids (uint32) and the ids (int32). Also checks that decoding restores the string, at
// once and token by token; exits with 1 if it does not.
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "base/json.h"
#include "tokenizer/detokenizer.h"
#include "tokenizer/tokenizer.h"

namespace {

constexpr uint32_t kMaxStringBytes = 64 << 20;

bool round_trips(const fathom::Tokenizer& tokenizer, const std::string& text,
                 const std::vector<int32_t>& ids) {
  if (tokenizer.decode(ids) != text) return false;
  fathom::IncrementalDetokenizer stream(tokenizer, false);
  std::string streamed;
  for (const int32_t id : ids) streamed += stream.push(id);
  return streamed + stream.flush() == text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: tokenizer_compare TOKENIZER_JSON\n");
    return 2;
  }
  const auto json = fathom::read_text_file(argv[1], kMaxStringBytes);
  if (!json) {
    fmt::print(stderr, "{}\n", json.error().message);
    return 2;
  }
  const auto tokenizer = fathom::Tokenizer::from_json(*json, argv[1]);
  if (!tokenizer) {
    fmt::print(stderr, "{}\n", tokenizer.error().message);
    return 2;
  }
  uint32_t length = 0;
  std::string text;
  while (std::fread(&length, sizeof(length), 1, stdin) == 1) {
    if (length > kMaxStringBytes) {
      fmt::print(stderr, "a string of {} bytes, the limit is {}\n", length, kMaxStringBytes);
      return 2;
    }
    text.resize(length);
    if (std::fread(text.data(), 1, length, stdin) != length) {
      fmt::print(stderr, "the input ends inside a string\n");
      return 2;
    }
    const auto ids = (*tokenizer)->encode(text);
    if (!round_trips(**tokenizer, text, ids)) {
      fmt::print(stderr, "does not decode to itself: {}\n", text);
      return 1;
    }
    const auto count = static_cast<uint32_t>(ids.size());
    std::fwrite(&count, sizeof(count), 1, stdout);
    std::fwrite(ids.data(), sizeof(int32_t), ids.size(), stdout);
  }
  return 0;
}
