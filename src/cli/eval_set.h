// Evaluation sets: files of questions with expected results, or a text for perplexity.
//
//   *.jsonl  one object per line: {messages, tools?, thinking, check, expected}; for the checks see
//            eval_scoring.h
//   *.txt    prose, scored in rows of BOS + 1,023 tokens
#pragma once

#include <string>
#include <vector>

#include "chat/message.h"
#include "cli/eval_scoring.h"

namespace fathom {

struct EvalItem {
  int64_t line = 0;  // in the file, from 1
  Conversation conversation;
  EvalCheck check = EvalCheck::kNumber;
  json::value expected;
};

struct EvalSet {
  std::string path;
  std::string name;  // the file's name without folder and extension
  std::vector<EvalItem> items;
  std::string prose;  // the text of a .txt; then items is empty

  bool is_prose() const { return items.empty(); }
};

// Reads a set, at most `limit` items (0: all). Errors name the file, the line and the field.
Result<EvalSet> load_eval_set(const std::string& path, int64_t limit);

// The paths of the five sets that come with Fathom.
Result<std::vector<std::string>> bundled_eval_sets();

}  // namespace fathom
