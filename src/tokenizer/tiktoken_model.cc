#include "tokenizer/tiktoken_model.h"

#include <array>
#include <charconv>
#include <unordered_set>

#include "base/json.h"
#include "base/utf8.h"

namespace fathom {
namespace {

constexpr size_t kMaxTokenBytes = 1024;  // the longest of Kimi K2 has 128
constexpr int32_t kSpecialSlots = 256;
constexpr std::string_view kTokenizerClass = "TikTokenTokenizer";

constexpr std::array<int8_t, 256> kBase64Digits = [] {
  std::array<int8_t, 256> digits{};
  digits.fill(-1);
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kAlphabet.size(); ++i) {
    digits[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
  }
  return digits;
}();

// Nothing for a text that is not base64, with padding.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() - padding; ++i) {
    const int digit = kBase64Digits[static_cast<uint8_t>(text[i])];
    if (digit < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if (i % 4 == 3) {
      for (const int shift : {16, 8, 0}) bytes += static_cast<char>(bits >> shift & 0xFF);
      bits = 0;
    }
  }
  if (padding == 1) {
    for (const int shift : {10, 2}) bytes += static_cast<char>(bits >> shift & 0xFF);
  } else if (padding == 2) {
    bytes += static_cast<char>(bits >> 4 & 0xFF);
  }
  return bytes;
}

Result<Bpe::Entry> parse_line(std::string_view line, const std::string& where) {
  const size_t space = line.find(' ');
  auto bytes = decode_base64(line.substr(0, space));
  int32_t rank = -1;
  if (bytes && space != std::string_view::npos) {
    const char* const end = line.data() + line.size();
    const auto [rest, failure] = std::from_chars(line.data() + space + 1, end, rank);
    if (failure != std::errc() || rest != end) rank = -1;
  }
  if (!bytes || rank < 0) {
    return invalid("{} is {}, expected a token in base64, a space and its rank", where,
                   brief(json::value(replace_ill_formed(line.substr(0, 60)))));
  }
  if (bytes->size() > kMaxTokenBytes || rank >= Bpe::kMaxIds - kSpecialSlots) {
    return invalid("{} has a token of {} bytes and rank {}, the limits are {} and {}", where,
                   bytes->size(), rank, kMaxTokenBytes, Bpe::kMaxIds - kSpecialSlots - 1);
  }
  return Bpe::Entry{std::move(*bytes), rank};
}

// The special tokens behind the ranks, `first` being the first one's id.
Result<std::vector<AddedToken>> read_special(std::string_view config_text, std::string_view source,
                                             int32_t first) {
  FATHOM_TRY(const json::value root, parse_json(config_text, source));
  if (!root.is_object()) return invalid("{}: is {}, expected an object", source, brief(root));
  const JsonFields fields(root.get_object(), fmt::format("{}: ", source));
  FATHOM_TRY(const std::string tokenizer_class, fields.string("tokenizer_class"));
  if (tokenizer_class != kTokenizerClass) {
    return invalid(
        "{}: tokenizer_class is \"{}\"; of tokenizers with a tiktoken.model only {} is "
        "supported",
        source, tokenizer_class.substr(0, 60), kTokenizerClass);
  }
  std::vector<AddedToken> tokens;
  for (int32_t id = first; id < first + kSpecialSlots; ++id) {
    tokens.push_back({fmt::format("<|reserved_token_{}|>", id), id, true, false});
  }
  const json::value* named = fields.find("added_tokens_decoder");
  if (named == nullptr || !named->is_object()) return tokens;
  for (const auto& [key, value] : named->get_object()) {
    const std::string where = fmt::format("{}: added_tokens_decoder.{}", source,
                                          std::string_view(key.data(), key.size()).substr(0, 20));
    int32_t id = -1;
    const auto [rest, failure] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (failure != std::errc() || rest != key.data() + key.size() || id < first ||
        id >= first + kSpecialSlots) {
      return invalid("{} is no id from {} to {}", where, first, first + kSpecialSlots - 1);
    }
    if (!value.is_object()) return invalid("{} is {}, expected an object", where, brief(value));
    const JsonFields token(value.get_object(), where + ".");
    FATHOM_TRY(const std::string content, token.string("content"));
    FATHOM_TRY(const auto special, token.optional_boolean("special"));
    if (content.empty()) return invalid("{}.content is empty", where);
    tokens[static_cast<size_t>(id - first)] = {content, id, special.value_or(false), false};
  }
  return tokens;
}

}  // namespace

Result<Bpe> parse_tiktoken_ranks(std::string_view text, std::string_view source) {
  std::vector<Bpe::Entry> entries;
  std::unordered_set<int32_t> ranks;
  std::unordered_set<std::string> tokens;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    const std::string where = fmt::format("{}: line {}", source, number);
    FATHOM_TRY(Bpe::Entry entry, parse_line(line, where));
    if (!ranks.insert(entry.id).second || !tokens.insert(entry.bytes).second) {
      return invalid("{}: another line has its token or its rank, {}", where, entry.id);
    }
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return invalid("{}: has no tokens", source);
  auto bpe = Bpe::from_ranks(entries);
  if (!bpe) return with_context(fmt::format("{}: ", source), bpe.error());
  return bpe;
}

Result<TokenizerParts> parse_tiktoken(std::string_view ranks, std::string_view source,
                                      std::string_view config_text,
                                      std::string_view config_source) {
  FATHOM_TRY(Bpe bpe, parse_tiktoken_ranks(ranks, source));
  const int32_t first = bpe.end_id();
  FATHOM_TRY(auto special, read_special(config_text, config_source, first));
  return TokenizerParts{std::move(bpe), PreTokenizer::kimi(), std::move(special), {}};
}

}  // namespace fathom
