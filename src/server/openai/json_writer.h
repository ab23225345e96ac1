// Appends JSON text to a string without building a tree. A comma is added unless the text ends in
// an opening bracket, a colon, a line feed or the space of "data: ".
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "chat/python_json.h"

namespace fathom {

class JsonWriter {
 public:
  explicit JsonWriter(std::string& out) : out_(out) {}

  JsonWriter& open(char bracket) {
    separate();
    out_ += bracket;
    return *this;
  }
  JsonWriter& close(char bracket) {
    out_ += bracket;
    return *this;
  }
  // Appends a key, unescaped: `name` is a literal of ours.
  JsonWriter& key(std::string_view name) {
    separate();
    out_ += '"';
    out_ += name;
    out_ += "\":";
    return *this;
  }

  JsonWriter& value(std::string_view text) {
    separate();
    out_ += '"';
    append_json_escaped(out_, text);
    out_ += '"';
    return *this;
  }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag) { return raw(flag ? "true" : "false"); }
  JsonWriter& value(std::nullptr_t) { return raw("null"); }
  template <std::integral T>
  JsonWriter& value(T number) {
    const fmt::format_int text(number);
    return raw(std::string_view(text.data(), text.size()));
  }
  // Appends the fewest digits that read back exactly. JSON has no infinities and no NaN; -9999
  // stands for them, OpenAI's number for a token of zero probability.
  template <std::floating_point T>
  JsonWriter& value(T number) {
    return raw(fmt::format("{}", std::isfinite(number) ? number : static_cast<T>(-9999)));
  }
  template <typename T>
  JsonWriter& value(const std::optional<T>& maybe) {
    return maybe ? value(*maybe) : value(nullptr);
  }
  // Appends text that is JSON already.
  JsonWriter& raw(std::string_view json_text) {
    separate();
    out_ += json_text;
    return *this;
  }

  template <typename T>
  JsonWriter& field(std::string_view name, const T& content) {
    return key(name).value(content);
  }
  JsonWriter& raw_field(std::string_view name, std::string_view json_text) {
    return key(name).raw(json_text);
  }
  template <typename Range>
  JsonWriter& array(std::string_view name, const Range& items) {
    key(name).open('[');
    for (const auto& item : items) value(item);
    return close(']');
  }

 private:
  void separate() {
    if (out_.empty()) return;
    const char last = out_.back();
    if (last != '{' && last != '[' && last != ':' && last != ' ' && last != '\n') out_ += ',';
  }

  std::string& out_;
};

}  // namespace fathom
