#include "checkpoint/generation_config.h"

namespace fathom {

Result<std::vector<int32_t>> parse_token_ids(const JsonFields& fields, std::string_view key,
                                             int64_t last, const std::string& where) {
  constexpr size_t kMaxIds = 64;
  std::vector<int32_t> ids;
  const json::value* value = fields.find(key);
  if (value == nullptr) return ids;
  if (!value->is_array()) {
    FATHOM_TRY(const auto id, fields.integer(key, 0, last));
    ids.push_back(static_cast<int32_t>(id));
    return ids;
  }
  if (value->get_array().size() > kMaxIds) {
    return invalid("{}{} has {} ids, the limit is {}", where, key, value->get_array().size(),
                   kMaxIds);
  }
  for (const json::value& item : value->get_array()) {
    if (!item.is_int64() || item.get_int64() < 0 || item.get_int64() > last) {
      return invalid("{}{} holds {}, allowed are ids from 0 to {}", where, key, brief(item), last);
    }
    ids.push_back(static_cast<int32_t>(item.get_int64()));
  }
  return ids;
}

Result<GenerationDefaults> parse_generation_config(std::string_view text, std::string_view source,
                                                   int64_t vocab_size) {
  FATHOM_TRY(const json::value value, parse_json(text, source));
  if (!value.is_object()) {
    return invalid("{}: is {}, expected an object", source, brief(value));
  }
  const std::string where = fmt::format("{}: ", source);
  const JsonFields fields(value.get_object(), where);
  GenerationDefaults defaults;
  // The bounds are those of requests, since requests without these fields use the defaults.
  FATHOM_TRY(defaults.temperature, fields.optional_number("temperature", 0, 2));
  FATHOM_TRY(defaults.top_p, fields.optional_number("top_p", 0, 1));
  if (defaults.top_p && *defaults.top_p <= 0) {
    return invalid("{}top_p is {}, expected a number above 0 and at most 1", where,
                   *defaults.top_p);
  }
  FATHOM_TRY(defaults.top_k, fields.optional_integer("top_k", -1, 1 << 24));
  FATHOM_TRY(defaults.eos_ids, parse_token_ids(fields, "eos_token_id", vocab_size - 1, where));
  return defaults;
}

}  // namespace fathom
