#include "server/openai/token_json.h"

#include <algorithm>

#include "base/utf8.h"
#include "server/openai/json_writer.h"

namespace fathom {
namespace {

// Returns a unique name of a token: bytes that are not UTF-8 are written as hex, as OpenAI does.
std::string unique_name(const Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  if (is_valid_utf8(bytes)) return std::string(bytes);
  std::string name = "bytes:";
  for (const char byte : bytes) {
    name += fmt::format("\\x{:02x}", static_cast<unsigned>(static_cast<unsigned char>(byte)));
  }
  return name;
}

void append_entry(JsonWriter& json, std::string& out, const Tokenizer& tokenizer, int32_t id,
                  float logprob) {
  json.key("token");
  append_token_text(out, tokenizer, id);
  json.field("logprob", logprob).key("bytes").open('[');
  for (const char byte : tokenizer.token_bytes(id)) {
    json.value(static_cast<unsigned>(static_cast<unsigned char>(byte)));
  }
  json.close(']');
}

}  // namespace

void append_token_text(std::string& out, const Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  out += '"';
  append_json_escaped(out, is_valid_utf8(bytes) ? bytes : replace_ill_formed(bytes));
  out += '"';
}

void append_chat_logprobs(std::string& out, const Tokenizer& tokenizer,
                          const std::vector<TokenLogprob>& tokens) {
  JsonWriter json(out);
  for (const TokenLogprob& token : tokens) {
    json.open('{');
    append_entry(json, out, tokenizer, token.id, token.logprob);
    json.key("top_logprobs").open('[');
    for (const auto& [id, logprob] : token.top) {
      json.open('{');
      append_entry(json, out, tokenizer, id, logprob);
      json.close('}');
    }
    json.close(']').close('}');
  }
}

void append_prompt_logprobs(std::string& out, const Tokenizer& tokenizer,
                            const std::vector<std::optional<TokenLogprob>>& tokens) {
  JsonWriter json(out);
  json.open('[');
  for (const auto& token : tokens) {
    if (!token) {
      json.value(nullptr);
      continue;
    }
    json.open('{');
    bool is_in_top = false;
    int rank = 0;
    const auto entry = [&](int32_t id, float logprob, std::optional<int> place) {
      json.key(std::to_string(id)).open('{').field("logprob", logprob).field("rank", place);
      json.key("decoded_token");
      append_token_text(out, tokenizer, id);
      json.close('}');
    };
    for (const auto& [id, logprob] : token->top) {
      entry(id, logprob, ++rank);
      is_in_top = is_in_top || id == token->id;
    }
    if (!is_in_top) entry(token->id, token->logprob, std::nullopt);
    json.close('}');
  }
  json.close(']');
}

void append_ids(std::string& out, const std::vector<int32_t>& ids) {
  JsonWriter json(out);
  json.open('[');
  for (const int32_t id : ids) json.value(id);
  json.close(']');
}

void append_matched_stop(std::string& out, const Tokenizer& tokenizer,
                         const std::variant<std::monostate, int32_t, std::string>& matched) {
  out += "\"matched_stop\":";
  append_stop(out, matched);
  out += ",\"stop_reason\":";
  const auto* id = std::get_if<int32_t>(&matched);
  if (id != nullptr && tokenizer.eos_id() == *id) {
    out += "null";
  } else {
    append_stop(out, matched);
  }
}

void append_stop(std::string& out,
                 const std::variant<std::monostate, int32_t, std::string>& matched) {
  JsonWriter json(out);
  if (const auto* id = std::get_if<int32_t>(&matched)) {
    json.value(*id);
  } else if (const auto* text = std::get_if<std::string>(&matched)) {
    json.value(*text);
  } else {
    json.value(nullptr);
  }
}

void CompletionLogprobs::add_token(int32_t id) {
  const std::string name = unique_name(tokenizer_, id);
  JsonWriter(tokens_).value(name);
  JsonWriter(offsets_).value(offset_);
  offset_ += std::count_if(name.begin(), name.end(),
                           [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

void CompletionLogprobs::add(const TokenLogprob& token) {
  add_token(token.id);
  JsonWriter(logprobs_).value(token.logprob);
  JsonWriter top(top_);
  top.open('{');
  bool is_in_top = false;
  const auto entry = [&](int32_t id, float logprob) {
    top.value(unique_name(tokenizer_, id));
    top_ += ':';
    top.value(logprob);
  };
  for (const auto& [id, logprob] : token.top) {
    entry(id, logprob);
    is_in_top = is_in_top || id == token.id;
  }
  if (!is_in_top) entry(token.id, token.logprob);
  top.close('}');
}

void CompletionLogprobs::add_without(int32_t id) {
  add_token(id);
  JsonWriter(logprobs_).value(nullptr);
  JsonWriter(top_).value(nullptr);
}

void CompletionLogprobs::take(std::string& out) {
  JsonWriter json(out);
  json.open('{').raw_field("tokens", tokens_ + "]").raw_field("token_logprobs", logprobs_ + "]");
  json.raw_field("top_logprobs", top_ + "]").raw_field("text_offset", offsets_ + "]").close('}');
  for (std::string* list : {&tokens_, &logprobs_, &top_, &offsets_}) list->assign(1, '[');
}

}  // namespace fathom
