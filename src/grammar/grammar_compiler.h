// Compiles a request's grammar to token masks for one vocabulary.
//
// Compilation runs on the compiler's own low-priority threads, with a deadline, after limits are
// checked (grammar/text_limits.h, grammar/schema_check.h). No caller waits longer than the
// deadline. Work that takes longer runs to its end, which the limits keep to seconds and some
// hundred megabytes, and its result is then cached.
//
// Owns its threads, the vocabulary's index and the cache. Any thread may call.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "engine/grammar_spec.h"
#include "grammar/compiled_grammar.h"

namespace fathom {

class Tokenizer;

struct GrammarCompilerOptions {
  // Deadline for callers that block no other request. The limits on texts alone end the work.
  static constexpr std::chrono::hours kPatient{1};

  int num_threads = 2;        // compiled concurrently
  int threads_a_grammar = 0;  // 0: half the number of cores, at most 8
  std::chrono::milliseconds deadline = std::chrono::seconds(2);  // from the call to its result
  int64_t cache_bytes = int64_t{256} << 20;
  int64_t max_waiting = 512;  // calls without a result; more are refused
};

class GrammarCompiler {
 public:
  using Compiled = Result<std::shared_ptr<const CompiledGrammar>>;
  using Done = std::function<void(Compiled)>;

  // `vocab_size` is the model's; the tokenizer's ids beyond it are never allowed.
  GrammarCompiler(const std::shared_ptr<const Tokenizer>& tokenizer, int64_t vocab_size,
                  GrammarCompilerOptions options = {});
  // Waits for grammars being compiled; other calls without a result get kUnavailable.
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // Calls `done` exactly once: before returning if the result is cached, otherwise on one of the
  // compiler's threads, where it must not block. Errors: kInvalidArgument if the grammar cannot be
  // compiled (the reason names the field), or was not compiled before the deadline;
  // kResourceExhausted if too many calls are waiting.
  void compile(GrammarSpec spec, Done done);

  // The same, but blocks until there is a result.
  Compiled compile(GrammarSpec spec);

  int64_t cache_bytes() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
