// Requests on the bundled model with and without drafts: what they gave, to be compared.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "grammar/grammar_compiler.h"
#include "tokenizer/tokenizer.h"

namespace fathom {

struct SpeculationChoice {
  std::vector<int32_t> ids;
  std::string text;
  std::vector<float> logprobs;  // of the tokens, their alternatives and the prompt's
  std::optional<FinishReason> finish;
  bool operator==(const SpeculationChoice&) const = default;

  void add(const TokenLogprob& token);
};

// How the model and the engine run. Attention is absorbed throughout, in which a row's bits depend
// on its own keys only, so that what a chunk or a preemption computes again has the same bits.
struct SpeculationSetting {
  const char* name;
  Placement placement = {};
  DType compute = DType::kF32;
  CacheFormat cache = CacheFormat::kF32;
  bool is_crowded = false;  // small chunks, shared prefixes, preemption, a small cache
  bool is_serial = false;   // one request after the other
  bool shares_prefixes = true;
};
// The bundled model as it is served.
inline constexpr SpeculationSetting kServed = {
    .name = "bf16", .compute = DType::kBF16, .cache = CacheFormat::kBF16};

struct SpeculationOutcome {
  std::vector<SpeculationChoice> choices;  // all choices of the first request, then of the next
  SpeculationStats stats;
  int64_t steps = 0, prefix_hits = 0;
};

const std::shared_ptr<const Tokenizer>& bundled_tokenizer();
// Compiles a grammar for the bundled model's vocabulary.
std::shared_ptr<const TokenGrammar> compile_grammar(const GrammarSpec& spec);
// Loads the bundled model and runs the requests, with exactly as many drafts a step as there is
// room for.
SpeculationOutcome run_with_drafts(const SpeculationSetting& setting, int64_t drafts,
                                   std::vector<Request> requests);

// A line of an evaluation set, as `fathom eval` puts it to the model.
struct EvalPrompt {
  std::string question;  // the last message's text
  std::vector<int32_t> ids;
};
// The first `count` lines of tests/data/eval/`set`.jsonl.
std::vector<EvalPrompt> eval_prompts(const std::string& set, int64_t count);
// `count` pieces of `length` tokens of the evaluation sets' prose, each behind the token that
// begins a text.
std::vector<std::vector<int32_t>> prose_pieces(int64_t count, int64_t length);

}  // namespace fathom
