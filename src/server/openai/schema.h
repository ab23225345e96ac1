// Request schemas: one table per JSON object. The table checks a body, fills a struct from it and
// describes it in the OpenAPI document, so the three cannot disagree.
//
// A struct names its table: `static const ObjectSchema& schema()`, built with SchemaOf<Struct>.
// Null counts as absent in every optional field. Fields that no table knows are accepted and
// reported.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "server/openai/api_error.h"

namespace fathom {

// Limit of token ids and token counts in requests.
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Limits set by start-up flags.
struct RequestLimits {
  int64_t max_choices = 32;     // n; at most kMaxChoices
  bool refuse_unknown = false;  // unknown fields are a 400
  bool allow_priority = false;  // false: `priority` is an unknown field
};

struct ObjectSchema;

// One JSON type with its limits: a subset of JSON Schema.
struct Type {
  enum class Kind {
    kAny,
    kBoolean,
    kInteger,
    kNumber,
    kString,
    kArray,
    kObject,   // with the fields of `object`, or any
    kMap,      // keys are token ids, values are `items`
    kOneOf,    // `alternatives`, distinguished by JSON kind
    kVariant,  // objects of `variants`, distinguished by their field `tag`
  };
  Kind kind = Kind::kAny;
  int64_t min_integer = 0, max_integer = 0;
  int64_t RequestLimits::*limit = nullptr;  // replaces max_integer
  double min = 0, max = 0;
  bool above_min = false;                    // `min` itself is excluded
  size_t min_size = 0, max_size = SIZE_MAX;  // in bytes or items
  bool is_name = false;                      // control characters are refused
  std::vector<std::string_view> words = {};  // the only strings allowed
  std::shared_ptr<const Type> items = {};
  const ObjectSchema* object = nullptr;
  std::vector<Type> alternatives = {};
  std::string_view tag = {};
  std::string_view default_tag = {};  // for objects without a tag; empty: the tag is required
  std::vector<std::pair<std::string_view, const ObjectSchema*>> variants = {};
};

struct Field {
  std::string_view name;
  Type type;
  bool required = false;
  std::string_view description;
  // Stores the checked value in the table's struct. Null: the value is not used.
  std::function<void(void* object, const json::value& value)> store;
};

struct ObjectSchema {
  std::string_view name;  // name in the OpenAPI document
  std::vector<Field> fields;

  const Field* find(std::string_view field) const;
};

// Constructors for the types of a table. Sizes of strings are in bytes.
Type any_type();
Type boolean();
Type integer(int64_t min, int64_t max);
Type integer_up_to(int64_t min, int64_t RequestLimits::*limit);
Type number(double min, double max);
Type number_above(double min, double max);
Type string(size_t min_bytes = 0, size_t max_bytes = SIZE_MAX);
Type name_string(size_t max_bytes = 256);  // at least one byte, no control characters
Type one_word_of(std::vector<std::string_view> words);
Type array_of(Type items, size_t min_items = 0, size_t max_items = SIZE_MAX);
Type any_object();
Type object_of(const ObjectSchema& schema);
Type map_of(Type values, size_t max_items);
Type one_of(std::vector<Type> alternatives);
Type variant(std::string_view tag,
             std::vector<std::pair<std::string_view, const ObjectSchema*>> variants,
             std::string_view default_tag = {});

// Returns what an error says was expected: "an integer from 1 to 8".
std::string expected(const Type& type, const RequestLimits& limits);

// Checks an object against its table. The error's param is the path of the first wrong value, such
// as "messages[0].content". Paths of unknown fields are appended to `unknown` (at most 32).
ApiResult<> check_object(const ObjectSchema& schema, const json::object& object,
                         const RequestLimits& limits, std::vector<std::string>* unknown,
                         const std::string& path = "");

// Fills `target`, the struct of this table, from a checked object.
void store_fields(const ObjectSchema& schema, const json::object& object, void* target);

// Convert a checked value to a member.
inline void read_value(const json::value& value, bool& out) { out = value.get_bool(); }
inline void read_value(const json::value& value, int64_t& out) { out = value.to_number<int64_t>(); }
inline void read_value(const json::value& value, int32_t& out) { out = value.to_number<int32_t>(); }
inline void read_value(const json::value& value, double& out) { out = value.to_number<double>(); }
inline void read_value(const json::value& value, std::string& out) { out = value.get_string(); }
inline void read_value(const json::value& value, json::value& out) { out = value; }
template <typename T>
requires requires { T::schema(); }
void read_value(const json::value& value, T& out) {
  store_fields(T::schema(), value.get_object(), &out);
}
template <typename T>
void read_value(const json::value& value, std::vector<T>& out) {
  for (const json::value& item : value.get_array()) read_value(item, out.emplace_back());
}
template <typename T>
void read_value(const json::value& value, std::optional<T>& out) {
  read_value(value, out.emplace());
}

// Struct of tables whose objects are checked and described here but read elsewhere.
struct Unread {};

// Builds the table of T.
template <typename T>
class SchemaOf {
 public:
  explicit SchemaOf(std::string_view name) { schema_.name = name; }

  template <typename M>
  SchemaOf& field(std::string_view name, M T::*member, Type type, std::string_view description) {
    schema_.fields.push_back({name, std::move(type), false, description,
                              [member](void* object, const json::value& value) {
                                read_value(value, static_cast<T*>(object)->*member);
                              }});
    return *this;
  }
  template <typename M>
  SchemaOf& required(std::string_view name, M T::*member, Type type, std::string_view description) {
    field(name, member, std::move(type), description);
    schema_.fields.back().required = true;
    return *this;
  }
  // Adds a field that is checked here and read elsewhere or not at all.
  SchemaOf& checked(std::string_view name, Type type, std::string_view description) {
    schema_.fields.push_back({name, std::move(type), false, description, nullptr});
    return *this;
  }
  SchemaOf& required_checked(std::string_view name, Type type, std::string_view description) {
    checked(name, std::move(type), description);
    schema_.fields.back().required = true;
    return *this;
  }
  // Adds all fields of a member's table at this level.
  template <typename M>
  SchemaOf& include(M T::*member) {
    for (Field inner : M::schema().fields) {
      if (inner.store) {
        inner.store = [member, store = inner.store](void* object, const json::value& value) {
          store(&(static_cast<T*>(object)->*member), value);
        };
      }
      schema_.fields.push_back(std::move(inner));
    }
    return *this;
  }

  ObjectSchema build() { return std::move(schema_); }

 private:
  ObjectSchema schema_;
};

// Checks a body and returns its struct. Paths of unknown fields are appended to `unknown`.
template <typename T>
ApiResult<T> read_request(const json::object& body, const RequestLimits& limits,
                          std::vector<std::string>* unknown) {
  FATHOM_RETURN_IF_ERROR(check_object(T::schema(), body, limits, unknown));
  T request;
  store_fields(T::schema(), body, &request);
  return request;
}

}  // namespace fathom
