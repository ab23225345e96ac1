#include "base/json.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/utf8.h"

namespace fathom {

Result<json::value> parse_json(std::string_view text, std::string_view source, int max_depth) {
  if (text.starts_with("\xEF\xBB\xBF")) {
    return invalid("{}: begins with a byte order mark; JSON files have none", source);
  }
  json::parse_options options;
  options.max_depth = static_cast<size_t>(max_depth);
  json::stream_parser parser({}, options);
  json::error_code failure;
  size_t consumed = parser.write_some(text.data(), text.size(), failure);
  if (!failure) {
    // Only white space may follow the value.
    const size_t rest = text.find_first_not_of(" \t\r\n", consumed);
    if (rest != std::string_view::npos) {
      return invalid("{}: not valid JSON: something follows the end at byte {}", source, rest);
    }
    parser.finish(failure);
  }
  if (failure == json::error::too_deep) {
    return invalid("{}: JSON nested deeper than {} levels", source, max_depth);
  }
  if (failure) {
    return invalid("{}: not valid JSON at byte {}: {}", source, consumed, failure.message());
  }
  return parser.release();
}

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  std::error_code failure, ignored;
  const auto status = std::filesystem::status(path, failure);
  // A dangling or circular link exists, so the error is not that the file is missing.
  const bool is_link = std::filesystem::is_symlink(std::filesystem::symlink_status(path, ignored));
  if (is_link && (failure || status.type() == std::filesystem::file_type::not_found)) {
    return invalid("{}: cannot be read: {}", path,
                   failure ? failure.message() : "it is a link that leads nowhere");
  }
  if (failure || status.type() == std::filesystem::file_type::not_found) {
    return not_found("{}: cannot be read: {}", path, failure ? failure.message() : "no such file");
  }
  if (status.type() != std::filesystem::file_type::regular) {
    return invalid("{}: not a regular file", path);
  }
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, failure));
  if (failure) return invalid("{}: cannot be read: {}", path, failure.message());
  if (size > max_bytes) {
    return invalid("{}: {} bytes, the limit for this file is {}", path, size, max_bytes);
  }
  std::ifstream stream(path, std::ios::binary);
  std::string text(static_cast<size_t>(size), '\0');
  if (!stream.read(text.data(), size)) return invalid("{}: cannot be read to its end", path);
  return text;
}

std::string brief(const json::value& value) {
  constexpr size_t kLongest = 60;
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  std::string text = json::serialize(value);
  if (text.size() <= kLongest) return text;
  text.resize(complete_utf8_prefix(std::string_view(text).substr(0, kLongest)));
  return text + "…";
}

JsonFields::JsonFields(const json::object& object, std::string where)
    : object_(object), where_(std::move(where)) {}

const json::value* JsonFields::find(std::string_view key) const {
  const json::value* value = object_.if_contains(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

bool JsonFields::has(std::string_view key) const { return find(key) != nullptr; }

Result<std::optional<int64_t>> JsonFields::optional_integer(std::string_view key, int64_t min,
                                                            int64_t max) const {
  const json::value* value = find(key);
  if (value == nullptr) return std::optional<int64_t>();
  json::error_code failure;
  const auto number = value->is_number() ? value->to_number<int64_t>(failure) : int64_t{0};
  if (!value->is_number() || failure) {
    return invalid("{}{} is {}, expected an integer from {} to {}", where_, key, brief(*value), min,
                   max);
  }
  if (number < min || number > max) {
    return invalid("{}{} is {}, allowed are {} to {}", where_, key, number, min, max);
  }
  return std::optional<int64_t>(number);
}

Result<int64_t> JsonFields::integer(std::string_view key, int64_t min, int64_t max) const {
  FATHOM_TRY(const auto value, optional_integer(key, min, max));
  if (!value) return invalid("{}{} is missing", where_, key);
  return *value;
}

Result<std::optional<double>> JsonFields::optional_number(std::string_view key, double min,
                                                          double max) const {
  const json::value* value = find(key);
  if (value == nullptr) return std::optional<double>();
  if (!value->is_number()) {
    return invalid("{}{} is {}, expected a number from {} to {}", where_, key, brief(*value), min,
                   max);
  }
  const auto number = value->to_number<double>();
  if (!(number >= min && number <= max)) {
    return invalid("{}{} is {}, allowed are {} to {}", where_, key, number, min, max);
  }
  return std::optional<double>(number);
}

Result<std::optional<bool>> JsonFields::optional_boolean(std::string_view key) const {
  const json::value* value = find(key);
  if (value == nullptr) return std::optional<bool>();
  if (!value->is_bool()) {
    return invalid("{}{} is {}, expected true or false", where_, key, brief(*value));
  }
  return std::optional<bool>(value->get_bool());
}

Result<std::optional<std::string>> JsonFields::optional_string(std::string_view key) const {
  const json::value* value = find(key);
  if (value == nullptr) return std::optional<std::string>();
  if (!value->is_string()) {
    return invalid("{}{} is {}, expected a string", where_, key, brief(*value));
  }
  return std::optional<std::string>(std::string(value->get_string()));
}

Result<std::string> JsonFields::string(std::string_view key) const {
  FATHOM_TRY(auto value, optional_string(key));
  if (!value) return invalid("{}{} is missing", where_, key);
  return *value;
}

}  // namespace fathom
