#include "grammar/structural_tag_check.h"

#include <algorithm>
#include <array>

#include "base/json.h"
#include "grammar/schema_check.h"
#include "grammar/text_limits.h"

namespace fathom {
namespace {

// Formats whose cost the limits bound. The others are for vocabularies' own markers.
constexpr std::array<std::string_view, 10> kFormats = {
    "const_string", "any_text",       "json_schema",         "regex", "grammar", "sequence",
    "or",           "triggered_tags", "tags_with_separator", "tag"};

Result<> check_format(const json::value& value, const std::string& path);

Result<> check_formats(const json::value& list, const std::string& path) {
  if (!list.is_array()) return invalid("structural_tag at {}: expected a list", path);
  for (size_t i = 0; i < list.get_array().size(); ++i) {
    FATHOM_RETURN_IF_ERROR(check_format(list.get_array()[i], fmt::format("{}/{}", path, i)));
  }
  return {};
}

Result<std::string> text_of(const json::object& format, std::string_view key,
                            const std::string& path) {
  const json::value* const text = format.if_contains(key);
  if (text == nullptr || !text->is_string()) {
    return invalid("structural_tag at {}: {} is missing or no string", path, key);
  }
  return std::string(text->get_string());
}

Result<> check_format(const json::value& value, const std::string& path) {
  if (!value.is_object()) return invalid("structural_tag at {}: expected an object", path);
  const json::object& format = value.get_object();
  FATHOM_TRY(const std::string type, text_of(format, "type", path));
  if (std::ranges::find(kFormats, type) == kFormats.end()) {
    return invalid("structural_tag at {}: the type \"{}\" is not supported", path,
                   type.substr(0, 40));
  }
  if (type == "json_schema") {
    const json::value* const schema = format.if_contains("json_schema");
    if (schema == nullptr) return invalid("structural_tag at {}: json_schema is missing", path);
    if (const auto checked = check_schema(json::serialize(*schema)); !checked) {
      return with_context(fmt::format("structural_tag at {}: ", path), checked.error());
    }
  } else if (type == "regex") {
    FATHOM_TRY(const std::string pattern, text_of(format, "pattern", path));
    FATHOM_RETURN_IF_ERROR(check_regex(pattern, "structural_tag at " + path + ": pattern"));
  } else if (type == "grammar") {
    FATHOM_TRY(const std::string grammar, text_of(format, "grammar", path));
    FATHOM_RETURN_IF_ERROR(check_ebnf(grammar, "structural_tag at " + path + ": grammar"));
  }
  if (const json::value* const content = format.if_contains("content")) {
    FATHOM_RETURN_IF_ERROR(check_format(*content, path + "/content"));
  }
  for (const char* list : {"elements", "tags"}) {
    if (const json::value* const formats = format.if_contains(list)) {
      FATHOM_RETURN_IF_ERROR(check_formats(*formats, path + "/" + list));
    }
  }
  return {};
}

}  // namespace

Result<> check_structural_tag(std::string_view text) {
  FATHOM_RETURN_IF_ERROR(check_text(text, "structural_tag"));
  FATHOM_TRY(const json::value root, parse_json(text, "structural_tag", kMaxGrammarDepth));
  if (!root.is_object() || !root.get_object().contains("format")) {
    return invalid("structural_tag: expected an object with the field format");
  }
  return check_format(root.get_object().at("format"), "/format");
}

}  // namespace fathom
