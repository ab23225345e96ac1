#include "grammar/schema_check.h"

#include <algorithm>
#include <array>
#include <unordered_set>

#include "base/json.h"
#include "grammar/text_limits.h"

namespace fathom {
namespace {

// Keywords that constrain the value but are not enforced. (XGrammar cannot tell keys that match a
// pattern from other keys.)
constexpr std::array<std::string_view, 16> kUnsupported = {"not",
                                                           "patternProperties",
                                                           "if",
                                                           "then",
                                                           "else",
                                                           "dependentRequired",
                                                           "dependentSchemas",
                                                           "dependencies",
                                                           "contains",
                                                           "minContains",
                                                           "maxContains",
                                                           "additionalItems",
                                                           "$dynamicRef",
                                                           "$recursiveRef",
                                                           "disallow",
                                                           "extends"};

// The first of these that is present, in this order, alone determines the value.
constexpr std::array<std::string_view, 6> kHeads = {"$ref",  "const", "enum",
                                                    "anyOf", "oneOf", "allOf"};

constexpr std::array<std::string_view, 23> kAssertions = {"type",
                                                          "properties",
                                                          "required",
                                                          "additionalProperties",
                                                          "propertyNames",
                                                          "minProperties",
                                                          "maxProperties",
                                                          "unevaluatedProperties",
                                                          "items",
                                                          "prefixItems",
                                                          "unevaluatedItems",
                                                          "minItems",
                                                          "maxItems",
                                                          "uniqueItems",
                                                          "minimum",
                                                          "maximum",
                                                          "exclusiveMinimum",
                                                          "exclusiveMaximum",
                                                          "multipleOf",
                                                          "minLength",
                                                          "maxLength",
                                                          "pattern",
                                                          "format"};

// Each of these implies the type if none is given.
constexpr std::array<std::string_view, 6> kImplyType = {
    "properties",  "additionalProperties",  "items",
    "prefixItems", "unevaluatedProperties", "unevaluatedItems"};

constexpr std::array<std::string_view, 7> kTypes = {"string", "number", "integer", "boolean",
                                                    "null",   "array",  "object"};

constexpr std::array<std::string_view, 6> kCounts = {"minLength", "maxLength",     "minItems",
                                                     "maxItems",  "minProperties", "maxProperties"};

constexpr std::array<std::string_view, 4> kBounds = {"minimum", "maximum", "exclusiveMinimum",
                                                     "exclusiveMaximum"};

// Counting properties takes one state per possible number.
constexpr int64_t kMaxCountedProperties = 20'000;

template <size_t N>
bool is_one_of(std::string_view word, const std::array<std::string_view, N>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool has_type(const json::value& value, std::string_view type) {
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_bool();
  if (type == "null") return value.is_null();
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "number") return value.is_number();
  return type == "integer" && (value.is_int64() || value.is_uint64());
}

class SchemaCheck {
 public:
  explicit SchemaCheck(const json::value& root) : root_(root) {}

  Result<> schema(const json::value& value, const std::string& path) {
    if (!visited_.insert(&value).second) return {};
    if (++count_ > kMaxGrammarRules) {
      return invalid("json_schema has more than {} schemas in it", kMaxGrammarRules);
    }
    if (value.is_bool()) return {};
    if (!value.is_object()) {
      return invalid("{} is {}, expected a schema", at(path), brief(value));
    }
    const json::object& object = value.get_object();
    FATHOM_RETURN_IF_ERROR(values(object, path));
    FATHOM_RETURN_IF_ERROR(keywords(object, path));
    FATHOM_RETURN_IF_ERROR(required(object, path));
    FATHOM_RETURN_IF_ERROR(texts(object, path));
    return below(object, path);
  }

 private:
  static std::string at(const std::string& path) {
    return path.empty() ? "json_schema" : "json_schema at " + path;
  }

