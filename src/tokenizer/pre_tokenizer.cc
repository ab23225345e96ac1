#include "tokenizer/pre_tokenizer.h"

#include "base/utf8.h"
#include "tokenizer/char_class.h"
#include "tokenizer/oniguruma_pattern.h"
#include "tokenizer/unicode_class.h"

namespace fathom {
namespace {

constexpr size_t kMaxStages = 32;
constexpr int kMaxDepth = 8;

// GPT-2's pattern, which ByteLevel uses with use_regex.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr std::string_view kTrailingSpace = R"(\s+$)";

// The pattern with literal line ends replaced by escapes: both forms are published.
std::string with_escaped_newlines(std::string_view pattern) {
  std::string text;
  for (const char c : pattern) {
    if (c == '\r') {
      text += "\\r";
    } else if (c == '\n') {
      text += "\\n";
    } else {
      text += c;
    }
  }
  return text;
}

// A pattern that matches the text literally.
std::string quoted(std::string_view literal) {
  std::string pattern;
  for (const char c : literal) {
    if (std::string_view(R"(\^$.|?*+()[]{}-)").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

bool is_space(std::string_view text, size_t i) {
  return (CharClasses::instance().of(decode_utf8(text, i).code_point) & kSpace) != 0;
}

}  // namespace

Result<PreTokenizer> PreTokenizer::from_json(const json::value& config, std::string_view source,
                                             bool allow_scanner) {
  Built built;
  FATHOM_RETURN_IF_ERROR(add(config, fmt::format("{}: pre_tokenizer", source), 0, built));
  if (!built.has_byte_level) {
    return invalid("{}: pre_tokenizer has no ByteLevel; only byte-level vocabularies are supported",
                   source);
  }
  PreTokenizer result;
  result.is_v3_ = allow_scanner && built.stages.size() == 3 && built.patterns.size() == 3 &&
                  built.patterns[0] == kV3Numbers && built.patterns[1] == kV3Han &&
                  built.patterns[2] == kV3General;
  result.stages_ = std::move(built.stages);
  return result;
}

// Runs of Han characters; words, which begin with or are capitals, with an English contraction
// behind; groups of three digits; punctuation; white space. Han characters are letters that no
// word has.
PreTokenizer PreTokenizer::kimi() {
  const auto class_of = [](std::initializer_list<std::string_view> categories) {
    std::string all;
    for (const std::string_view name : categories) all += *category_class(name);
    return all;
  };
  const std::string han = "\\p{sc:Han}";
  const auto letters = [&](std::string_view which) {
    return fmt::format("(?:(?!{})[{}])", han, which);
  };
  const std::string upper = letters(class_of({"Lu", "Lt", "Lm", "Lo", "M"}));
  const std::string lower = letters(class_of({"Ll", "Lm", "Lo", "M"}));
  const std::string before = fmt::format("[^\\r\\n{}]?", class_of({"L", "N"}));
  const std::string contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
  const std::string_view space = space_class();
  Built built;
  add_own(fmt::format("{}+|{}{}*{}+{}|{}{}+{}*{}|[{}]{{1,3}}| ?[^{}{}]+[\\r\\n]*|"
                      "[{}]*[\\r\\n]+|[{}]+(?![{}])|[{}]+",
                      han, before, upper, lower, contraction, before, upper, lower, contraction,
                      class_of({"N"}), space, class_of({"L", "N"}), space, space, not_space_class(),
                      space),
          built);
  PreTokenizer result;
  result.stages_ = std::move(built.stages);
  return result;
}

Result<> PreTokenizer::add(const json::value& config, const std::string& where, int depth,
                           Built& built) {
  if (!config.is_object()) return invalid("{} is {}, expected an object", where, brief(config));
  if (depth > kMaxDepth) return invalid("{} is nested deeper than {}", where, kMaxDepth);
  if (built.has_byte_level) {
    return invalid("{} follows ByteLevel, which must be the last one", where);
  }
  if (built.stages.size() >= kMaxStages) {
    return invalid("{} is one split too many, the limit is {}", where, kMaxStages);
  }
  const JsonFields fields(config.get_object(), where + ".");
  FATHOM_TRY(const std::string type, fields.string("type"));
  if (type == "Sequence") {
    const json::value* list = fields.find("pretokenizers");
    if (list == nullptr || !list->is_array()) {
      return invalid("{}.pretokenizers is {}, expected an array", where,
                     list == nullptr ? "missing" : brief(*list));
    }
    int index = 0;
    for (const json::value& item : list->get_array()) {
      FATHOM_RETURN_IF_ERROR(
          add(item, fmt::format("{}.pretokenizers[{}]", where, index++), depth + 1, built));
    }
    return {};
  }
  if (type == "Split") return add_split(fields, where, built);
  if (type == "Digits") {
    FATHOM_TRY(const auto individual, fields.optional_boolean("individual_digits"));
    add_own(fmt::format("[{}]{}", numeric_class(), individual.value_or(false) ? "" : "+"), built);
    return {};
  }
  if (type == "ByteLevel") {
    FATHOM_TRY(const auto prefix, fields.optional_boolean("add_prefix_space"));
    FATHOM_TRY(const auto use_regex, fields.optional_boolean("use_regex"));
    if (prefix.value_or(true)) {
      return invalid("{}.add_prefix_space is true, only false is supported", where);
    }
    if (use_regex.value_or(true)) FATHOM_RETURN_IF_ERROR(add_pattern(kGpt2Pattern, where, built));
    built.has_byte_level = true;
    return {};
  }
  return invalid("{}.type is \"{}\", supported are Sequence, Split, Digits and ByteLevel", where,
                 type);
}

Result<> PreTokenizer::add_split(const JsonFields& fields, const std::string& where, Built& built) {
  FATHOM_TRY(const std::string behavior, fields.string("behavior"));
  if (behavior != "Isolated") {
    return invalid("{}.behavior is \"{}\", only Isolated is supported", where, behavior);
  }
  FATHOM_TRY(const auto invert, fields.optional_boolean("invert"));
  if (invert.value_or(false)) return invalid("{}.invert is true, only false is supported", where);
  const json::value* pattern = fields.find("pattern");
  if (pattern == nullptr || !pattern->is_object()) {
    return invalid("{}.pattern is {}, expected an object with Regex or String", where,
                   pattern == nullptr ? "missing" : brief(*pattern));
  }
  const JsonFields forms(pattern->get_object(), where + ".pattern.");
  FATHOM_TRY(const auto literal, forms.optional_string("String"));
  if (literal) {
    if (literal->empty()) return invalid("{}.pattern.String is empty", where);
    return add_pattern(quoted(*literal), where + ".pattern.String", built);
  }
  FATHOM_TRY(const std::string regex, forms.string("Regex"));
  return add_pattern(regex, where + ".pattern.Regex", built);
}

Result<> PreTokenizer::add_pattern(std::string_view pattern, const std::string& where,
                                   Built& built) {
  built.patterns.push_back(with_escaped_newlines(pattern));
  if (pattern == kTrailingSpace) {
    built.stages.push_back({});
    return {};
  }
  const auto explained = [&](const Status& status) {
    const auto shown = std::string_view(built.patterns.back()).substr(0, 80);
    return with_context(
        fmt::format("{}: \"{}\" ", where, shown.substr(0, complete_utf8_prefix(shown))), status);
  };
  auto translated = oniguruma_to_pcre2(pattern);
  if (!translated) return explained(translated.error());
  auto regex = Regex::compile(*translated);
  if (!regex) return explained(regex.error());
  built.stages.push_back({std::move(*regex)});
  return {};
}

// Adds a pattern of this file, which always compiles.
void PreTokenizer::add_own(const std::string& pcre2_pattern, Built& built) {
  built.patterns.emplace_back();
  built.stages.push_back({std::move(*Regex::compile(pcre2_pattern))});
}

void PreTokenizer::split(std::string_view text, const PieceSink& sink) const {
  if (text.empty()) return;
  if (is_v3_) return scan_v3(text, sink);
  Regex::Scratch scratch;
  split_piece(text, 0, scratch, sink);
}

void PreTokenizer::split_piece(std::string_view piece, size_t stage, Regex::Scratch& scratch,
                               const PieceSink& sink) const {
  if (stage == stages_.size()) return sink(piece);
  const auto& regex = stages_[stage].regex;
  if (!regex) return split_trailing_space(piece, stage, scratch, sink);
  size_t done = 0;
  while (done < piece.size()) {
    const auto match = regex->find(piece, done, scratch);
    if (!match) break;
    if (match->begin > done) {
      split_piece(piece.substr(done, match->begin - done), stage + 1, scratch, sink);
    }
    split_piece(piece.substr(match->begin, match->end - match->begin), stage + 1, scratch, sink);
    done = match->end;
  }
  if (done < piece.size()) split_piece(piece.substr(done), stage + 1, scratch, sink);
}

// Splits at \s+$: for each run of white space, the whole run if it ends the piece, otherwise the
// part before its last line feed.
void PreTokenizer::split_trailing_space(std::string_view piece, size_t stage,
                                        Regex::Scratch& scratch, const PieceSink& sink) const {
  size_t done = 0, i = 0;
  const auto cut = [&](size_t end) {
    if (end > done) split_piece(piece.substr(done, end - done), stage + 1, scratch, sink);
    done = end;
  };
  while (i < piece.size()) {
    const size_t begin = i;
    size_t line_feed = begin;
    while (i < piece.size() && is_space(piece, i)) {
      if (piece[i] == '\n') line_feed = i;
      i += decode_utf8(piece, i).length;
    }
    const size_t end = i == piece.size() ? i : line_feed;
    if (end > begin) {
      cut(begin);
      cut(end);
    }
    if (i < piece.size() && i == begin) i += decode_utf8(piece, i).length;
  }
  cut(piece.size());
}

}  // namespace fathom
