// From what a request wants its answer to match to token masks for one vocabulary.
//
// Compiling happens on threads of its own, of low priority, with a deadline, behind limits that are
// checked before anything is compiled (grammar/text_limits.h, grammar/schema_check.h). Nobody waits
// longer than the deadline; work that takes longer goes on until it ends by itself, which the
// limits keep to seconds and some hundred megabytes, and its result is then in the cache.
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
  // A deadline for callers that nobody else waits behind: the limits on texts alone end the work.
  static constexpr std::chrono::hours kPatient{1};

  int num_threads = 2;        // grammars compiled at the same time
  int threads_a_grammar = 0;  // 0: one for two cores, at most 8
  std::chrono::milliseconds deadline = std::chrono::seconds(2);  // from the call to its result
  int64_t cache_bytes = int64_t{256} << 20;
  int64_t max_waiting = 512;  // calls without a result; beyond: refused
};

class GrammarCompiler {
 public:
  using Compiled = Result<std::shared_ptr<const CompiledGrammar>>;
  using Done = std::function<void(Compiled)>;

  // `vocab_size` is the model's: what the tokenizer has beyond it is not allowed.
  GrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, int64_t vocab_size,
                  GrammarCompilerOptions options = {});
  // Calls without a result get kUnavailable; waits for what is being compiled.
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;
  GrammarCompiler& operator=(const GrammarCompiler&) = delete;

  // Calls `done` exactly once: before returning if the result is known, else on one of the
  // compiler's threads, where it must not block. kInvalidArgument: the grammar cannot be compiled,
  // for a reason that names the field, or was not compiled before the deadline. kResourceExhausted:
  // too many calls wait.
  void compile(GrammarSpec spec, Done done);

  // The same for a caller that can wait.
  Compiled compile(GrammarSpec spec);

  int64_t cache_bytes() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace fathom
