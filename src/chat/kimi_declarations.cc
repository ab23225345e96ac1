#include "chat/kimi_declarations.h"

#include <map>
#include <optional>
#include <string_view>

#include "chat/python_json.h"
#include "chat/schema_fields.h"

namespace fathom {
namespace {

constexpr std::string_view kStep = "  ";

// A type's text, or nothing if the schema cannot be expressed.
using Text = std::optional<std::string>;

json::value sorted(const json::value& value) {
  if (const json::array* array = value.if_array()) {
    json::array out;
    for (const json::value& element : *array) out.push_back(sorted(element));
    return out;
  }
  const json::object* object = value.if_object();
  if (object == nullptr) return value;
  std::map<std::string_view, const json::value*> members;  // of UTF-8: the order of code points
  for (const auto& [key, member] : *object) members[key] = &member;
  json::object out;
  for (const auto& [key, member] : members) out[key] = sorted(*member);
  return out;
}

bool is_number(const json::value& value) { return value.is_number() || value.is_bool(); }

std::string comment_lines(std::string_view text, std::string_view indent) {
  std::string out;
  for (;;) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    if (!line.empty()) {
      out += indent;
      out += "// ";
      out += line;
    }
    if (end == std::string_view::npos) return out;
    out += '\n';
    text.remove_prefix(end + 1);
  }
}

std::string_view description_of(const json::value& schema) {
  const json::value* text = find_member(schema, "description");
  return text != nullptr && text->is_string() ? std::string_view(text->get_string()) : "";
}

// The types of one function's schema: local references are by name, with an interface each.
class TypeWriter {
 public:
  // The declaration of a function with its interfaces.
  Text function(const json::value& declared) {
    const json::value* name = find_member(declared, "name");
    const json::value* parameters = find_member(declared, "parameters");
    const json::value none = json::object();
    if (parameters == nullptr || parameters->is_null()) parameters = &none;
    if (name == nullptr || !name->is_string() || !parameters->is_object()) return std::nullopt;
    // The whole is written first: it registers the definitions and sees references to itself.
    Text type = object(*parameters, "");
    if (!type) return std::nullopt;
    std::string out;
    if (refers_to_itself_) {
      Text members = listed_members(*parameters);
      if (!members) return std::nullopt;
      out += "interface parameters {" + *members + "}\n";
      type = "parameters";
    }
    const json::object definitions = definitions_;
    for (const auto& [definition, schema] : definitions) {
      const Text body = this->type(schema, "");
      if (!body) return std::nullopt;
      const std::string_view about = description_of(schema);
      if (!about.empty()) out += comment_lines(about, "") + "\n";
      out += "interface " + std::string(definition) + " " + *body + "\n";
    }
    const std::string_view about = description_of(declared);
    if (!about.empty()) out += comment_lines(about, "") + "\n";
    return out + "type " + std::string(name->get_string()) + " = (_: " + *type + ") => any;";
  }

 private:
  Text type(const json::value& schema, const std::string& indent) {
    if (schema.is_bool()) return schema.get_bool() ? "any" : "null";
    if (!schema.is_object()) return std::nullopt;
    if (const json::value* ref = find_member(schema, "$ref")) return reference(*ref);
    if (const json::value* any = find_member(schema, "anyOf")) return any_of(*any, indent);
    if (const json::value* values = find_member(schema, "enum"))
      return enumeration(schema, *values);
    const json::value* name = find_member(schema, "type");
    if (name == nullptr) return schema.get_object().empty() ? Text("any") : std::nullopt;
    if (const json::array* names = name->if_array()) return union_of(*names);
    if (!name->is_string()) return std::nullopt;
    if (*name == "object") return object(schema, indent);
    if (*name == "array") return array(schema, indent);
    return *name == "integer" ? "number" : std::string(name->get_string());
  }

