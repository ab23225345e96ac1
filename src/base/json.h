// Reads JSON from files and users: Boost.JSON behind limits, and field readers whose errors name
// the file, the field, the value and what was expected.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace fathom {

namespace json = boost::json;

// Parses `text`, which must be UTF-8 without a byte order mark. `source` begins each error
// ("config.json: …"). Nesting is limited to max_depth; of duplicate keys the last one counts.
Result<json::value> parse_json(std::string_view text, std::string_view source, int max_depth = 64);

// Reads a whole file. A file larger than max_bytes is refused before it is read.
Result<std::string> read_text_file(const std::string& path, int64_t max_bytes);

// A short form of a value for error messages: "12", "\"abc…\"", "[…]".
std::string brief(const json::value& value);

// Reads typed fields of one object. `where` begins each error ("config.json: rope_scaling."). The
// optional_ functions return nothing if the key is missing or null.
class JsonFields {
 public:
  JsonFields(const json::object& object, std::string where);

  bool has(std::string_view key) const;  // present and not null
  const json::value* find(std::string_view key) const;

  Result<int64_t> integer(std::string_view key, int64_t min, int64_t max) const;
  Result<std::optional<int64_t>> optional_integer(std::string_view key, int64_t min,
                                                  int64_t max) const;
  Result<std::optional<double>> optional_number(std::string_view key, double min, double max) const;
  Result<std::optional<bool>> optional_boolean(std::string_view key) const;
  Result<std::optional<std::string>> optional_string(std::string_view key) const;
  Result<std::string> string(std::string_view key) const;

 private:
  const json::object& object_;
  std::string where_;
};

}  // namespace fathom
