// Reads a tool's JSON schema, which is as its client wrote it: any field may be of any type.
#pragma once

#include <algorithm>
#include <string_view>

#include "base/json.h"

namespace fathom {

// The member of an object; nothing if it is missing or `value` is no object.
inline const json::value* find_member(const json::value& value, std::string_view key) {
  const json::object* object = value.if_object();
  return object == nullptr ? nullptr : object->if_contains(key);
}

// Whether an object's schema lists a property as required.
inline bool requires_property(const json::value& schema, std::string_view name) {
  const json::value* required = find_member(schema, "required");
  if (required == nullptr || !required->is_array()) return false;
  return std::ranges::any_of(required->get_array(), [&](const json::value& one) {
    return one.is_string() && std::string_view(one.get_string()) == name;
  });
}

}  // namespace fathom