  Text reference(const json::value& ref) {
    constexpr std::string_view kLocal = "#/$defs/";
    if (!ref.is_string()) return std::nullopt;
    const std::string_view path = ref.get_string();
    if (path == "#") {
      refers_to_itself_ = true;
      return "parameters";
    }
    if (!path.starts_with(kLocal)) return std::nullopt;
    const std::string_view name = path.substr(path.rfind('/') + 1);
    return definitions_.contains(name) ? Text(name) : std::nullopt;
  }

  Text any_of(const json::value& schemas, const std::string& indent) {
    if (!schemas.is_array()) return std::nullopt;
    std::string out;
    for (const json::value& schema : schemas.get_array()) {
      const Text one = type(schema, indent);
      if (!one) return std::nullopt;
      out += (out.empty() ? "" : " | ") + *one;
    }
    return out;
  }

  static Text union_of(const json::array& names) {
    static const std::map<std::string_view, std::string_view> kNames = {
        {"string", "string"}, {"number", "number"}, {"integer", "number"},  {"boolean", "boolean"},
        {"null", "null"},     {"object", "{}"},     {"array", "Array<any>"}};
    std::string out;
    for (const json::value& name : names) {
      const auto found =
          name.is_string() ? kNames.find(std::string_view(name.get_string())) : kNames.end();
      if (found == kNames.end()) return std::nullopt;
      if (!out.empty()) out += " | ";
      out += found->second;
    }
    return out;
  }

  // Whether an enum's value fits the declared type; a list of two types may have null in it.
  static bool fits(const json::value& value, const json::value* declared) {
    if (value.is_null() || declared == nullptr) return true;
    const json::value* name = declared;
    if (const json::array* names = declared->if_array()) {
      if (names->empty() || names->size() > 2) return false;
      const bool first_is_null = (*names)[0] == "null";
      if (names->size() == 2 && !first_is_null && (*names)[1] != "null") return false;
      name = &(*names)[names->size() == 2 && first_is_null ? 1 : 0];
    }
    if (*name == "string") return value.is_string();
    if (*name == "number") return is_number(value);
    if (*name == "integer") return is_number(value) && !value.is_double();
    return *name != "boolean" || value.is_bool();
  }

  static Text enumeration(const json::value& schema, const json::value& values) {
    if (!values.is_array()) return std::nullopt;
    std::string out;
    for (const json::value& value : values.get_array()) {
      if (value.is_structured() || !fits(value, find_member(schema, "type"))) return std::nullopt;
      const std::string text = python_str(value);
      out += (out.empty() ? "" : " | ") + (value.is_string() ? '"' + text + '"' : text);
    }
    return out;
  }

  Text array(const json::value& schema, const std::string& indent) {
    const json::value* items = find_member(schema, "items");
    if (items == nullptr || items->is_null() || *items == false ||
        (items->is_object() && items->get_object().empty())) {
      return "Array<any>";
    }
    const std::string inner = indent + std::string(kStep);
    const std::string about = about_type(*items, inner);
    const Text item = type(*items, about.empty() ? indent : inner);
    if (!item) return std::nullopt;
    if (about.empty()) return "Array<" + *item + ">";
    return "Array<\n" + about + inner + *item + "\n" + indent + ">";
  }

  Text object(const json::value& schema, const std::string& indent) {
    if (const json::value* definitions = find_member(schema, "$defs")) {
      if (!definitions->is_object()) return std::nullopt;
      for (const auto& [name, definition] : definitions->get_object()) {
        definitions_[name] = definition;
      }
    }
    const std::string inner = indent + std::string(kStep);
    const json::value* additional = find_member(schema, "additionalProperties");
    Text others;
    if (additional != nullptr && !additional->is_null()) {
      if (additional->is_bool()) {
        others = additional->get_bool() ? "any" : "never";
      } else {
        others = additional->is_object() ? type(*additional, inner) : std::nullopt;
      }
      if (!others) return std::nullopt;
    }
    std::vector<std::string> members;
    for (const bool optional : {false, true}) {
      if (!add_members(schema, optional, inner, members)) return std::nullopt;
    }
    if (others) members.push_back(inner + "[k: string]: " + *others);
    if (members.empty()) return "{}";
    return "{\n" + joined(members) + "\n" + indent + "}";
  }

