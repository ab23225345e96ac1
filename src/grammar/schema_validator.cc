#include "grammar/schema_validator.h"

#include <algorithm>

#include "base/utf8.h"

namespace fathom {
namespace {

bool has_type(const json::value& value, const json::value& type) {
  if (type.is_array()) {
    return std::any_of(type.as_array().begin(), type.as_array().end(),
                       [&](const json::value& one) { return has_type(value, one); });
  }
  const std::string_view name = type.as_string();
  const bool is_whole = value.is_int64() || value.is_uint64();
  return (name == "object" && value.is_object()) || (name == "array" && value.is_array()) ||
         (name == "string" && value.is_string()) || (name == "boolean" && value.is_bool()) ||
         (name == "null" && value.is_null()) || (name == "integer" && is_whole) ||
         (name == "number" && value.is_number());
}

const json::value& follow(const json::value& root, std::string_view uri) {
  const json::value* current = &root;
  for (uri.remove_prefix(std::min<size_t>(2, uri.size())); !uri.empty();) {
    const size_t slash = std::min(uri.find('/'), uri.size());
    current = &current->as_object().at(uri.substr(0, slash));
    uri.remove_prefix(std::min(slash + 1, uri.size()));
  }
  return *current;
}

int64_t num_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string wrong_object(const json::object& value, const json::object& schema,
                         const json::value& root, const std::string& path) {
  static const json::object kNone;
  const json::value* properties = schema.if_contains("properties");
  const json::object& known = properties == nullptr ? kNone : properties->as_object();
  const json::value* additional = schema.if_contains("additionalProperties");
  for (const auto& [key, sub] : value) {
    const std::string here = path + "/" + std::string(key);
    std::string wrong;
    if (const json::value* const sub_schema = known.if_contains(key)) {
      wrong = what_is_wrong(sub, *sub_schema, root, here);
    } else if (additional != nullptr) {
      wrong = what_is_wrong(sub, *additional, root, here);
    } else {
      wrong = here + " is not in the schema";
    }
    if (!wrong.empty()) return wrong;
  }
  if (const json::value* required = schema.if_contains("required")) {
    for (const json::value& name : required->as_array()) {
      if (!value.contains(name.as_string())) {
        return path + " lacks " + std::string(name.as_string());
      }
    }
  }
  return "";
}

std::string wrong_array(const json::array& value, const json::object& schema,
                        const json::value& root, const std::string& path) {
  const auto limit = [&](const char* key, int64_t fallback) {
    const json::value* const found = schema.if_contains(key);
    return found == nullptr ? fallback : found->as_int64();
  };
  const auto size = std::ssize(value);
  if (size < limit("minItems", 0) || size > limit("maxItems", size)) return path + ": items";
  for (size_t i = 0; i < value.size(); ++i) {
    const auto wrong =
        what_is_wrong(value[i], schema.at("items"), root, path + "/" + std::to_string(i));
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace

std::string what_is_wrong(const json::value& value, const json::value& schema,
                          const json::value& root, const std::string& path) {
  if (schema.is_bool()) return schema.as_bool() ? "" : path + " is not allowed";
  const json::object& object = schema.as_object();
  if (const json::value* ref = object.if_contains("$ref")) {
    return what_is_wrong(value, follow(root, ref->as_string()), root, path);
  }
  if (const json::value* constant = object.if_contains("const")) {
    return value == *constant ? "" : path + " is not the constant";
  }
  if (const json::value* values = object.if_contains("enum")) {
    const json::array& list = values->as_array();
    return std::find(list.begin(), list.end(), value) != list.end() ? "" : path + " is no value";
  }
  for (const char* key : {"anyOf", "oneOf"}) {
    const json::value* const cases = object.if_contains(key);
    if (cases == nullptr) continue;
    const auto matches = std::count_if(
        cases->as_array().begin(), cases->as_array().end(),
        [&](const json::value& one) { return what_is_wrong(value, one, root, path).empty(); });
    const bool right = key == std::string_view("anyOf") ? matches >= 1 : matches == 1;
    return right ? "" : fmt::format("{} matches {} cases", path, matches);
  }
  if (const json::value* type = object.if_contains("type")) {
    if (!has_type(value, *type)) return path + " has another type";
  }
  if (value.is_object()) return wrong_object(value.as_object(), object, root, path);
  if (value.is_array()) return wrong_array(value.as_array(), object, root, path);
  if (value.is_number()) {
    const double number = value.to_number<double>();
    const auto breaks = [&](const char* key, auto compare) {
      const json::value* const bound = object.if_contains(key);
      return bound != nullptr && !compare(number, bound->to_number<double>());
    };
    if (breaks("minimum", std::greater_equal<>()) || breaks("maximum", std::less_equal<>()) ||
        breaks("exclusiveMinimum", std::greater<>()) || breaks("exclusiveMaximum", std::less<>())) {
      return fmt::format("{} is {}, out of range", path, number);
    }
  }
  if (value.is_string()) {
    const int64_t length = num_characters(value.as_string());
    const json::value* const min = object.if_contains("minLength");
    const json::value* const max = object.if_contains("maxLength");
    if ((min != nullptr && length < min->as_int64()) ||
        (max != nullptr && length > max->as_int64())) {
      return fmt::format("{} has {} characters", path, length);
    }
  }
  return "";
}

}  // namespace fathom
