// The engine's interface to grammars: which tokens may come next in a constrained completion. The
// room `grammar` implements it; the engine knows no schema and no regex.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace fathom {

// One sequence's state in a grammar; it survives preemption. Used by one thread at a time, not
// always the same one. No member throws.
class TokenGrammarState {
 public:
  virtual ~TokenGrammarState() = default;

  // A bitmask of the tokens that may come next: bit id % 32 of word id / 32; ids beyond the words
  // are not allowed. An empty span allows every token: the grammar has not begun. End-of-sequence
  // ids are not set. Valid until the next accept(); the first call after accept() computes it.
  virtual std::span<const uint32_t> allowed() = 0;

  // Whether the accepted tokens are a complete match.
  virtual bool can_end() const = 0;

  // Consumes the next token, one of allowed(). Returns false, and changes nothing, if it cannot
  // follow.
  virtual bool accept(int32_t id) = 0;

  // Reverts the last `count` accepted tokens, drafts that are not in the sequence yet. At most as
  // many as were accepted.
  virtual void rollback(int64_t count) = 0;
};

// A compiled grammar: immutable, shared by sequences and requests, used from any thread.
class TokenGrammar {
 public:
  virtual ~TokenGrammar() = default;

  // A state at the beginning of a completion. With `begins_after` (the id of </think>) the grammar
  // applies after the first such token.
  virtual std::unique_ptr<TokenGrammarState> start(std::optional<int32_t> begins_after) const = 0;
};

}  // namespace fathom
