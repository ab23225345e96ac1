// `fathom bench throughput`: many requests at once.
#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "base/progress.h"
#include "cli/batch_run.h"
#include "cli/bench.h"
#include "cli/machine_probe.h"
#include "cli/model_work.h"
#include "cli/serving_report.h"

namespace fathom {
namespace {

constexpr int64_t kDefaultSequences = 256;  // vLLM's --max-num-seqs
constexpr int64_t kMostCacheTokens = 1 << 18;

// What the report says of a run; answers that were aborted count as failed.
ServingFigures figures_of(const BatchRun& run, const std::vector<Request>& requests) {
  std::vector<ServedRequest> served;
  for (size_t i = 0; i < requests.size(); ++i) {
    const BatchAnswer& answer = run.answers[i];
    if (answer.answer.finish != FinishReason::kLength &&
        answer.answer.finish != FinishReason::kStop) {
      continue;
    }
    served.push_back({.submitted = answer.submitted,
                      .token_times = answer.token_times,
                      .input_tokens = std::ssize(requests[i].prompt_ids),
                      .output_tokens = std::ssize(answer.token_times)});
  }
  ServingFigures figures = measure_serving(served, run.begin, run.seconds(), {});
  figures.failed = std::ssize(requests) - figures.completed;
  figures.peak_concurrency = run.peak_concurrency;
  return figures;
}

// The prompts of a file: of a .jsonl the "prompt" strings, else each line that is not empty.
Result<std::vector<std::string>> dataset_prompts(const std::string& path, int64_t limit) {
  FATHOM_TRY(const std::string text, read_text_file(path, kMaxDatasetBytes));
  std::vector<std::string> prompts;
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size() && static_cast<int64_t>(prompts.size()) < limit;) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string one = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (one.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (!path.ends_with(".jsonl")) {
      prompts.push_back(one);
      continue;
    }
    const std::string where = fmt::format("{} line {}", path, number);
    FATHOM_TRY(const json::value value, parse_json(one, where));
    if (!value.is_object()) return invalid("{}: is {}, expected an object", where, brief(value));
    FATHOM_TRY(std::string prompt, JsonFields(value.get_object(), where + ": ").string("prompt"));
    prompts.push_back(std::move(prompt));
  }
  if (prompts.empty()) return invalid("{}: has no prompts", path);
  return prompts;
}

Result<std::vector<Request>> make_requests(const BenchFlags& flags, const LoadedEngine& loaded) {
  const uint64_t seed = static_cast<uint64_t>(flags.model.seed.value_or(0));
  const double ratio = flags.range_ratio.value_or(0);
  std::vector<std::string> texts;
  if (!flags.dataset_path.empty()) {
    FATHOM_TRY(texts, dataset_prompts(flags.dataset_path, flags.num_prompts));
  }
  const auto count = texts.empty() ? static_cast<size_t>(flags.num_prompts) : texts.size();
  std::vector<Request> requests(count);
  for (size_t i = 0; i < count; ++i) {
    Request& request = requests[i];
    request.prompt_ids =
        texts.empty()
            ? random_prompt(loaded.checkpoint.config().vocab_size,
                            spread_length(flags.random_input_len, ratio, seed, 2 * i), seed, i)
            : loaded.tokenizer->encode(texts[i], loaded.tokenizer->bos_id().has_value());
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = spread_length(flags.random_output_len, ratio, seed, 2 * i + 1);
  }
  return requests;
}

}  // namespace

Result<int> bench_throughput(const BenchFlags& flags) {
  const int64_t together = flags.max_concurrency > 0
                               ? std::min(flags.max_concurrency, flags.num_prompts)
                               : flags.num_prompts;
  const double stretch = 1 + flags.range_ratio.value_or(0);
  const auto longest = static_cast<int64_t>(
      std::ceil(static_cast<double>(flags.random_input_len + flags.random_output_len) * stretch));
  EngineNeeds needs;
  needs.num_seqs = std::min(together, kDefaultSequences);
  needs.needs_tokenizer = !flags.dataset_path.empty();
  needs.prefix_caching = false;
  if (flags.dataset_path.empty()) {
    needs.total_tokens =
        std::max(round_up(longest + 1, kPageSize),
                 std::min(needs.num_seqs * round_up(longest + 1, kPageSize), kMostCacheTokens));
  }
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, needs));
  FATHOM_TRY(const std::vector<Request> requests, make_requests(flags, loaded));
  // Warm-up: the first step touches every weight and every buffer for the first time.
  FATHOM_TRY(const BatchRun warmup,
             run_batch(*loaded.engine, {requests.front()}, 0, [](size_t) {}));
  BatchRun run;
  {
    Progress progress("Requests", flags.model.quiet ? 0 : static_cast<int64_t>(requests.size()),
                      Progress::Unit::kItems);
    FATHOM_TRY(run, run_batch(*loaded.engine, requests, flags.max_concurrency,
                              [&](size_t) { progress.add(1); }));
  }
  const ServingFigures figures = figures_of(run, requests);
  const ServingReportOptions report{.max_concurrency = flags.max_concurrency};
  const double context =
      static_cast<double>(figures.input_tokens) / static_cast<double>(requests.size()) +
      static_cast<double>(flags.random_output_len) / 2;
  const MachineProbe probe = measure_machine(
      loaded.gpu, loaded.num_threads,
      decode_step_bytes(loaded.checkpoint, loaded.cache_format, run.peak_concurrency, context),
      loaded.compute);
  if (!flags.output.json) {
    fmt::print("{}{}", machine_lines(loaded), probe.line());
    print_serving_report(figures, report);
  }
  json::object object = machine_json(loaded);
  add_serving_figures(figures, report, object);
  probe.add_to(object);
  FATHOM_RETURN_IF_ERROR(report_json(flags.output, object));
  return 0;
}

}  // namespace fathom
