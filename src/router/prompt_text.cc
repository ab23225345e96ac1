#include "router/prompt_text.h"

#include "base/json.h"

namespace fathom::router {
namespace {

// Separates strings: no prompt of text has it.
constexpr char kSeparator = '\x1e';

void append(const json::value& value, std::string& out) {
  if (out.size() >= kMostPromptText) return;
  if (const auto* text = value.if_string()) {
    out.append(text->data(), text->size());
    out += kSeparator;
  } else if (const auto* items = value.if_array()) {
    for (const json::value& item : *items) append(item, out);
  } else if (const auto* fields = value.if_object()) {
    for (const auto& field : *fields) append(field.value(), out);
  } else if (value.is_int64() || value.is_uint64()) {  // a token
    out += fmt::format("{},", value.to_number<int64_t>());
  }
}

}  // namespace

std::string prompt_text(std::string_view body) {
  std::string out;
  const auto parsed = parse_json(body, "body");
  if (!parsed || !parsed->is_object()) return out;
  // Prompts with different salts share no cache, and tools stand in front of the conversation.
  for (const char* name : {"cache_salt", "tools", "system", "instructions", "messages", "prompt",
                           "input", "text", "input_ids"}) {
    if (const json::value* field = parsed->as_object().if_contains(name)) append(*field, out);
  }
  if (out.size() > kMostPromptText) out.resize(kMostPromptText);
  return out;
}

}  // namespace fathom::router
