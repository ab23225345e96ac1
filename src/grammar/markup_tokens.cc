#include "grammar/markup_tokens.h"

#include <algorithm>

#include "tokenizer/tokenizer.h"

namespace fathom {
namespace {

// First bytes 0xF5 to 0xF7 would encode code points from U+140000 on: acceptable to XGrammar,
// outside all classes, and never in UTF-8 text.
constexpr uint32_t kFirstPlaceholder = 0x140000;

bool is_beyond_unicode(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0xF5 && byte <= 0xF7;
}

std::string placeholder_of(uint32_t index) {
  const uint32_t point = kFirstPlaceholder + index;
  return {static_cast<char>(0xF0 | point >> 18), static_cast<char>(0x80 | (point >> 12 & 0x3F)),
          static_cast<char>(0x80 | (point >> 6 & 0x3F)), static_cast<char>(0x80 | (point & 0x3F))};
}

// Other added tokens are plain text: letters, white space.
bool is_marker(std::string_view text) {
  return text.size() > 2 && ((text.front() == '<' && text.back() == '>') ||
                             (text.front() == '[' && text.back() == ']'));
}

// The position after the character class that begins at `i`.
size_t class_end(std::string_view text, size_t i) {
  for (++i; i < text.size() && text[i] != ']'; ++i) {
    if (text[i] == '\\') ++i;
  }
  return std::min(i + 1, text.size());
}

}  // namespace

MarkupTokens::MarkupTokens(const Tokenizer& tokenizer, int64_t vocab_size) {
  const auto count = static_cast<int32_t>(std::min<int64_t>(tokenizer.vocab_size(), vocab_size));
  vocabulary_.reserve(static_cast<size_t>(count));
  for (int32_t id = 0; id < count; ++id) {
    const std::string_view text = tokenizer.token_bytes(id);
    if (tokenizer.is_special(id) || std::any_of(text.begin(), text.end(), is_beyond_unicode)) {
      vocabulary_.emplace_back();
    } else if (tokenizer.is_added(id) && is_marker(text)) {
      markers_.push_back(
          {std::string(text), placeholder_of(static_cast<uint32_t>(markers_.size()))});
      vocabulary_.push_back(markers_.back().placeholder);
    } else {
      vocabulary_.emplace_back(text);
    }
  }
  std::stable_sort(markers_.begin(), markers_.end(),
                   [](const Marker& a, const Marker& b) { return a.text.size() > b.text.size(); });
}

const MarkupTokens::Marker* MarkupTokens::marker_at(std::string_view text) const {
  if (text.front() != '<' && text.front() != '[') return nullptr;
  const auto found = std::find_if(markers_.begin(), markers_.end(), [&](const Marker& marker) {
    return text.starts_with(marker.text);
  });
  return found == markers_.end() ? nullptr : &*found;
}

std::string MarkupTokens::in_literal(std::string_view text) const {
  std::string out;
  while (!text.empty()) {
    const Marker* const marker = marker_at(text);
    out += marker == nullptr ? text.substr(0, 1) : std::string_view(marker->placeholder);
    text.remove_prefix(marker == nullptr ? 1 : marker->text.size());
  }
  return out;
}

std::string MarkupTokens::in_ebnf(std::string_view ebnf) const {
  std::string out;
  for (size_t i = 0; i < ebnf.size();) {
    size_t end = i + 1;
    if (ebnf[i] == '#') {
      end = std::min(ebnf.find('\n', i), ebnf.size());
    } else if (ebnf[i] == '[') {
      end = class_end(ebnf, i);
    } else if (ebnf[i] == '"') {
      for (; end < ebnf.size() && ebnf[end] != '"' && ebnf[end] != '\n'; ++end) {
        if (ebnf[end] == '\\') ++end;
      }
      end = std::min(end + 1, ebnf.size());
      out += in_literal(ebnf.substr(i, end - i));
      i = end;
      continue;
    }
    out += ebnf.substr(i, end - i);
    i = end;
  }
  return out;
}

std::string MarkupTokens::in_regex(std::string_view regex) const {
  std::string out;
  for (size_t i = 0; i < regex.size();) {
    const Marker* const marker = marker_at(regex.substr(i));
    // A "|" in a marker would be an alternative here unless it is escaped.
    if (marker != nullptr && marker->text.front() == '<' &&
        marker->text.find('|') == std::string::npos) {
      out += marker->placeholder;
      i += marker->text.size();
      continue;
    }
    const size_t end = regex[i] == '['    ? class_end(regex, i)
                       : regex[i] == '\\' ? std::min(i + 2, regex.size())
                                          : i + 1;
    out += regex.substr(i, end - i);
    i = end;
  }
  return out;
}

json::value MarkupTokens::in_structural_tag(const json::value& tag) const {
  if (tag.is_string()) return json::value(json::string(in_literal(tag.get_string())));
  if (tag.is_array()) {
    json::array out;
    for (const json::value& one : tag.get_array()) out.push_back(in_structural_tag(one));
    return out;
  }
  if (!tag.is_object()) return tag;
  json::object out;
  for (const auto& [key, value] : tag.get_object()) {
    if (key == "json_schema" || key == "type") {
      out[key] = value;
    } else if (key == "pattern" && value.is_string()) {
      out[key] = in_regex(value.get_string());
    } else if (key == "grammar" && value.is_string()) {
      out[key] = in_ebnf(value.get_string());
    } else {
      out[key] = in_structural_tag(value);
    }
  }
  return out;
}

}  // namespace fathom
