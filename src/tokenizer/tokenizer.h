// Text to token ids and back, as the checkpoint's tokenizer.json says: byte-level BPE with added
// tokens, id for id what Hugging Face's `tokenizers` gives (no special tokens added by itself).
//
// Immutable once loaded: every const method may be called from any thread. A file that uses what
// is not supported here (another model type, a normalizer, other pre-tokenizers) is refused with a
// sentence naming the field. It does not render chat templates (chat/) and does not stream
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
  // Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a model directory; only
  // the first must exist.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& model_dir);

  // tokenizer.json alone; `source` begins every error.
  static Result<std::unique_ptr<Tokenizer>> from_json(std::string_view tokenizer_json,
                                                      std::string_view source);

  // Added tokens in the text become their ids. Ill-formed UTF-8 is encoded as U+FFFD.
  std::vector<int32_t> encode(std::string_view text, bool add_bos = false) const;

  // Added tokens in the text are plain text: for content that must not speak for the template.
  std::vector<int32_t> encode_ordinary(std::string_view text) const;

  // Bytes that form no UTF-8 become U+FFFD; ids outside the vocabulary decode to nothing.
  // skip_special leaves out the tokens marked special.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The bytes of a token (of an added token, its content); may end inside a character. Empty for
  // ids outside the vocabulary.
  std::string_view token_bytes(int32_t id) const;

  bool is_special(int32_t id) const;
  bool is_added(int32_t id) const;  // one of the file's added_tokens

  // The token whose text this is; added tokens come first.
  std::optional<int32_t> token_id(std::string_view token_content) const;

  int32_t vocab_size() const { return vocab_size_; }  // highest id + 1

  // From tokenizer_config.json.
  std::optional<int32_t> bos_id() const { return bos_id_; }
  std::optional<int32_t> eos_id() const { return eos_id_; }
  bool add_bos_by_default() const { return config_.add_bos; }
  const std::optional<std::string>& chat_template() const { return config_.chat_template; }

 private:
  explicit Tokenizer(TokenizerParts parts);
  Result<> apply_config(TokenizerConfig config);
  void encode_segment(std::string_view text, std::vector<int32_t>& out) const;
  void encode_around(const TokenTrie& added, std::string_view text,
                     std::vector<int32_t>& out) const;

  Bpe bpe_;
  PreTokenizer pre_tokenizer_;
  std::unordered_map<int32_t, AddedToken> added_;
  std::unordered_map<std::string, int32_t> id_of_content_;  // added tokens, glyphless entries
  TokenTrie raw_added_;         // looked for first, in the text as it came
  TokenTrie normalized_added_;  // then, between those
  bool has_normalized_added_ = false;
  int32_t vocab_size_ = 0;
  TokenizerConfig config_;
  std::optional<int32_t> bos_id_, eos_id_;
};

}  // namespace fathom