  // The members of the function's own parameters in the order of their names.
  Text listed_members(const json::value& schema) {
    const json::value* properties = find_member(schema, "properties");
    std::string out;
    if (properties == nullptr || properties->get_object().empty()) return out;
    for (const auto& [name, property] : properties->get_object()) {
      const Text one = member(name, property, !requires_property(schema, name), std::string(kStep));
      if (!one) return std::nullopt;
      out += (out.empty() ? "\n" : ",\n") + *one;
    }
    return out + "\n";
  }

  bool add_members(const json::value& schema, bool optional, const std::string& indent,
                   std::vector<std::string>& members) {
    const json::value* properties = find_member(schema, "properties");
    if (properties == nullptr) return true;
    if (!properties->is_object()) return false;
    for (const auto& [name, property] : properties->get_object()) {
      if (requires_property(schema, name) == optional) continue;
      Text one = member(name, property, optional, indent);
      if (!one) return false;
      members.push_back(std::move(*one));
    }
    return true;
  }

  Text member(std::string_view name, const json::value& schema, bool optional,
              const std::string& indent) {
    const Text of = type(schema, indent);
    if (!of) return std::nullopt;
    std::string out = about_type(schema, indent);
    const json::value* preset = find_member(schema, "default");
    if (preset != nullptr && !preset->is_null()) {
      out += indent +
             "// Default: " + (is_number(*preset) ? python_str(*preset) : to_python_json(*preset)) +
             "\n";
    }
    return out + indent + std::string(name) + (optional ? "?: " : ": ") + *of;
  }

  // Comments above a type: its description and, of a plain type or a list, its constraints.
  static std::string about_type(const json::value& schema, const std::string& indent) {
    std::string out;
    const std::string_view about = description_of(schema);
    if (!about.empty()) out += comment_lines(about, indent) + "\n";
    std::string constraints;
    for (const std::string_view key : constraints_of(schema)) {
      const json::value* value = find_member(schema, key);
      if (value == nullptr) continue;
      constraints +=
          fmt::format("{}{}: {}", constraints.empty() ? "" : ", ", key, python_str(*value));
    }
    if (!constraints.empty()) out += indent + "// " + constraints + "\n";
    return out;
  }

  static std::vector<std::string_view> constraints_of(const json::value& schema) {
    for (const std::string_view other : {"$ref", "anyOf", "enum"}) {
      if (find_member(schema, other) != nullptr) return {};
    }
    const json::value* type = find_member(schema, "type");
    if (type == nullptr) return {};
    if (*type == "string") return {"maxLength", "minLength", "pattern"};
    if (*type == "number" || *type == "integer") return {"maximum", "minimum"};
    if (*type == "array") return {"maxItems", "minItems"};
    return {};
  }

  static std::string joined(const std::vector<std::string>& members) {
    std::string out;
    for (const std::string& one : members) out += (out.empty() ? "" : ",\n") + one;
    return out;
  }

  json::object definitions_;  // in the order in which they were met
  bool refers_to_itself_ = false;
};

}  // namespace

std::string kimi_declarations(const std::vector<Tool>& tools) {
  std::string functions;
  json::array declarations;
  bool expressible = true;
  for (const Tool& tool : tools) {
    declarations.push_back(sorted(tool.declaration));
    const json::value& function = declarations.back().at("function");
    const Text one = TypeWriter().function(function);
    if (one) functions += *one + "\n";
    expressible = expressible && one;
  }
  if (!expressible) return to_python_json(declarations, PythonSpacing::kCompact);
  return "# Tools\n\n## functions\nnamespace functions {\n" + functions + "}\n";
}

}  // namespace fathom
