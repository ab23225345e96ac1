// What the server knows of the model that it serves, and of one reply.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "chat/format.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

// Filled once before the first request, then read by any thread. Outlives every reply.
struct ServedModel {
  std::vector<std::string> names;                    // the first is its own, the others are aliases
  std::shared_ptr<const Tokenizer> tokenizer;        // never null
  Result<ChatFormat> chat_format = ChatFormat::kV3;  // an error only where a chat is asked for
  int64_t vocab_size = 0;                            // of the logits; at least the tokenizer's
  int64_t max_model_len = 0;                         // tokens, prompt and answer
  // generation_config.json's: what a request that says nothing gets.
  std::optional<double> temperature = {}, top_p = {};
  std::optional<int64_t> top_k = {};
  int64_t created = 0;           // seconds since 1970: when the model was loaded
  std::string path = {};         // where it was loaded from
  std::string version = {};      // of the program
  std::string fingerprint = {};  // system_fingerprint: program, weights and settings

  bool has_name(std::string_view name) const;
};

// What the transport gives each reply: a number never used before, from which all ids in it are
// made, and the time.
struct ReplyIdentity {
  uint64_t nonce = 0;
  int64_t created = 0;  // seconds since 1970

  // "chatcmpl-" and 32 hexadecimal digits; another number of the same reply is another id.
  std::string make_id(std::string_view prefix, uint64_t number = 0) const {
    return fmt::format("{}{:016x}{:016x}", prefix, random_bits(nonce, number, 0),
                       random_bits(nonce, number, 1));
  }
};

inline bool ServedModel::has_name(std::string_view name) const {
  for (const std::string& one : names) {
    if (one == name) return true;
  }
  return false;
}

}  // namespace fathom
