// What XGrammar says while it works on this thread. Its warnings are about parts of a grammar that
// it would ignore: an answer would then not match what was asked for, so they refuse the grammar.
#pragma once

#include <string>
#include <vector>

namespace fathom {

// Collects the warnings of this thread from its construction to its destruction; not nested.
// Elsewhere and at other times they are dropped.
class XGrammarWarnings {
 public:
  XGrammarWarnings();
  ~XGrammarWarnings();
  XGrammarWarnings(const XGrammarWarnings&) = delete;
  XGrammarWarnings& operator=(const XGrammarWarnings&) = delete;

  const std::vector<std::string>& texts() const { return texts_; }
  void add(std::string text) { texts_.push_back(std::move(text)); }

 private:
  std::vector<std::string> texts_;
};

}  // namespace fathom
