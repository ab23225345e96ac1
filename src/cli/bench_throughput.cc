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
#include "cli/speculation_report.h"

namespace fathom {
namespace {

constexpr int64_t kMostCacheTokens = 1 << 18;

// The report's figures of a run; aborted requests count as failed.
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

Result<std::vector<Request>> make_requests(const BenchFlags& flags, const LoadedEngine& loaded) {
  WorkloadOptions options = flags.workload;
  options.vocab_size = loaded.checkpoint.config().vocab_size;
  options.seed = static_cast<uint64_t>(flags.model.seed.value_or(0));
  options.range_ratio = flags.range_ratio.value_or(0);
  FATHOM_TRY(std::vector<LoadRequest> workload, make_workload(options));
  std::vector<Request> requests;
  for (LoadRequest& load : workload) {
    Request& request = requests.emplace_back();
    request.prompt_ids = std::move(load.prompt_ids);
    if (request.prompt_ids.empty()) {
      const Tokenizer& tokenizer = *loaded.tokenizer;
      request.prompt_ids = tokenizer.encode(load.prompt_text, tokenizer.bos_id().has_value());
    }
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = load.output_tokens;
  }
  return requests;
}

}  // namespace

Result<int> bench_throughput(const BenchFlags& flags) {
  const WorkloadOptions& workload = flags.workload;
  const int64_t together = flags.max_concurrency > 0
                               ? std::min(flags.max_concurrency, workload.num_prompts)
                               : workload.num_prompts;
  EngineNeeds needs;
  needs.num_seqs = std::min(together, flags.model.many_sequences());
  needs.needs_tokenizer = workload.dataset == "custom" || workload.dataset == "sharegpt";
  needs.prefix_caching = workload.dataset == "mooncake";  // its prompts share prefixes
  if (workload.dataset == "random") {
    const double stretch = 1 + flags.range_ratio.value_or(0);
    const auto longest = static_cast<int64_t>(std::ceil(
        static_cast<double>(workload.random_input_len + workload.random_output_len) * stretch));
    needs.total_tokens =
        std::max(round_up(longest + 1, kPageSize),
                 std::min(needs.num_seqs * round_up(longest + 1, kPageSize), kMostCacheTokens));
  }
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, needs));
  FATHOM_TRY(const std::vector<Request> requests, make_requests(flags, loaded));
  // Warm-up: touches all weights and buffers.
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
      (static_cast<double>(figures.input_tokens) + static_cast<double>(figures.output_tokens) / 2) /
      static_cast<double>(requests.size());
  const MachineProbe probe =
      measure_machine(loaded.gpu(), loaded.num_threads,
                      decode_step_bytes(loaded.checkpoint, loaded.load, loaded.cache_format,
                                        run.peak_concurrency, context),
                      loaded.compute);
  if (!flags.output.json) {
    fmt::print("{}{}", machine_lines(loaded), probe.line());
    print_serving_report(figures, report);
    fmt::print("{}{}", experts_line(loaded), speculation_line(loaded.engine->stats().speculation));
  }
  json::object object = machine_json(loaded);
  add_serving_figures(figures, report, object);
  probe.add_to(object);
  add_expert_loads(loaded, object);
  add_speculation(loaded.engine->stats().speculation, object);
  FATHOM_RETURN_IF_ERROR(report_json(flags.output, object));
  return 0;
}

}  // namespace fathom
