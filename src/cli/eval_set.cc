#include "cli/eval_set.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli/model_flags.h"

namespace fathom {
namespace {

constexpr int64_t kMaxSetBytes = 1 << 30;
constexpr const char* kBundledFolder = "tests/data/eval";

Result<EvalItem> parse_item(std::string_view line, const std::string& where) {
  FATHOM_TRY(const json::value value, parse_json(line, where));
  if (!value.is_object()) return invalid("{}: is {}, expected an object", where, brief(value));
  const JsonFields fields(value.get_object(), where + ": ");
  EvalItem item;
  FATHOM_TRY(item.conversation, parse_conversation(value, where));
  FATHOM_TRY(const std::string check, fields.string("check"));
  const auto parsed = parse_eval_check(check);
  if (!parsed) return with_context(where + ": ", parsed.error());
  item.check = *parsed;
  const json::value* expected = value.get_object().if_contains("expected");
  if (expected == nullptr) return invalid("{}: expected is missing", where);
  if (const auto valid = validate_expected(item.check, *expected); !valid) {
    return with_context(where + ": ", valid.error());
  }
  item.expected = *expected;
  return item;
}

}  // namespace

Result<EvalSet> load_eval_set(const std::string& path, int64_t limit) {
  EvalSet set;
  set.path = path;
  set.name = std::filesystem::path(path).stem().string();
  const std::string extension = std::filesystem::path(path).extension().string();
  if (extension != ".jsonl" && extension != ".txt") {
    return invalid("{}: an evaluation set is a .jsonl or a .txt file", path);
  }
  FATHOM_TRY(std::string text, read_text_file(path, kMaxSetBytes));
  if (extension == ".txt") {
    if (text.empty()) return invalid("{}: is empty", path);
    set.prose = std::move(text);
    return set;
  }
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    FATHOM_TRY(EvalItem item, parse_item(line, fmt::format("{} line {}", path, number)));
    item.line = number;
    set.items.push_back(std::move(item));
    if (limit > 0 && static_cast<int64_t>(set.items.size()) == limit) break;
  }
  if (set.items.empty()) return invalid("{}: has no items", path);
  return set;
}

Result<std::vector<std::string>> bundled_eval_sets() {
  const auto folder = find_bundled(kBundledFolder);
  if (!folder)
    return not_found("the bundled sets ({}) are not there; name one: --set FILE", kBundledFolder);
  std::vector<std::string> paths;
  for (const char* name :
       {"arithmetic.jsonl", "retrieval.jsonl", "json.jsonl", "tools.jsonl", "prose.txt"}) {
    paths.push_back(*folder + "/" + name);
  }
  return paths;
}

}  // namespace fathom
