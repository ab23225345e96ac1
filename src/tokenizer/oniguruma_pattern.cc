#include "tokenizer/oniguruma_pattern.h"

#include <algorithm>
#include <charconv>

#include "base/utf8.h"
#include "tokenizer/unicode_class.h"

namespace fathom {
namespace {

bool is_ascii_alnum(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Translates in one pass over the pattern: out_ grows, position_ advances.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  Result<std::string> run() {
    while (!at_end()) {
      const char c = pattern_[position_];
      if (c == '\\') {
        FATHOM_RETURN_IF_ERROR(escape(false));
      } else if (c == '[') {
        FATHOM_RETURN_IF_ERROR(bracket());
      } else if (c == '(') {
        FATHOM_RETURN_IF_ERROR(group());
      } else if (c == '{') {
        FATHOM_RETURN_IF_ERROR(interval());
      } else {
        out_.push_back(c);
        ++position_;
      }
    }
    return std::move(out_);
  }

 private:
  bool at_end() const { return position_ >= pattern_.size(); }
  std::string_view rest() const { return pattern_.substr(position_); }

  // Writes a class in place of an escape of `length` characters at position_, and advances past it.
  Result<> put_class(std::string_view inside, bool negated, bool in_bracket, size_t length) {
    position_ += length;
    if (in_bracket) {
      // A hyphen next to it would form a range with the class's first or last character.
      const bool after_hyphen = out_.ends_with('-') && !out_.ends_with("\\-") &&
                                !out_.ends_with("[-") && !out_.ends_with("[^-");
      const bool before_hyphen = rest().starts_with('-') && !rest().starts_with("-]");
      if (after_hyphen || before_hyphen) {
        return invalid("has a hyphen beside a class inside brackets, which is not supported");
      }
      out_ += inside;
    } else {
      out_ += fmt::format("[{}{}]", negated ? "^" : "", inside);
    }
    return {};
  }

  // Translates \p{Name} and \P{Name}; position_ is at the p.
  Result<> property(bool in_bracket) {
    const bool negated = pattern_[position_] == 'P';
    const size_t close = rest().find('}');
    if (!rest().substr(1).starts_with("{") || close == std::string_view::npos) {
      return invalid("uses \\{} without a name in braces", pattern_[position_]);
    }
    const std::string_view name = rest().substr(2, close - 2);
    const auto inside = category_class(name);
    if (!inside) return invalid("uses the property {}, which is not supported", name.substr(0, 40));
    if (negated && in_bracket) {
      return invalid("uses \\P{{{}}} inside brackets, which is not supported", name);
    }
    return put_class(*inside, negated, in_bracket, close + 1);
  }

  // Translates \xHH (ASCII only: larger values are bytes of an encoded character), \x{H…} and
  // \uHHHH.
  Result<> code_point() {
    const char kind = pattern_[position_];
    std::string_view digits = rest().substr(1, kind == 'u' ? 4 : 2);
    size_t length = 1 + digits.size();
    const bool braces = kind == 'x' && digits.starts_with("{");
    if (braces) {
      const size_t close = std::min(rest().find('}'), rest().size());
      digits = rest().substr(2, close - 2);
      length = close + 1;
    }
    uint32_t value = 0;
    const auto [end, failure] =
        std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    const uint32_t limit = kind == 'x' && !braces ? 0x7F : 0x10FFFF;
    const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
    if (digits.empty() || failure != std::errc() || end != digits.data() + digits.size() ||
        value > limit || surrogate || length > rest().size()) {
      return invalid("uses \\{}{}, which is not a character", kind, digits.substr(0, 12));
    }
    out_ += fmt::format("\\x{{{:X}}}", value);
    position_ += length;
    return {};
  }

  // Translates an escape; position_ is at the backslash.
  Result<> escape(bool in_bracket) {
    ++position_;
    if (at_end()) return invalid("ends with a backslash");
    const char c = pattern_[position_];
    switch (c) {
      case 'p':
      case 'P':
        return property(in_bracket);
      case 'x':
      case 'u':
        return code_point();
      case 's':
        return put_class(space_class(), false, in_bracket, 1);
      case 'S':
        return put_class(not_space_class(), false, in_bracket, 1);
      case 'd':
        return put_class(*category_class("Nd"), false, in_bracket, 1);
      case 'v':
        out_ += "\\x{B}";
        break;
      default: {
        const bool anchor = !in_bracket && (c == 'A' || c == 'z' || c == 'Z');
        const bool control = std::string_view("rntfae").find(c) != std::string_view::npos;
        if (is_ascii_alnum(c) && !anchor && !control) {
          return invalid("uses \\{}, which is not supported", c);
        }
        out_ += '\\';
        out_ += c;
      }
    }
    ++position_;
    return {};
  }

  Result<> bracket() {
    out_ += '[';
    ++position_;
    if (rest().starts_with("^")) {
      out_ += '^';
      ++position_;
    }
    if (rest().starts_with("]")) return invalid("has an empty bracket");
    while (!at_end() && pattern_[position_] != ']') {
      const char c = pattern_[position_];
      if (c == '\\') {
        FATHOM_RETURN_IF_ERROR(escape(true));
        continue;
      }
      // Both are set operations in Oniguruma and plain characters in PCRE2.
      if (c == '[') return invalid("has brackets inside brackets, which are not supported");
      if (rest().starts_with("&&")) return invalid("uses && in brackets, which is not supported");
      out_ += c;
      ++position_;
    }
    if (at_end()) return invalid("has a bracket that is not closed");
    out_ += ']';
    ++position_;
    return {};
  }

  Result<> group() {
    constexpr std::string_view kSame[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    for (const std::string_view opening : kSame) {
      if (!rest().starts_with(opening)) continue;
      out_ += opening;
      position_ += opening.size();
      return {};
    }
    if (rest().starts_with("(?") || rest().starts_with("(*")) {
      return invalid("uses the group {}, which is not supported",
                     replace_ill_formed(rest().substr(0, 4)));
    }
    out_ += '(';
    ++position_;
    return {};
  }

  // Translates {n}, {n,} and {n,m}. Refuses those followed by ? or +, {,m}, and a brace that begins
  // no interval: the two libraries treat them differently.
  Result<> interval() {
    const size_t close = rest().find('}');
    const std::string_view body =
        close == std::string_view::npos ? "" : rest().substr(1, close - 1);
    const size_t comma = std::min(body.find(','), body.size());
    const auto digits = [](std::string_view text) {
      return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    const bool well_formed = comma > 0 && body.size() <= 9 && digits(body.substr(0, comma)) &&
                             (comma == body.size() || digits(body.substr(comma + 1)));
    if (!well_formed) return invalid("has a brace that begins no {{n,m}}");
    const std::string_view after = rest().substr(close + 1, 1);
    if (after == "+" || after == "?") {
      return invalid("uses {{{}}}{}, which is not supported", body, after);
    }
    out_ += rest().substr(0, close + 1);
    position_ += close + 1;
    return {};
  }

  std::string_view pattern_;
  size_t position_ = 0;
  std::string out_;
};

}  // namespace

Result<std::string> oniguruma_to_pcre2(std::string_view pattern) {
  return Translator(pattern).run();
}

}  // namespace fathom
