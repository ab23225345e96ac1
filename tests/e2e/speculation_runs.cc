#include "e2e/speculation_runs.h"

#include <latch>

#include "chat/format.h"
#include "chat/prompt_ids.h"
#include "e2e/golden.h"

namespace fathom {
namespace {

struct Bundled {
  Checkpoint checkpoint = *Checkpoint::open(bundled_model());
  std::shared_ptr<const Tokenizer> tokenizer = std::move(*Tokenizer::load(bundled_model()));
};

const Bundled& bundled() {
  static const Bundled loaded;
  return loaded;
}

std::string read_eval_file(const std::string& name) {
  auto text = read_text_file(goldens_directory() + "../data/eval/" + name, 1 << 24);
  FATHOM_CHECK(text.has_value(), "{}", text.error().message);
  return std::move(*text);
}

}  // namespace

void SpeculationChoice::add(const TokenLogprob& token) {
  logprobs.push_back(token.logprob);
  for (const auto& [other, logprob] : token.top) logprobs.push_back(logprob);
}

const std::shared_ptr<const Tokenizer>& bundled_tokenizer() { return bundled().tokenizer; }

std::shared_ptr<const TokenGrammar> compile_grammar(const GrammarSpec& spec) {
  static GrammarCompiler compiler(
      bundled().tokenizer, bundled().checkpoint.config().vocab_size,
      GrammarCompilerOptions{.deadline = GrammarCompilerOptions::kPatient});
  auto grammar = compiler.compile(spec);
  FATHOM_CHECK(grammar.has_value(), "{}", grammar.error().message);
  return *grammar;
}

SpeculationOutcome run_with_drafts(const SpeculationSetting& setting, int64_t drafts,
                                   std::vector<Request> requests) {
  ModelRunnerOptions options;
  options.placement = setting.placement;
  options.compute = setting.compute;
  options.cache_format = setting.cache;
  options.attention.form = AttentionForm::kAbsorbed;
  options.max_batched_tokens = 512;
  options.max_total_tokens = setting.is_crowded ? 640 : 16384;
  options.num_threads = setting.placement.world();
  options.load.show_progress = false;
  options.max_drafts = drafts;
  auto runner = ModelRunner::create(bundled().checkpoint, options);
  FATHOM_CHECK(runner.has_value(), "{}", runner.error().message);
  EngineOptions engine_options = {.max_num_seqs = 32, .max_batched_tokens = 512};
  engine_options.eos_ids = {*bundled().tokenizer->eos_id()};
  if (setting.is_crowded) {
    engine_options.max_num_seqs = 6;
    engine_options.max_batched_tokens = 40;
    engine_options.preempt_every = 7;
  }
  if (setting.is_serial) engine_options.max_num_seqs = 1;
  engine_options.prefix_caching = setting.shares_prefixes;
  // However busy the machine is, no request is given up.
  engine_options.max_queue_time = engine_options.max_total_time = {};
  auto engine = Engine::create(engine_options, std::move(*runner), bundled().tokenizer);
  FATHOM_CHECK(engine.has_value(), "{}", engine.error().message);
  std::vector<std::vector<SpeculationChoice>> of_requests(requests.size());
  std::latch ended(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    std::vector<SpeculationChoice>& choices = of_requests[i];
    choices.resize(static_cast<size_t>(request.sampling.n));
    const auto id = (*engine)->submit(std::move(request), [&](const Event& event) {
      SpeculationChoice& choice = choices[static_cast<size_t>(event.index)];
      choice.ids.insert(choice.ids.end(), event.ids.begin(), event.ids.end());
      choice.text += event.text;
      for (const auto& token : event.prompt_logprobs) {
        if (token) choice.add(*token);
      }
      for (const TokenLogprob& token : event.logprobs) choice.add(token);
      if (event.finish) choice.finish = event.finish;
      if (event.last) ended.count_down();
    });
    FATHOM_CHECK(id.has_value(), "{}", id.error().message);
  }
  ended.wait();
  SpeculationOutcome outcome;
  const EngineStats stats = (*engine)->stats();
  outcome.stats = stats.speculation;
  outcome.steps = stats.steps;
  outcome.prefix_hits = stats.prefix_hits;
  for (std::vector<SpeculationChoice>& choices : of_requests) {
    for (const SpeculationChoice& choice : choices) {
      FATHOM_CHECK(choice.finish != FinishReason::kAbort, "a request was given up");
    }
    outcome.choices.insert(outcome.choices.end(), choices.begin(), choices.end());
  }
  return outcome;
}

std::vector<EvalPrompt> eval_prompts(const std::string& set, int64_t count) {
  const std::string text = read_eval_file(set + ".jsonl");
  std::vector<EvalPrompt> prompts;
  for (size_t begin = 0; std::ssize(prompts) < count;) {
    const size_t end = text.find('\n', begin);
    FATHOM_CHECK(end != std::string::npos, "{} has {} lines", set, prompts.size());
    const auto item = parse_json(std::string_view(text).substr(begin, end - begin), set);
    FATHOM_CHECK(item.has_value(), "{}", item.error().message);
    begin = end + 1;
    const auto conversation = parse_conversation(*item, set);
    FATHOM_CHECK(conversation.has_value(), "{}", conversation.error().message);
    const auto rendered = render(ChatFormat::kFathomTiny, *conversation);
    FATHOM_CHECK(rendered.has_value(), "{}", rendered.error().message);
    prompts.push_back(
        {std::string(item->at("messages").as_array().back().at("content").as_string()),
         encode_prompt(*bundled_tokenizer(), *rendered)});
  }
  return prompts;
}

std::vector<std::vector<int32_t>> prose_pieces(int64_t count, int64_t length) {
  const std::vector<int32_t> prose = bundled_tokenizer()->encode(read_eval_file("prose.txt"));
  std::vector<std::vector<int32_t>> pieces;
  for (int64_t i = 0; i < count; ++i) {
    const auto first = prose.begin() + i * (std::ssize(prose) - length) / count;
    pieces.push_back({0});
    pieces.back().insert(pieces.back().end(), first, first + length);
  }
  return pieces;
}

}  // namespace fathom
