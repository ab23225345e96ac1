// Which tokens may come next in an answer that has to match something, as the engine sees it. The
// room `grammar` says what stands behind it; the engine knows no schema and no regex.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace fathom {

// One sequence's place in a grammar. Kept over preemption. One thread at a time, not always the
// same one. Nothing here throws.
class TokenGrammarState {
 public:
  virtual ~TokenGrammarState() = default;

  // The tokens that may come next: bit id % 32 of word id / 32; ids beyond the words may not. Empty
  // span: every token may, the grammar has not begun. The end of the sequence is not among them.
  // Valid until the next accept(); computed by the first call after one.
  virtual std::span<const uint32_t> allowed() = 0;

  // Whether what was accepted so far is a whole answer.
  virtual bool can_end() const = 0;

  // Takes the next token, one of allowed(). False: it cannot follow, and nothing has changed.
  virtual bool accept(int32_t id) = 0;
};

// What a state starts from: immutable, shared by sequences and requests, any thread.
class TokenGrammar {
 public:
  virtual ~TokenGrammar() = default;

  // At the beginning of an answer; with `begins_after` (the id of </think>), behind the first such
  // token.
  virtual std::unique_ptr<TokenGrammarState> start(std::optional<int32_t> begins_after) const = 0;
};

}  // namespace fathom
