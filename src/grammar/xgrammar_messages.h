// XGrammar's log messages on this thread. It warns about parts of a grammar that it would ignore;
// since the output would then not match the request, such a warning refuses the grammar.
#pragma once

#include <string>
#include <vector>

namespace fathom {

// Collects this thread's warnings while it lives; must not be nested. Other warnings are dropped.
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
