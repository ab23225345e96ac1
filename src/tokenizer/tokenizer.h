// Converts text to token ids and back, as the checkpoint's tokenizer.json or tiktoken.model
// specifies: byte-level BPE with added tokens. Ids equal those of Hugging Face's `tokenizers` (with
// add_special_tokens false).
//
// Immutable once loaded: every const method may be called from any thread. A file that uses an
// unsupported feature (another model type, a normalizer, other pre-tokenizers) is refused with an
// error that names the field. Does not render chat templates (chat/) and does not stream
// (tokenizer/detokenizer.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "tokenizer/bpe.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/token_trie.h"
#include "tokenizer/tokenizer_json.h"

namespace fathom {

class Tokenizer {
 public:
  // Reads tokenizer.json, tokenizer_config.json and chat_template.jinja from a model directory;
  // only the first is required. Without it tiktoken.model is read (tiktoken_model.h).
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& model_dir);

  // Reads tokenizer.json alone. `source` begins each error.
  static Result<std::unique_ptr<Tokenizer>> from_json(std::string_view tokenizer_json,
                                                      std::string_view source);

  // Encodes text. Added tokens in it become their ids; ill-formed UTF-8 is encoded as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, bool add_bos = false) const;

  // Encodes text in which added tokens are plain text: for content that must not inject markup.
  std::vector<int32_t> encode_ordinary(std::string_view text) const;

  // Decodes ids. Bytes that are not valid UTF-8 become U+FFFD; ids outside the vocabulary give no
  // text. skip_special omits tokens marked special.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The bytes of a token (an added token's content); may end inside a character. Empty for ids
  // outside the vocabulary.
  std::string_view token_bytes(int32_t id) const;

  bool is_special(int32_t id) const;
  bool is_added(int32_t id) const;  // one of the file's added_tokens

  // The token with this text; added tokens take precedence.
  std::optional<int32_t> token_id(std::string_view token_content) const;

  int32_t vocab_size() const { return vocab_size_; }  // highest id + 1

  // From tokenizer_config.json.
  std::optional<int32_t> bos_id() const { return bos_id_; }
  std::optional<int32_t> eos_id() const { return eos_id_; }
  bool add_bos_by_default() const { return config_.add_bos; }
  const std::optional<std::string>& chat_template() const { return config_.chat_template; }

 private:
  explicit Tokenizer(TokenizerParts parts);
  static Result<std::unique_ptr<Tokenizer>> load_vocabulary(const std::string& model_dir,
                                                            const std::string& config_text);
  Result<> apply_config(TokenizerConfig config);
  void encode_segment(std::string_view text, std::vector<int32_t>& out) const;
  void encode_around(const TokenTrie& added, std::string_view text,
                     std::vector<int32_t>& out) const;

  Bpe bpe_;
  PreTokenizer pre_tokenizer_;
  std::unordered_map<int32_t, AddedToken> added_;
  // Added tokens, and entries not written in byte glyphs.
  std::unordered_map<std::string, int32_t> id_of_content_;
  TokenTrie raw_added_;         // searched first, in the whole text
  TokenTrie normalized_added_;  // searched then, between those
  bool has_normalized_added_ = false;
  int32_t vocab_size_ = 0;
  TokenizerConfig config_;
  std::optional<int32_t> bos_id_, eos_id_;
};

}  // namespace fathom