  // Checks the values of keywords.
  static Result<> values(const json::object& object, const std::string& path) {
    if (const json::value* const type = object.if_contains("type")) {
      FATHOM_RETURN_IF_ERROR(type_names(*type, path));
    }
    for (const auto& [key, value] : object) {
      if (is_one_of(key, kBounds) && !value.is_number()) {
        return invalid("{}: {} is {}, expected a number", at(path), std::string_view(key),
                       brief(value));
      }
      const bool is_count = value.is_uint64() || (value.is_int64() && value.get_int64() >= 0);
      if (is_one_of(key, kCounts) && !is_count) {
        return invalid("{}: {} is {}, expected an integer that is not negative", at(path),
                       std::string_view(key), brief(value));
      }
      if (key == "enum" && (!value.is_array() || value.get_array().empty())) {
        return invalid("{}: enum is {}, expected a list of values", at(path), brief(value));
      }
      if (key == "format" && !value.is_string()) {
        return invalid("{}: format is {}, expected a string", at(path), brief(value));
      }
    }
    // References inside would be relative to this $id instead of the root.
    if (!path.empty() && object.contains("$id")) {
      return invalid("{}: $id is not supported here", at(path));
    }
    if (const json::value* const step = object.if_contains("multipleOf");
        step != nullptr && !(step->is_number() && step->to_number<double>() > 0)) {
      return invalid("{}: multipleOf is {}, expected a number above 0", at(path), brief(*step));
    }
    return {};
  }

  static Result<> type_names(const json::value& type, const std::string& path) {
    const auto is_name = [](const json::value& value) {
      return value.is_string() && is_one_of(value.get_string(), kTypes);
    };
    if (is_name(type)) return {};
    const json::array* const names = type.if_array();
    const bool all =
        names != nullptr && !names->empty() && std::all_of(names->begin(), names->end(), is_name);
    if (!all) {
      return invalid("{}: type is {}, expected the name of a type or a list of such names",
                     at(path), json::serialize(type).substr(0, 100));
    }
    for (auto name = names->begin(); name != names->end(); ++name) {
      if (std::find(names->begin(), name, *name) != name) {
        return invalid("{}: type names {} twice", at(path), brief(*name));
      }
    }
    return {};
  }

  // Checks that required names are in properties; XGrammar would ignore others.
  static Result<> required(const json::object& object, const std::string& path) {
    const json::value* const names = object.if_contains("required");
    if (names == nullptr) return {};
    const json::value* const declared = object.if_contains("properties");
    const json::object* const properties = declared == nullptr ? nullptr : declared->if_object();
    if (!names->is_array()) {
      return invalid("{}: required is {}, expected a list of names", at(path), brief(*names));
    }
    std::unordered_set<std::string_view> seen;
    for (const json::value& name : names->get_array()) {
      if (!name.is_string()) {
        return invalid("{}: required has {}, expected names", at(path), brief(name));
      }
      if (!seen.insert(name.get_string()).second) {
        return invalid("{}: required names {} twice", at(path), brief(name));
      }
      if (properties == nullptr || !properties->contains(name.get_string())) {
        return invalid("{}: required names {}, which properties does not declare", at(path),
                       brief(name));
      }
    }
    return {};
  }

  Result<> keywords(const json::object& object, const std::string& path) const {
    for (const auto& [key, value] : object) {
      if (is_one_of(key, kUnsupported))
        return invalid("{}: {} is not supported", at(path), std::string_view(key));
    }
    if (const json::value* unique = object.if_contains("uniqueItems");
        unique != nullptr && *unique != json::value(false)) {
      return invalid("{}: uniqueItems is not supported", at(path));
    }
    if (object.contains("propertyNames") && object.contains("properties")) {
      return invalid("{}: propertyNames beside properties is not supported", at(path));
    }
    if (object.contains("pattern") && object.contains("format")) {
      return invalid("{}: pattern beside format is not supported", at(path));
    }
    const auto head = std::find_if(kHeads.begin(), kHeads.end(),
                                   [&](std::string_view key) { return object.contains(key); });
    if (head != kHeads.end()) return alone(object, *head, path);
    if (object.contains("type")) return counted_properties(object, path);
    const bool implied = std::any_of(kImplyType.begin(), kImplyType.end(),
                                     [&](std::string_view key) { return object.contains(key); });
    for (const auto& [key, value] : object) {
      if (!implied && is_one_of(key, kAssertions)) {
        return invalid("{}: {} needs a type beside it", at(path), std::string_view(key));
      }
    }
    return counted_properties(object, path);
  }

