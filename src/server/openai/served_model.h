// The served model, and the identity of one response.
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

// Where a server takes prompts that others decode.
struct TransferPort {
  std::string engine_id = {};  // as decode servers know it; empty: it takes none
  std::string host = {};
  int port = 0, tp_size = 1;
  int64_t page_tokens = 64;
  bool prefills_only = false;
};

// Filled once before the first request, then read-only; any thread may read. Outlives every
// response.
struct ServedModel {
  std::vector<std::string> names;  // the first is the model's own, the others are aliases
  std::shared_ptr<const Tokenizer> tokenizer;        // never null
  Result<ChatFormat> chat_format = ChatFormat::kV3;  // an error refuses chats only
  int64_t vocab_size = 0;     // rows of the logits; at least the tokenizer's size
  int64_t max_model_len = 0;  // tokens of prompt and completion together
  // Defaults from generation_config.json.
  std::optional<double> temperature = {}, top_p = {};
  std::optional<int64_t> top_k = {};
  int64_t created = 0;           // when the model was loaded, seconds since 1970
  std::string path = {};         // where the model was loaded from
  std::string version = {};      // the program's version
  std::string fingerprint = {};  // system_fingerprint: program, weights and settings
  TransferPort transfer = {};

  bool has_name(std::string_view name) const;
};

// Given by the transport to each response. `nonce` is never reused; all ids in the response derive
// from it.
struct ReplyIdentity {
  uint64_t nonce = 0;
  int64_t created = 0;  // seconds since 1970

  // Returns an id: "chatcmpl-" and 32 hex digits. Another `number` gives another id.
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
