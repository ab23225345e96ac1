#include "server/openai/schema.h"

#include <algorithm>
#include <charconv>

#include "base/utf8.h"

namespace fathom {
namespace {

constexpr size_t kMaxUnknownReported = 32;
constexpr size_t kMaxKeyReported = 64;

bool fits_kind(const Type& type, const json::value& value) {
  switch (type.kind) {
    case Type::Kind::kAny:
      return true;
    case Type::Kind::kBoolean:
      return value.is_bool();
    case Type::Kind::kInteger:
    case Type::Kind::kNumber:
      return value.is_number();
    case Type::Kind::kString:
      return value.is_string();
    case Type::Kind::kArray:
      return value.is_array();
    case Type::Kind::kObject:
    case Type::Kind::kMap:
    case Type::Kind::kVariant:
      return value.is_object();
    case Type::Kind::kOneOf:
      return std::any_of(type.alternatives.begin(), type.alternatives.end(),
                         [&](const Type& one) { return fits_kind(one, value); });
  }
  return false;
}

int64_t max_integer(const Type& type, const RequestLimits& limits) {
  return type.limit == nullptr ? type.max_integer : limits.*type.limit;
}

std::string quoted_words(const std::vector<std::string_view>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += fmt::format("\"{}\"", words[i]);
  }
  return text;
}

// Returns the medium of a message part that other models accept; null for any other word.
const char* unsupported_medium(std::string_view part) {
  struct Medium {
    std::string_view part;
    const char* what;
  };
  static constexpr Medium kMedia[] = {{"image_url", "images"},  {"input_image", "images"},
                                      {"image", "images"},      {"input_audio", "recordings"},
                                      {"audio", "recordings"},  {"video_url", "films"},
                                      {"file", "files"},        {"input_file", "files"},
                                      {"document", "documents"}};
  const auto* const found = std::find_if(std::begin(kMedia), std::end(kMedia),
                                         [&](const Medium& one) { return one.part == part; });
  return found == std::end(kMedia) ? nullptr : found->what;
}

// State of one check of a body.
class Checker {
 public:
  Checker(const RequestLimits& limits, std::vector<std::string>* unknown)
      : limits_(limits), unknown_(unknown) {}

  ApiResult<> object(const ObjectSchema& schema, const json::object& object,
                     const std::string& path) {
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const Field& field : schema.fields) {
      const json::value* found = object.if_contains(field.name);
      const std::string where = prefix + std::string(field.name);
      if (found == nullptr || found->is_null()) {
        if (!field.required) continue;
        return bad_field(where, "{} is {}, expected {}", where,
                         found == nullptr ? "missing" : "null", expected(field.type, limits_));
      }
      FATHOM_RETURN_IF_ERROR(value(field.type, *found, where));
    }
    for (const auto& [key, ignored] : object) {
      if (schema.find(key) == nullptr) FATHOM_RETURN_IF_ERROR(report_unknown(prefix, key));
    }
    return {};
  }

 private:
  ApiResult<> report_unknown(const std::string& prefix, std::string_view key) {
    const size_t shown = complete_utf8_prefix(key.substr(0, kMaxKeyReported));
    const std::string where = prefix + std::string(key.substr(0, shown));
    if (limits_.refuse_unknown) {
      return tl::unexpected(ApiError(
          400, fmt::format("the field {} is not known", brief(json::value(json::string(where)))),
          where, "unsupported_parameter"));
    }
    if (unknown_ != nullptr && unknown_->size() < kMaxUnknownReported) unknown_->push_back(where);
    return {};
  }

  tl::unexpected<ApiError> wrong(const Type& type, const json::value& found,
                                 const std::string& where) {
    return bad_field(where, "{} is {}, expected {}", where, brief(found), expected(type, limits_));
  }

  ApiResult<> value(const Type& type, const json::value& found, const std::string& where) {
    if (!fits_kind(type, found)) return wrong(type, found, where);
    switch (type.kind) {
      case Type::Kind::kAny:
      case Type::Kind::kBoolean:
        return {};
      case Type::Kind::kInteger:
        return integer(type, found, where);
      case Type::Kind::kNumber:
        return number(type, found, where);
      case Type::Kind::kString:
        return string(type, found, where);
      case Type::Kind::kArray:
        return array(type, found.get_array(), where);
      case Type::Kind::kObject:
        return type.object == nullptr ? ApiResult<>()
                                      : object(*type.object, found.get_object(), where);
      case Type::Kind::kMap:
        return map(type, found.get_object(), where);
      case Type::Kind::kOneOf:
        for (const Type& one : type.alternatives) {
          if (fits_kind(one, found)) return value(one, found, where);
        }
        return {};
      case Type::Kind::kVariant:
        return variant(type, found.get_object(), where);
    }
    return {};
  }