  // Checks the keywords beside the one that determines the value.
  Result<> alone(const json::object& object, std::string_view head, const std::string& path) const {
    for (const auto& [key, value] : object) {
      const bool other_head = key != head && is_one_of(key, kHeads);
      if (!other_head && !is_one_of(key, kAssertions)) continue;
      if (key == "type" && (head == "const" || head == "enum")) {
        FATHOM_RETURN_IF_ERROR(values_have_type(object, head, value, path));
        continue;
      }
      return invalid("{}: {} beside {} is not supported", at(path), std::string_view(key), head);
    }
    if (head == "allOf" && object.at("allOf").is_array() &&
        object.at("allOf").get_array().size() != 1) {
      return invalid("{}: allOf with other than one schema is not supported", at(path));
    }
    if (head == "$ref") return reference(object.at("$ref"), path);
    return {};
  }

  Result<> values_have_type(const json::object& object, std::string_view head,
                            const json::value& type, const std::string& path) const {
    const auto fits = [&](const json::value& value) {
      if (type.is_string()) return has_type(value, type.get_string());
      return type.is_array() && std::any_of(type.get_array().begin(), type.get_array().end(),
                                            [&](const json::value& one) {
                                              return one.is_string() &&
                                                     has_type(value, one.get_string());
                                            });
    };
    const json::value& given = object.at(head);
    const bool all = head == "enum" && given.is_array()
                         ? std::all_of(given.get_array().begin(), given.get_array().end(), fits)
                         : fits(given);
    if (all) return {};
    return invalid("{}: {} has a value that is not of type {}", at(path), head, brief(type));
  }

  // Checks that a reference leads to a schema and not back to itself.
  Result<> reference(const json::value& first, const std::string& path) const {
    std::unordered_set<const json::value*> seen;
    const json::value* reference = &first;
    while (true) {
      if (!reference->is_string()) {
        return invalid("{}: $ref is {}, expected a string", at(path), brief(*reference));
      }
      if (!seen.insert(reference).second) {
        return invalid("{}: $ref {} leads to itself", at(path), brief(first));
      }
      FATHOM_TRY(const json::value* const target, resolve(reference->get_string(), path));
      const json::object* const object = target->if_object();
      const json::value* const next = object == nullptr ? nullptr : object->if_contains("$ref");
      if (next == nullptr) return {};
      reference = next;
    }
  }

  Result<const json::value*> resolve(std::string_view uri, const std::string& path) const {
    if (uri == "#") return &root_;
    if (!uri.starts_with("#/")) {
      return invalid(
          "{}: $ref is \"{}\"; only references inside the schema (\"#/…\") are supported", at(path),
          uri.substr(0, 100));
    }
    const json::value* current = &root_;
    for (std::string_view rest = uri.substr(2); !rest.empty();) {
      const size_t slash = std::min(rest.find('/'), rest.size());
      const std::string_view part = rest.substr(0, slash);
      rest.remove_prefix(std::min(slash + 1, rest.size()));
      const json::object* const object = current->if_object();
      current = object == nullptr || part.empty() ? nullptr : object->if_contains(part);
      if (current == nullptr) {
        return invalid("{}: $ref is \"{}\", which is not in the schema", at(path),
                       uri.substr(0, 100));
      }
    }
    return current;
  }

