#include "grammar/dead_ends.h"

#include <grammar_impl.h>
#include <xgrammar/grammar.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace fathom {
namespace {

using Impl = xgrammar::Grammar::Impl;
using Type = Impl::GrammarExprType;

constexpr int32_t kLastCharacter = 0x10FFFF;

bool class_is_empty(const Impl::GrammarExpr& expr) {
  std::vector<std::pair<int32_t, int32_t>> ranges;
  for (int i = 1; i + 1 < expr.size(); i += 2) ranges.emplace_back(expr[i], expr[i + 1]);
  if (expr[0] == 0) {
    return std::none_of(ranges.begin(), ranges.end(),
                        [](const auto& range) { return range.first <= range.second; });
  }
  std::sort(ranges.begin(), ranges.end());
  int32_t covered = 0;  // all lower characters are excluded
  for (const auto& [low, high] : ranges) {
    if (low > covered) return false;
    covered = std::max(covered, high + 1);
  }
  return covered > kLastCharacter;
}

class DeadEnds {
 public:
  explicit DeadEnds(const Impl& grammar)
      : grammar_(grammar), matches_(static_cast<size_t>(grammar.NumRules()), false) {
    // Least fixpoint: a rule matches something if its body does, given the rules known so far.
    for (bool changed = true; changed;) {
      changed = false;
      for (int32_t rule = 0; rule < grammar_.NumRules(); ++rule) {
        if (matches_[rule] || !expr_matches(grammar_.GetRule(rule).body_expr_id)) continue;
        matches_[rule] = changed = true;
      }
    }
  }

  std::optional<std::string> find() const {
    std::vector<int32_t> stack = {grammar_.GetRootRuleId()};
    std::vector<bool> seen(matches_.size(), false);
    while (!stack.empty()) {
      const int32_t rule = stack.back();
      stack.pop_back();
      if (seen[static_cast<size_t>(rule)]) continue;
      seen[static_cast<size_t>(rule)] = true;
      if (!walk(grammar_.GetRule(rule).body_expr_id, stack)) return grammar_.GetRule(rule).name;
    }
    return std::nullopt;
  }

 private:
  bool expr_matches(int32_t id) const {
    const Impl::GrammarExpr expr = grammar_.GetGrammarExpr(id);
    const auto matches = [&](int32_t element) { return expr_matches(element); };
    switch (expr.type) {
      case Type::kCharacterClass:
        return !class_is_empty(expr);
      case Type::kRuleRef:
        return matches_[static_cast<size_t>(expr[0])];
      case Type::kRepeat:
        return expr[1] == 0 || matches_[static_cast<size_t>(expr[0])];
      case Type::kSequence:
        return std::all_of(expr.begin(), expr.end(), matches);
      case Type::kChoices:
        return std::any_of(expr.begin(), expr.end(), matches);
      default:
        return true;
    }
  }

  // Returns false if a part of the expression matches nothing. Collects the rules it refers to.
  bool walk(int32_t id, std::vector<int32_t>& rules) const {
    const Impl::GrammarExpr expr = grammar_.GetGrammarExpr(id);
    switch (expr.type) {
      case Type::kRuleRef:
      case Type::kRepeat:
        rules.push_back(expr[0]);
        return matches_[static_cast<size_t>(expr[0])];
      case Type::kSequence:
      case Type::kChoices:
        return std::all_of(expr.begin(), expr.end(),
                           [&](int32_t element) { return walk(element, rules); }) &&
               expr_matches(id);
      case Type::kTagDispatch:
        for (const auto& [tag, rule] : grammar_.GetTagDispatch(expr).tag_rule_pairs) {
          rules.push_back(rule);
          if (!matches_[static_cast<size_t>(rule)]) return false;
        }
        return true;
      default:
        return expr_matches(id);
    }
  }

  const Impl& grammar_;
  std::vector<bool> matches_;  // indexed by rule
};

}  // namespace

std::optional<std::string> dead_end(const xgrammar::Grammar& grammar) {
  return DeadEnds(*grammar.ImplPtr()).find();
}

}  // namespace fathom
