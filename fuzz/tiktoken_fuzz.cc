// tiktoken.model and tokenizer_config.json from an untrusted directory, one behind the other with a
// zero byte between them: whatever they say, they are loaded or refused, and what is loaded gives
// back the bytes that it encodes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "tokenizer/tiktoken_model.h"

namespace {

constexpr std::string_view kPieces[] = {"Hello", " world", "1234", "\n\t", "été", "你好", "a"};

void check_pieces(const fathom::Bpe& bpe) {
  for (const std::string_view piece : kPieces) {
    std::vector<int32_t> ids;
    bpe.encode_piece(piece, ids);
    std::string bytes;
    for (const int32_t id : ids) {
      FATHOM_CHECK(id >= 0 && id < bpe.end_id(), "id {} of {}", id, bpe.end_id());
      bytes += bpe.bytes_of(id);
    }
    FATHOM_CHECK(bytes == piece, "\"{}\" became \"{}\"", piece, bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = std::min(input.find('\0'), input.size());
  const std::string_view ranks = input.substr(0, zero);
  const std::string_view config = input.substr(std::min(zero + 1, input.size()));
  const auto parts =
      fathom::parse_tiktoken(ranks, "tiktoken.model", config, "tokenizer_config.json");
  if (!parts) {
    const std::string& message = parts.error().message;
    FATHOM_CHECK(
        message.starts_with("tiktoken.model: ") || message.starts_with("tokenizer_config.json: "),
        "{}", message);
    return 0;
  }
  check_pieces(parts->bpe);
  for (const fathom::AddedToken& token : parts->added) {
    FATHOM_CHECK(token.id >= parts->bpe.end_id(), "{} has id {}", token.content, token.id);
  }
  return 0;
}
