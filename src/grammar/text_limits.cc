#include "grammar/text_limits.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <vector>

#include "base/utf8.h"

namespace fathom {
namespace {

constexpr int64_t kCopies = 128;  // XGrammar uses counters for longer repetitions
constexpr int64_t kMaxBound = 1'000'000;

struct Bounds {
  int64_t times = 0;  // how often the body may be copied
  size_t end = 0;     // after the closing brace
};

int64_t number_at(std::string_view text, size_t& i) {
  int64_t value = 0;
  for (; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
    value = std::min(value * 10 + (text[i] - '0'), kMaxBound + 1);
  }
  return value;
}

// Parses "{m}", "{m,}" or "{m,n}" at `begin`; nothing if it is not a repetition.
std::optional<Bounds> repetition_at(std::string_view text, size_t begin) {
  size_t i = begin + 1;
  const auto skip_space = [&] {
    while (i < text.size() && text[i] == ' ') ++i;
  };
  skip_space();
  int64_t largest = number_at(text, i);
  skip_space();
  if (i < text.size() && text[i] == ',') {
    ++i;
    skip_space();
    largest = std::max(largest, number_at(text, i));
    skip_space();
  }
  if (i >= text.size() || text[i] != '}') return std::nullopt;
  return Bounds{largest, i + 1};
}

// Counts elements through nested groups, for both regexes and EBNF. These differ in the meaning of
// characters outside of classes and quotes.
class ElementCount {
 public:
  explicit ElementCount(std::string_view field) : field_(field) {}

  Result<> open() {
    if (std::ssize(groups_) >= kMaxGrammarDepth) {
      return invalid("{} nests groups deeper than {}", field_, kMaxGrammarDepth);
    }
    groups_.push_back({});
    return {};
  }
  void close() {
    if (groups_.size() == 1) return;  // unmatched: XGrammar reports the position
    const int64_t size = groups_.back().total;
    groups_.pop_back();
    add(size);
  }
  void add(int64_t size) {
    groups_.back().total += size;
    groups_.back().last = size;
  }
  Result<> repeat(int64_t times) {
    if (times > kMaxBound) {
      return invalid("{} repeats more than {} times", field_, kMaxBound);
    }
    Group& group = groups_.back();
    const int64_t copies = std::max<int64_t>(std::min(times, kCopies), 1);
    group.total += group.last * (copies - 1);
    group.last *= copies;
    return check();
  }
  Result<> check() const {
    if (total() <= kMaxGrammarElements) return {};
    return invalid("{} has more than {} characters and classes, with repetitions written out",
                   field_, kMaxGrammarElements);
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const Group& group : groups_) sum += group.total;
    return sum;
  }

 private:
  struct Group {
    int64_t total = 0, last = 0;
  };
  std::string_view field_;
  std::vector<Group> groups_ = {{}};
};

// The index after the character class that begins at `i`.
size_t skip_class(std::string_view text, size_t i) {
  for (++i; i < text.size() && text[i] != ']'; ++i) {
    if (text[i] == '\\') ++i;
  }
  return i + 1;
}

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

}  // namespace

Result<> check_text(std::string_view text, std::string_view field) {
  if (text.size() > kMaxGrammarBytes) {
    return invalid("{} has {} bytes, at most {} are allowed", field, text.size(), kMaxGrammarBytes);
  }
  if (text.find('\0') != std::string_view::npos) return invalid("{} contains a NUL", field);
  if (!is_valid_utf8(text)) return invalid("{} is not UTF-8", field);
  return {};
}

Result<int64_t> check_regex(std::string_view regex, std::string_view field) {
  FATHOM_RETURN_IF_ERROR(check_text(regex, field));
  ElementCount count(field);
  for (size_t i = 0; i < regex.size();) {
    const char c = regex[i];
    if (c == '(') {
      FATHOM_RETURN_IF_ERROR(count.open());
      ++i;
    } else if (c == ')') {
      count.close();
      ++i;
    } else if (c == '[') {
      i = skip_class(regex, i);
      count.add(1);
    } else if (c == '{') {
      const auto bounds = repetition_at(regex, i);
      if (!bounds) return invalid("{} has a {{ that begins no repetition", field);
      FATHOM_RETURN_IF_ERROR(count.repeat(bounds->times));
      i = bounds->end;
    } else {
      i += c == '\\' ? 2 : 1;
      if (!is_continuation(c)) count.add(1);
    }
    FATHOM_RETURN_IF_ERROR(count.check());
  }
  return count.total();
}

Result<> check_ebnf(std::string_view ebnf, std::string_view field) {
  FATHOM_RETURN_IF_ERROR(check_text(ebnf, field));
  ElementCount count(field);
  int64_t rules = 0;
  for (size_t i = 0; i < ebnf.size();) {
    const char c = ebnf[i];
    if (c == '#') {
      i = std::min(ebnf.find('\n', i), ebnf.size());
    } else if (c == '"') {
      size_t end = i + 1;
      for (; end < ebnf.size() && ebnf[end] != '"' && ebnf[end] != '\n'; ++end) {
        if (ebnf[end] == '\\') ++end;
      }
      // A literal's characters form a chain, which is cheap.
      count.add(1 + static_cast<int64_t>(end - i) / 16);
      i = end + 1;
    } else if (c == '[') {
      i = skip_class(ebnf, i);
      count.add(1);
    } else if (c == '(') {
      FATHOM_RETURN_IF_ERROR(count.open());
      ++i;
    } else if (c == ')') {
      count.close();
      ++i;
    } else if (c == '{') {
      const auto bounds = repetition_at(ebnf, i);
      if (!bounds) return invalid("{} has a {{ that begins no repetition", field);
      FATHOM_RETURN_IF_ERROR(count.repeat(bounds->times));
      i = bounds->end;
    } else if (ebnf.substr(i).starts_with("::=")) {
      if (++rules > kMaxGrammarRules) {
        return invalid("{} has more than {} rules", field, kMaxGrammarRules);
      }
      i += 3;
    } else if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
      ++i;
    } else {
      // A rule's name or an operator.
      ++i;
      while (i < ebnf.size() &&
             (std::isalnum(static_cast<unsigned char>(ebnf[i])) != 0 || ebnf[i] == '_')) {
        ++i;
      }
      count.add(1);
    }
    FATHOM_RETURN_IF_ERROR(count.check());
  }
  return {};
}

}  // namespace fathom
