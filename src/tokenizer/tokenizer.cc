#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <cstring>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/tiktoken_model.h"

namespace fathom {
namespace {

// The family's largest tokenizer.json has 7.8 MB.
constexpr int64_t kMaxTokenizerBytes = 32 << 20;
constexpr int64_t kMaxConfigBytes = 4 << 20;

// is_valid_utf8 with eight ASCII bytes per step.
bool well_formed(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080ull;
  size_t i = 0;
  while (i < text.size()) {
    uint64_t word = 0;
    if (text.size() - i >= sizeof(word)) {
      std::memcpy(&word, text.data() + i, sizeof(word));
      if ((word & kHighBits) == 0) {
        i += sizeof(word);
        continue;
      }
    }
    const Utf8Char c = decode_utf8(text, i);
    if (!c.valid) return false;
    i += c.length;
  }
  return true;
}

// The file's text, or nothing if it does not exist.
Result<std::optional<std::string>> read_if_there(const std::string& path) {
  auto text = read_text_file(path, kMaxConfigBytes);
  if (text) return std::optional<std::string>(std::move(*text));
  if (text.error().code == Code::kNotFound) return std::optional<std::string>();
  return tl::unexpected<Status>(text.error());
}

}  // namespace

Tokenizer::Tokenizer(TokenizerParts parts)
    : bpe_(std::move(parts.bpe)), pre_tokenizer_(std::move(parts.pre_tokenizer)) {
  vocab_size_ = bpe_.end_id();
  for (Bpe::Entry& entry : parts.glyphless)
    id_of_content_.emplace(std::move(entry.bytes), entry.id);
  for (AddedToken& token : parts.added) {
    vocab_size_ = std::max(vocab_size_, token.id + 1);
    id_of_content_[token.content] = token.id;
    (token.normalized ? normalized_added_ : raw_added_).insert(token.content, token.id);
    has_normalized_added_ |= token.normalized;
    added_.emplace(token.id, std::move(token));
  }
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::from_json(std::string_view tokenizer_json,
                                                        std::string_view source) {
  FATHOM_TRY(TokenizerParts parts, parse_tokenizer_json(tokenizer_json, source));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(parts)));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::load_vocabulary(const std::string& model_dir,
                                                              const std::string& config_text) {
  const std::string path = model_dir + "/tokenizer.json";
  const auto text = read_text_file(path, kMaxTokenizerBytes);
  if (text) return from_json(*text, path);
  const std::string ranks_path = model_dir + "/tiktoken.model";
  const auto ranks = read_text_file(ranks_path, kMaxTokenizerBytes);
  if (text.error().code != Code::kNotFound || (!ranks && ranks.error().code == Code::kNotFound)) {
    return tl::unexpected<Status>(text.error());
  }
  if (!ranks) return tl::unexpected<Status>(ranks.error());
  FATHOM_TRY(TokenizerParts parts,
             parse_tiktoken(*ranks, ranks_path, config_text, model_dir + "/tokenizer_config.json"));
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(parts)));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& model_dir) {
  const std::string config_path = model_dir + "/tokenizer_config.json";
  FATHOM_TRY(const auto config_text, read_if_there(config_path));
  FATHOM_TRY(auto tokenizer, load_vocabulary(model_dir, config_text.value_or("{}")));
  TokenizerConfig config;
  if (config_text) {
    FATHOM_TRY(config, parse_tokenizer_config(*config_text, config_path));
  }
  // The newer location of the template, which takes precedence.
  FATHOM_TRY(auto chat_template, read_if_there(model_dir + "/chat_template.jinja"));
  if (chat_template) config.chat_template = std::move(chat_template);
  if (auto applied = tokenizer->apply_config(std::move(config)); !applied) {
    return with_context(config_path + ": ", applied.error());
  }
  return tokenizer;
}

Result<> Tokenizer::apply_config(TokenizerConfig config) {
  const auto id_of = [&](const char* field,
                         const std::optional<std::string>& name) -> Result<std::optional<int32_t>> {
    if (!name) return std::optional<int32_t>();
    const auto id = token_id(*name);
    if (!id) return invalid("{} is \"{}\", which is no token of the vocabulary", field, *name);
    return id;
  };
  FATHOM_TRY(bos_id_, id_of("bos_token", config.bos_token));
  FATHOM_TRY(eos_id_, id_of("eos_token", config.eos_token));
  config_ = std::move(config);
  return {};
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_bos) const {
  if (!well_formed(text)) return encode(replace_ill_formed(text), add_bos);
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 4);  // English has 4 to 5 bytes per token
  if (add_bos && bos_id_) ids.push_back(*bos_id_);
  encode_around(raw_added_, text, ids);
  return ids;
}

std::vector<int32_t> Tokenizer::encode_ordinary(std::string_view text) const {
  if (!well_formed(text)) return encode_ordinary(replace_ill_formed(text));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 4);
  encode_segment(text, ids);
  return ids;
}

// Encodes each stretch between added tokens separately.
void Tokenizer::encode_around(const TokenTrie& added, std::string_view text,
                              std::vector<int32_t>& out) const {
  const auto stretch = [&](std::string_view between) {
    if (&added == &raw_added_ && has_normalized_added_) {
      encode_around(normalized_added_, between, out);
    } else {
      encode_segment(between, out);
    }
  };
  size_t done = 0;
  while (const auto found = added.find(text, done)) {
    stretch(text.substr(done, found->begin - done));
    out.push_back(found->id);
    done = found->end;
  }
  stretch(text.substr(done));
}

void Tokenizer::encode_segment(std::string_view text, std::vector<int32_t>& out) const {
  pre_tokenizer_.split(text, [&](std::string_view piece) { bpe_.encode_piece(piece, out); });
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  bytes.reserve(ids.size() * 5);
  for (const int32_t id : ids) {
    if (!skip_special || !is_special(id)) bytes += token_bytes(id);
  }
  return well_formed(bytes) ? bytes : replace_ill_formed(bytes);
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  const auto added = added_.find(id);
  return added != added_.end() ? std::string_view(added->second.content) : bpe_.bytes_of(id);
}

bool Tokenizer::is_added(int32_t id) const { return added_.contains(id); }

bool Tokenizer::is_special(int32_t id) const {
  const auto added = added_.find(id);
  return added != added_.end() && added->second.special;
}

std::optional<int32_t> Tokenizer::token_id(std::string_view token_content) const {
  const auto known = id_of_content_.find(std::string(token_content));
  if (known != id_of_content_.end()) return known->second;
  const int32_t id = bpe_.find(token_content);
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

}  // namespace fathom
