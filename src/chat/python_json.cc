#include "chat/python_json.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace fathom {
namespace {

void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  append_json_escaped(out, text);
  out += '"';
}

class Writer {
 public:
  explicit Writer(PythonSpacing spacing)
      : comma_(spacing == PythonSpacing::kCompact ? "," : ", "),
        colon_(spacing == PythonSpacing::kCompact ? ":" : ": ") {}

  void append(std::string& out, const json::value& value) const {
    switch (value.kind()) {
      case json::kind::null:
        out += "null";
        break;
      case json::kind::bool_:
        out += value.get_bool() ? "true" : "false";
        break;
      case json::kind::int64:
        out += std::to_string(value.get_int64());
        break;
      case json::kind::uint64:
        out += std::to_string(value.get_uint64());
        break;
      case json::kind::double_:
        out += python_float(value.get_double());
        break;
      case json::kind::string:
        append_quoted(out, value.get_string());
        break;
      case json::kind::array:
        append_array(out, value.get_array());
        break;
      case json::kind::object:
        append_object(out, value.get_object());
        break;
    }
  }

 private:
  void append_array(std::string& out, const json::array& array) const {
    out += '[';
    std::string_view separator;
    for (const json::value& element : array) {
      out += separator;
      append(out, element);
      separator = comma_;
    }
    out += ']';
  }

  void append_object(std::string& out, const json::object& object) const {
    out += '{';
    std::string_view separator;
    for (const auto& [key, element] : object) {
      out += separator;
      append_quoted(out, key);
      out += colon_;
      append(out, element);
      separator = comma_;
    }
    out += '}';
  }

  std::string_view comma_, colon_;
};

}  // namespace

std::string to_python_json(const json::value& value, PythonSpacing spacing) {
  std::string out;
  Writer(spacing).append(out, value);
  return out;
}

std::string python_str(const json::value& value) {
  if (value.is_null()) return "None";
  if (value.is_bool()) return value.get_bool() ? "True" : "False";
  if (value.is_string()) return std::string(value.get_string());
  return to_python_json(value);
}

void append_json_escaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\b':
        out += "\\b";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<int>(c));
        } else {
          out += c;
        }
    }
  }
}

std::string python_float(double number) {
  if (std::isnan(number)) return "NaN";
  if (std::isinf(number)) return number > 0 ? "Infinity" : "-Infinity";
  char buffer[32] = {};  // the zeros terminate the exponent for atoi
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific).ptr;
  const std::string_view scientific(buffer, static_cast<size_t>(end - buffer));
  const size_t mark = scientific.find('e');
  const int exponent = std::atoi(buffer + mark + 1);
  if (exponent < -4 || exponent >= 16) return std::string(scientific);
  char fixed[64];
  const auto fixed_end =
      std::to_chars(fixed, fixed + sizeof fixed, number, std::chars_format::fixed).ptr;
  std::string text(fixed, fixed_end);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

}  // namespace fathom
