// Evaluation sets: files of questions with their answers, or a text for perplexity.
//
//   *.jsonl  one object a line: {messages, tools?, thinking, check, expected}; eval_scoring.h has
//            the checks
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
  std::string name;  // the file's without folder and ending
  std::vector<EvalItem> items;
  std::string prose;  // of a .txt; items is empty then

  bool is_prose() const { return items.empty(); }
};

// Errors name the file, the line and the field. Items beyond `limit` are not read (0: all).
Result<EvalSet> load_eval_set(const std::string& path, int64_t limit);

// The five sets that come with Fathom.
Result<std::vector<std::string>> bundled_eval_sets();

}  // namespace fathom