  ApiResult<> integer(const Type& type, const json::value& found, const std::string& where) {
    json::error_code failure;
    const auto number = found.to_number<int64_t>(failure);
    if (failure || number < type.min_integer || number > max_integer(type, limits_)) {
      return wrong(type, found, where);
    }
    return {};
  }

  ApiResult<> number(const Type& type, const json::value& found, const std::string& where) {
    const auto number = found.to_number<double>();
    const bool above = type.above_min ? number > type.min : number >= type.min;
    if (!above || !(number <= type.max)) return wrong(type, found, where);
    return {};
  }

  ApiResult<> string(const Type& type, const json::value& found, const std::string& where) {
    const std::string_view text = found.get_string();
    if (!type.words.empty() &&
        std::find(type.words.begin(), type.words.end(), text) == type.words.end()) {
      return wrong(type, found, where);
    }
    if (text.size() < type.min_size) return bad_field(where, "{} is empty", where);
    if (text.size() > type.max_size) {
      return bad_field(where, "{} has {} bytes, at most {} are allowed", where, text.size(),
                       type.max_size);
    }
    const bool has_control = type.is_name && std::any_of(text.begin(), text.end(), [](char c) {
                               return static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
                             });
    if (has_control) return bad_field(where, "{} has a control character in it", where);
    return {};
  }

  ApiResult<> size(const Type& type, size_t items, const std::string& where) {
    if (items < type.min_size) {
      return bad_field(where, "{} has {} elements, at least {} expected", where, items,
                       type.min_size);
    }
    if (items > type.max_size) {
      return bad_field(where, "{} has {} elements, at most {} are allowed", where, items,
                       type.max_size);
    }
    return {};
  }

  ApiResult<> array(const Type& type, const json::array& found, const std::string& where) {
    FATHOM_RETURN_IF_ERROR(size(type, found.size(), where));
    // Fast path for lists of token ids; value() reports what is wrong.
    if (type.items->kind == Type::Kind::kInteger) {
      for (size_t i = 0; i < found.size(); ++i) {
        const int64_t* number = found[i].if_int64();
        if (number != nullptr && *number >= type.items->min_integer &&
            *number <= max_integer(*type.items, limits_)) {
          continue;
        }
        FATHOM_RETURN_IF_ERROR(value(*type.items, found[i], fmt::format("{}[{}]", where, i)));
      }
      return {};
    }
    for (size_t i = 0; i < found.size(); ++i) {
      FATHOM_RETURN_IF_ERROR(value(*type.items, found[i], fmt::format("{}[{}]", where, i)));
    }
    return {};
  }

  ApiResult<> map(const Type& type, const json::object& found, const std::string& where) {
    FATHOM_RETURN_IF_ERROR(size(type, found.size(), where));
    for (const auto& [key, item] : found) {
      int32_t id = -1;
      const char* end = key.data() + key.size();
      const auto parsed = std::from_chars(key.data(), end, id);
      // "7" and "07" would be the same id.
      const bool has_zeros = key.size() > 1 && key.front() == '0';
      if (parsed.ec != std::errc() || parsed.ptr != end || id < 0 || has_zeros) {
        return bad_field(where, "{} has the key {}, expected a token id", where,
                         brief(json::value(json::string(key))));
      }
      FATHOM_RETURN_IF_ERROR(value(*type.items, item, fmt::format("{}.{}", where, id)));
    }
    return {};
  }

  ApiResult<> variant(const Type& type, const json::object& found, const std::string& where) {
    std::vector<std::string_view> tags;
    for (const auto& [tag, schema] : type.variants) tags.push_back(tag);
    const std::string tag_path = fmt::format("{}.{}", where, type.tag);
    const json::value* tag = found.if_contains(type.tag);
    const bool absent = tag == nullptr || tag->is_null();
    if (absent && type.default_tag.empty()) {
      return bad_field(tag_path, "{} is missing, expected {}", tag_path, quoted_words(tags));
    }
    std::string_view wanted = type.default_tag;
    if (!absent) wanted = tag->is_string() ? std::string_view(tag->get_string()) : "";
    for (const auto& [name, schema] : type.variants) {
      if (name == wanted) return object(*schema, found, where);
    }
    if (const char* const what = unsupported_medium(wanted)) {
      return tl::unexpected(
          ApiError(400,
                   fmt::format("{} is {}: {} are not supported, the model reads text only",
                               tag_path, brief(*tag), what),
                   tag_path, "not_supported"));
    }
    return bad_field(tag_path, "{} is {}, expected {}", tag_path, brief(*tag), quoted_words(tags));
  }

