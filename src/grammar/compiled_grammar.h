// A grammar compiled for one vocabulary, and a sequence's state in it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/token_grammar.h"

namespace fathom {

// Immutable; any thread. Created by GrammarCompiler.
class CompiledGrammar : public TokenGrammar {
 public:
  struct Parts;  // XGrammar's objects

  explicit CompiledGrammar(std::shared_ptr<const Parts> parts);
  ~CompiledGrammar() override;

  std::unique_ptr<TokenGrammarState> start(std::optional<int32_t> begins_after) const override;

  int64_t memory_bytes() const;

 private:
  std::shared_ptr<const Parts> parts_;
};

// Keeps XGrammar's objects alive, not the CompiledGrammar. Used by one thread at a time.
class GrammarState : public TokenGrammarState {
 public:
  GrammarState(std::shared_ptr<const CompiledGrammar::Parts> grammar,
               std::optional<int32_t> begins_after);
  ~GrammarState() override;

  // Tokens without text of their own (special ones) are never allowed.
  std::span<const uint32_t> allowed() override;
  bool can_end() const override;
  bool accept(int32_t id) override;
  void rollback(int64_t count) override;

 private:
  struct Matcher;

  void fill();

  std::unique_ptr<Matcher> matcher_;
  std::optional<int32_t> begins_after_;
  int64_t num_before_ = 0;   // tokens accepted before the grammar began, including begins_after
  int64_t num_matched_ = 0;  // tokens accepted since
  bool has_begun_ = false;
  bool has_failed_ = false;  // XGrammar failed: nothing is allowed any more
  bool is_filled_ = false;
  std::vector<uint32_t> mask_;
};

}  // namespace fathom
