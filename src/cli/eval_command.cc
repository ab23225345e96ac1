// `fathom eval MODEL`: measures a model's quality on question sets and prose.
#include <CLI/CLI.hpp>
#include <cmath>

#include "chat/python_json.h"
#include "cli/command.h"
#include "cli/eval_run.h"
#include "cli/node_engine.h"
#include "cli/speculation_report.h"

namespace fathom {
namespace {

// Enough sequences that decoding is not bound by reading weights, few enough that their caches fit.
constexpr int64_t kConcurrentItems = 32;

struct EvalFlags {
  ModelFlags model;
  std::vector<std::string> sets;
  int64_t limit = 0;
  bool json = false, wrong = false;
};

std::string fraction(const EvalTally& tally) {
  return tally.of == 0 ? "-" : fmt::format("{}/{}", tally.right, tally.of);
}

void print_row(const EvalResult& result) {
  if (result.perplexity) {
    const EvalPerplexity& prose = *result.perplexity;
    fmt::print(
        "{:<12} nll {:.4f} per token, perplexity {:.3f}, {:.4f} bits per character, {} tokens"
        " in {:.1f} s\n",
        result.name, prose.nll, std::exp(prose.nll), prose.bits_per_character, prose.tokens,
        result.seconds);
  } else {
    fmt::print("{:<12} {:>9} {:>8.1f} % {:>9} {:>9} {:>9} {:>9.1f}\n", result.name,
               fraction(result.all), result.all.share() * 100, fraction(result.direct),
               fraction(result.thinking), fmt::format("{}/{}", result.ended, result.all.of),
               result.seconds);
  }
  std::fflush(stdout);
}

json::object result_json(const EvalResult& result) {
  if (result.perplexity) {
    const EvalPerplexity& prose = *result.perplexity;
    return {{"tokens", prose.tokens},
            {"nll_per_token", prose.nll},
            {"perplexity", std::exp(prose.nll)},
            {"bits_per_character", prose.bits_per_character},
            {"seconds", result.seconds}};
  }
  json::object object{
      {"correct", result.all.right},    {"of", result.all.of},
      {"accuracy", result.all.share()}, {"stopped_with_eos", result.ended},
      {"seconds", result.seconds},      {"generated_tokens", result.generated_tokens}};
  if (result.decode_seconds > 0) {
    object["decode_tokens_per_second"] =
        static_cast<double>(result.decoded_tokens) / result.decode_seconds;
  }
  if (result.direct.of > 0 && result.thinking.of > 0) {
    object["direct"] = fraction(result.direct);
    object["thinking"] = fraction(result.thinking);
  }
  return object;
}

// In the format of the models' results.json: question sets under "scores", prose under its name.
json::object results_json(const LoadedEngine& loaded, const std::vector<EvalResult>& results) {
  json::object object{{"model", loaded.checkpoint.directory()},
                      {"dtype", name_of(loaded.compute)},
                      {"kv_cache_dtype", name_of(loaded.cache_format)},
                      {"quantization", loaded.load.quantize_fp8 ? "fp8" : "auto"}};
  json::object& scores = object["scores"].emplace_object();
  for (const EvalResult& result : results) {
    if (!result.perplexity) scores[result.name] = result_json(result);
  }
  for (const EvalResult& result : results) {
    if (result.perplexity) object[result.name] = result_json(result);
  }
  return object;
}

Result<int> evaluate(const EvalFlags& flags) {
  std::vector<std::string> paths = flags.sets;
  if (paths.empty()) {
    FATHOM_TRY(paths, bundled_eval_sets());
  }
  // All files are validated before the model is loaded.
  std::vector<EvalSet> sets;
  for (const std::string& path : paths) {
    FATHOM_TRY(EvalSet set, load_eval_set(path, flags.limit));
    sets.push_back(std::move(set));
  }
  EngineNeeds needs;
  needs.num_seqs = kConcurrentItems;
  needs.prompt_logprobs = true;
  needs.prefix_caching = false;
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, needs));
  if (!flags.json) {
    fmt::print("{:<12} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9}\n", "set", "right", "", "direct",
               "thinking", "ended", "seconds");
  }
  std::vector<EvalResult> results;
  for (const EvalSet& set : sets) {
    FATHOM_TRY(EvalResult result, run_eval(loaded, set, flags.limit, !flags.model.quiet));
    if (!flags.json) print_row(result);
    if (flags.wrong) {
      for (const std::string& line : result.wrong) fmt::print(stderr, "{}\n", line);
    }
    results.push_back(std::move(result));
  }
  const SpeculationStats drafts = loaded.engine->stats().speculation;
  if (!flags.json) fmt::print("{}", speculation_line(drafts));
  if (flags.json) {
    json::object object = results_json(loaded, results);
    add_speculation(drafts, object);
    fmt::print("{}\n", to_python_json(object));
  }
  return 0;
}

}  // namespace

void add_eval_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand("eval", "Score a model on sets of questions and on prose");
  command->footer(
      "A .jsonl set has one object per line: {messages, tools?, thinking, check, expected};\n"
      "check is number, contains, json or tool. A .txt is scored by perplexity in rows of BOS +\n"
      "1,023 tokens. Answers are greedy and end at the end-of-sequence token or at the check's\n"
      "limit.");
  add_model_positional(*command, &flags->model);
  FlagGroup group(*command, "Evaluation");
  group.texts("--set", &flags->sets, "FILE",
              "A .jsonl or .txt; may be given several times (default: the five bundled sets)");
  group.count("--limit", &flags->limit, 0, int64_t{1} << 40, "Number of items of each set; 0: all");
  group.toggle("--json", &flags->json, "Print one JSON object");
  group.toggle("--wrong", &flags->wrong, "List the wrong answers on stderr");
  add_model_flags(*command, &flags->model);
  command->callback([flags, chosen] {
    *chosen = [flags] { return lead_or_follow(flags->model, [&] { return evaluate(*flags); }); };
  });
}

}  // namespace fathom