  const RequestLimits& limits_;
  std::vector<std::string>* unknown_;
};

}  // namespace

const Field* ObjectSchema::find(std::string_view field) const {
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [&](const Field& one) { return one.name == field; });
  return found == fields.end() ? nullptr : &*found;
}

Type any_type() { return {}; }
Type boolean() { return {.kind = Type::Kind::kBoolean}; }
Type integer(int64_t min, int64_t max) {
  return {.kind = Type::Kind::kInteger, .min_integer = min, .max_integer = max};
}
Type integer_up_to(int64_t min, int64_t RequestLimits::*limit) {
  return {.kind = Type::Kind::kInteger, .min_integer = min, .limit = limit};
}
Type number(double min, double max) {
  return {.kind = Type::Kind::kNumber, .min = min, .max = max};
}
Type number_above(double min, double max) {
  return {.kind = Type::Kind::kNumber, .min = min, .max = max, .above_min = true};
}
Type string(size_t min_bytes, size_t max_bytes) {
  return {.kind = Type::Kind::kString, .min_size = min_bytes, .max_size = max_bytes};
}
Type name_string(size_t max_bytes) {
  return {.kind = Type::Kind::kString, .min_size = 1, .max_size = max_bytes, .is_name = true};
}
Type one_word_of(std::vector<std::string_view> words) {
  return {.kind = Type::Kind::kString, .words = std::move(words)};
}
Type array_of(Type items, size_t min_items, size_t max_items) {
  return {.kind = Type::Kind::kArray,
          .min_size = min_items,
          .max_size = max_items,
          .items = std::make_shared<const Type>(std::move(items))};
}
Type any_object() { return {.kind = Type::Kind::kObject}; }
Type object_of(const ObjectSchema& schema) {
  return {.kind = Type::Kind::kObject, .object = &schema};
}
Type map_of(Type values, size_t max_items) {
  return {.kind = Type::Kind::kMap,
          .max_size = max_items,
          .items = std::make_shared<const Type>(std::move(values))};
}
Type one_of(std::vector<Type> alternatives) {
  return {.kind = Type::Kind::kOneOf, .alternatives = std::move(alternatives)};
}
Type variant(std::string_view tag,
             std::vector<std::pair<std::string_view, const ObjectSchema*>> variants,
             std::string_view default_tag) {
  return {.kind = Type::Kind::kVariant,
          .tag = tag,
          .default_tag = default_tag,
          .variants = std::move(variants)};
}

std::string expected(const Type& type, const RequestLimits& limits) {
  switch (type.kind) {
    case Type::Kind::kAny:
      return "a value";
    case Type::Kind::kBoolean:
      return "true or false";
    case Type::Kind::kInteger:
      return fmt::format("an integer from {} to {}", type.min_integer, max_integer(type, limits));
    case Type::Kind::kNumber:
      return type.above_min ? fmt::format("a number above {} and at most {}", type.min, type.max)
                            : fmt::format("a number from {} to {}", type.min, type.max);
    case Type::Kind::kString:
      return type.words.empty() ? "a string" : quoted_words(type.words);
    case Type::Kind::kArray:
      return "an array";
    case Type::Kind::kObject:
    case Type::Kind::kMap:
    case Type::Kind::kVariant:
      return "an object";
    case Type::Kind::kOneOf: {
      std::string text;
      for (const Type& one : type.alternatives) {
        if (!text.empty()) text += " or ";
        text += expected(one, limits);
      }
      return text;
    }
  }
  return "a value";
}

ApiResult<> check_object(const ObjectSchema& schema, const json::object& object,
                         const RequestLimits& limits, std::vector<std::string>* unknown,
                         const std::string& path) {
  return Checker(limits, unknown).object(schema, object, path);
}

void store_fields(const ObjectSchema& schema, const json::object& object, void* target) {
  for (const Field& field : schema.fields) {
    const json::value* value = object.if_contains(field.name);
    if (value != nullptr && !value->is_null() && field.store) field.store(target, *value);
  }
}

}  // namespace fathom