  Result<> counted_properties(const json::object& object, const std::string& path) const {
    if (!object.contains("minProperties") && !object.contains("maxProperties")) return {};
    FATHOM_RETURN_IF_ERROR(counted_names(object, path));
    const json::value* const properties = object.if_contains("properties");
    const auto count =
        properties != nullptr && properties->is_object() ? std::ssize(properties->get_object()) : 0;
    for (const char* key : {"minProperties", "maxProperties"}) {
      const json::value* const limit = object.if_contains(key);
      if (limit == nullptr || !limit->is_int64() || limit->get_int64() <= 0) continue;
      const int64_t counted = std::min<int64_t>(limit->get_int64(), count);
      if (counted * count > kMaxCountedProperties) {
        return invalid("{}: {} is {} beside {} properties, more than can be counted", at(path), key,
                       limit->get_int64(), count);
      }
    }
    return {};
  }

  // Undeclared names may occur twice in the output, where they are one property but would count as
  // two.
  static Result<> counted_names(const json::object& object, const std::string& path) {
    const json::value* const least = object.if_contains("minProperties");
    if (least == nullptr || *least == 0 || *least == 1) return {};
    for (const char* key : {"additionalProperties", "unevaluatedProperties", "propertyNames"}) {
      const json::value* const other = object.if_contains(key);
      if (other == nullptr || *other == json::value(false)) continue;
      return invalid("{}: minProperties beside {} is not supported", at(path), key);
    }
    return {};
  }

  // Checks regular expressions; all in a schema share one limit.
  Result<> texts(const json::object& object, const std::string& path) {
    if (const json::value* pattern = object.if_contains("pattern")) {
      if (!pattern->is_string()) {
        return invalid("{}: pattern is {}, expected a string", at(path), brief(*pattern));
      }
      FATHOM_RETURN_IF_ERROR(regex(pattern->get_string(), at(path) + ": pattern"));
    }
    return {};
  }

  Result<> regex(std::string_view text, const std::string& field) {
    FATHOM_TRY(const int64_t elements, check_regex(text, field));
    elements_ += elements;
    if (elements_ <= kMaxGrammarElements) return {};
    return invalid("{}: the schema's patterns have more than {} characters and classes together",
                   field, kMaxGrammarElements);
  }

  Result<> below(const json::object& object, const std::string& path) {
    for (const auto& [key, value] : object) {
      const std::string here = path + "/" + std::string(key);
      if (key == "properties" || key == "$defs" || key == "definitions") {
        if (!value.is_object()) {
          return invalid("{} is {}, expected an object", at(here), brief(value));
        }
        for (const auto& [name, sub] : value.get_object()) {
          FATHOM_RETURN_IF_ERROR(schema(sub, here + "/" + std::string(name)));
        }
      } else if (key == "anyOf" || key == "oneOf" || key == "allOf" || key == "prefixItems") {
        if (!value.is_array() || value.get_array().empty()) {
          return invalid("{} is {}, expected a list of schemas", at(here), brief(value));
        }
        for (size_t i = 0; i < value.get_array().size(); ++i) {
          FATHOM_RETURN_IF_ERROR(schema(value.get_array()[i], fmt::format("{}/{}", here, i)));
        }
      } else if (key == "items" || key == "additionalProperties" || key == "propertyNames" ||
                 key == "unevaluatedProperties" || key == "unevaluatedItems") {
        FATHOM_RETURN_IF_ERROR(schema(value, here));
      } else if (key == "$ref") {
        // Whatever the reference leads to is used as a schema.
        FATHOM_TRY(const json::value* const target, resolve(value.get_string(), path));
        FATHOM_RETURN_IF_ERROR(schema(*target, std::string(value.get_string())));
      }
    }
    return {};
  }

  const json::value& root_;
  std::unordered_set<const json::value*> visited_;
  int64_t count_ = 0, elements_ = 0;
};

}  // namespace

Result<std::string> check_schema(std::string_view schema) {
  FATHOM_RETURN_IF_ERROR(check_text(schema, "json_schema"));
  FATHOM_TRY(const json::value root, parse_json(schema, "json_schema", kMaxGrammarDepth));
  FATHOM_RETURN_IF_ERROR(SchemaCheck(root).schema(root, ""));
  return json::serialize(root);
}

}  // namespace fathom
