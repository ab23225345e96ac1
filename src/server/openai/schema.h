// What JSON a request may be: one table an object, from which a body is checked, read into a struct
// and described in the OpenAPI document, so that the three cannot disagree.
//
// A struct names its table: `static const ObjectSchema& schema()`, made with SchemaOf<Struct>.
// Null is as absent for every field that is not required. Fields that no table knows are accepted
// and reported.
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

// Token ids and counts of tokens in requests.
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Limits that a server is started with.
struct RequestLimits {
  int64_t max_choices = 32;     // n; at most kMaxChoices
  bool refuse_unknown = false;  // fields that no table knows are a 400
  bool allow_priority = false;  // otherwise `priority` is as a field that no table knows
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
    kMap,      // token ids as keys, `items` as values
    kOneOf,    // `alternatives`, told apart by their JSON kind
    kVariant,  // objects of `variants`, told apart by their field `tag`
  };
  Kind kind = Kind::kAny;
  int64_t min_integer = 0, max_integer = 0;
  int64_t RequestLimits::*limit = nullptr;  // replaces max_integer
  double min = 0, max = 0;
  bool above_min = false;                    // min itself is not allowed
  size_t min_size = 0, max_size = SIZE_MAX;  // bytes or items
  bool is_name = false;                      // no control characters
  std::vector<std::string_view> words = {};  // the only strings allowed
  std::shared_ptr<const Type> items = {};
  const ObjectSchema* object = nullptr;
  std::vector<Type> alternatives = {};
  std::string_view tag = {};
  std::string_view default_tag = {};  // the variant of an object without a tag, if that may be
  std::vector<std::pair<std::string_view, const ObjectSchema*>> variants = {};
};

struct Field {
  std::string_view name;
  Type type;
  bool required = false;
  std::string_view description;
  // Puts the checked value into the struct that the table is of. Null: the value is not used.
  std::function<void(void* object, const json::value& value)> store;
};

struct ObjectSchema {
  std::string_view name;  // in the OpenAPI document
  std::vector<Field> fields;

  const Field* find(std::string_view field) const;
};

// Types, as a table writes them.
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

// "an integer from 1 to 8": what an error says was expected.
std::string expected(const Type& type, const RequestLimits& limits);

// Checks an object against its table. The error's param is the path to the first value that is
// wrong: "messages[0].content". Paths of unknown fields are appended to `unknown` (at most 32).
ApiResult<> check_object(const ObjectSchema& schema, const json::object& object,
                         const RequestLimits& limits, std::vector<std::string>* unknown,
                         const std::string& path = "");

// Fills `target`, a struct of this table, from an object that has been checked.
void store_fields(const ObjectSchema& schema, const json::object& object, void* target);

// How a checked value becomes a member.
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

// For tables of objects that are checked and described but read elsewhere.
struct Unread {};

// Makes the table of T.
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
  // Checked here; read elsewhere or not at all.
  SchemaOf& checked(std::string_view name, Type type, std::string_view description) {
    schema_.fields.push_back({name, std::move(type), false, description, nullptr});
    return *this;
  }
  SchemaOf& required_checked(std::string_view name, Type type, std::string_view description) {
    checked(name, std::move(type), description);
    schema_.fields.back().required = true;
    return *this;
  }
  // All fields of a member's own table, at this level.
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

// A request's struct from its body. Unknown fields are named in `unknown`.
template <typename T>
ApiResult<T> read_request(const json::object& body, const RequestLimits& limits,
                          std::vector<std::string>* unknown) {
  FATHOM_RETURN_IF_ERROR(check_object(T::schema(), body, limits, unknown));
  T request;
  store_fields(T::schema(), body, &request);
  return request;
}

}  // namespace fathom
