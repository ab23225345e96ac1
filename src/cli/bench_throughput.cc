// `fathom bench throughput`: many requests at once. The report's labels are those of vLLM's and
// SGLang's serving benchmarks, to the letter, because scripts read them.
#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "base/progress.h"
#include "base/random.h"
#include "cli/batch_run.h"
#include "cli/bench.h"
#include "cli/machine_probe.h"
#include "cli/model_work.h"

namespace fathom {
namespace {

constexpr int64_t kDefaultSequences = 256;  // vLLM's --max-num-seqs
constexpr int64_t kMostCacheTokens = 1 << 18;
constexpr int64_t kMaxDatasetBytes = 1 << 30;

// Milliseconds, one entry a request (itl: one a token but the first).
struct Delays {
  std::vector<double> ttft, tpot, itl, e2e;
};

struct Totals {
  int64_t completed = 0, failed = 0, input_tokens = 0, output_tokens = 0;
  double peak_output_rate = 0;  // tokens in the fullest second
};

double milliseconds(SteadyTime from, SteadyTime to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

Delays measure_delays(const BatchRun& run) {
  Delays delays;
  for (const BatchAnswer& answer : run.answers) {
    const auto& times = answer.token_times;
    if (times.empty()) continue;
    delays.ttft.push_back(milliseconds(answer.submitted, times.front()));
    delays.e2e.push_back(milliseconds(answer.submitted, times.back()));
    if (times.size() > 1) {
      delays.tpot.push_back(milliseconds(times.front(), times.back()) /
                            static_cast<double>(times.size() - 1));
    }
    for (size_t i = 1; i < times.size(); ++i) {
      delays.itl.push_back(milliseconds(times[i - 1], times[i]));
    }
  }
  return delays;
}

Totals count_tokens(const BatchRun& run, const std::vector<Request>& requests) {
  Totals totals;
  std::vector<int64_t> seconds(static_cast<size_t>(run.seconds()) + 1);
  for (size_t i = 0; i < requests.size(); ++i) {
    const BatchAnswer& answer = run.answers[i];
    const bool complete = answer.answer.finish == FinishReason::kLength ||
                          answer.answer.finish == FinishReason::kStop;
    ++(complete ? totals.completed : totals.failed);
    totals.input_tokens += static_cast<int64_t>(requests[i].prompt_ids.size());
    totals.output_tokens += static_cast<int64_t>(answer.token_times.size());
    for (const SteadyTime time : answer.token_times) {
      ++seconds[static_cast<size_t>(milliseconds(run.begin, time) / 1e3)];
    }
  }
  // A run shorter than a second has no full second; its mean is all there is to say.
  totals.peak_output_rate =
      std::max(static_cast<double>(*std::max_element(seconds.begin(), seconds.end())),
               static_cast<double>(totals.output_tokens) / run.seconds());
  return totals;
}

template <typename T>
void line(std::string_view label, T value) {
  if constexpr (std::is_floating_point_v<T>) {
    fmt::print("{:<40} {:<10.2f}\n", label, value);
  } else {
    fmt::print("{:<40} {:<10}\n", label, value);
  }
}

void print_delays(std::string_view title, std::string_view name,
                  const std::vector<double>& values) {
  fmt::print("{:-^50}\n", title);
  const bool none = values.empty();
  line(fmt::format("Mean {} (ms):", name), none ? 0.0 : mean(values));
  line(fmt::format("Median {} (ms):", name), none ? 0.0 : percentile(values, 50));
  line(fmt::format("P99 {} (ms):", name), none ? 0.0 : percentile(values, 99));
}

void print_report(const BatchRun& run, const Totals& totals, const Delays& delays,
                  int64_t max_concurrency) {
  const double seconds = run.seconds();
  fmt::print("{:=^50}\n", " Serving Benchmark Result ");
  line("Successful requests:", totals.completed);
  line("Failed requests:", totals.failed);
  if (max_concurrency > 0) line("Maximum request concurrency:", max_concurrency);
  line("Request rate configured (RPS):", "inf");
  line("Benchmark duration (s):", seconds);
  line("Total input tokens:", totals.input_tokens);
  line("Total generated tokens:", totals.output_tokens);
  line("Request throughput (req/s):", static_cast<double>(totals.completed) / seconds);
  line("Output token throughput (tok/s):", static_cast<double>(totals.output_tokens) / seconds);
  line("Peak output token throughput (tok/s):", totals.peak_output_rate);
  line("Peak concurrent requests:", static_cast<double>(run.peak_concurrency));
  line("Total token throughput (tok/s):",
       static_cast<double>(totals.input_tokens + totals.output_tokens) / seconds);
  print_delays("Time to First Token", "TTFT", delays.ttft);
  print_delays("Time per Output Token (excl. 1st token)", "TPOT", delays.tpot);
  print_delays("Inter-token Latency", "ITL", delays.itl);
  print_delays("End-to-end Latency", "E2EL", delays.e2e);
  fmt::print("{:=^50}\n", "");
}

json::object throughput_json(const LoadedEngine& loaded, const BatchRun& run, const Totals& totals,
                             const Delays& delays) {
  const double seconds = run.seconds();
  json::object object = machine_json(loaded);
  object["duration"] = seconds;
  object["completed"] = totals.completed;
  object["failed"] = totals.failed;
  object["total_input_tokens"] = totals.input_tokens;
  object["total_output_tokens"] = totals.output_tokens;
  object["request_throughput"] = static_cast<double>(totals.completed) / seconds;
  object["output_throughput"] = static_cast<double>(totals.output_tokens) / seconds;
  object["max_output_tokens_per_s"] = totals.peak_output_rate;
  object["max_concurrent_requests"] = run.peak_concurrency;
  object["total_token_throughput"] =
      static_cast<double>(totals.input_tokens + totals.output_tokens) / seconds;
  const std::pair<const char*, const std::vector<double>*> lists[] = {
      {"ttft", &delays.ttft}, {"tpot", &delays.tpot}, {"itl", &delays.itl}, {"e2el", &delays.e2e}};
  for (const auto& [name, values] : lists) {
    if (values->empty()) continue;
    object[fmt::format("mean_{}_ms", name)] = mean(*values);
    object[fmt::format("median_{}_ms", name)] = percentile(*values, 50);
    object[fmt::format("p99_{}_ms", name)] = percentile(*values, 99);
  }
  return object;
}

// Lengths spread evenly over [length * (1 - ratio), length * (1 + ratio)].
int64_t spread(int64_t length, double ratio, uint64_t seed, uint64_t index) {
  const auto middle = static_cast<double>(length);
  const auto low = static_cast<int64_t>(std::floor(middle * (1 - ratio)));
  const auto high = static_cast<int64_t>(std::ceil(middle * (1 + ratio)));
  const auto width = static_cast<uint64_t>(high - low + 1);
  return std::max<int64_t>(1, low + static_cast<int64_t>(random_bits(seed, ~0ull, index) % width));
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
        texts.empty() ? random_prompt(loaded.checkpoint.config().vocab_size,
                                      spread(flags.random_input_len, ratio, seed, 2 * i), seed, i)
                      : loaded.tokenizer->encode(texts[i], loaded.tokenizer->bos_id().has_value());
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = spread(flags.random_output_len, ratio, seed, 2 * i + 1);
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
  const Totals totals = count_tokens(run, requests);
  const Delays delays = measure_delays(run);
  const double context =
      static_cast<double>(totals.input_tokens) / static_cast<double>(requests.size()) +
      static_cast<double>(flags.random_output_len) / 2;
  const MachineProbe probe = measure_machine(
      loaded.num_threads,
      decode_step_bytes(loaded.checkpoint, loaded.cache_format, run.peak_concurrency, context),
      loaded.compute);
  if (!flags.json) {
    fmt::print("{}{}", machine_lines(loaded), probe.line());
    print_report(run, totals, delays, flags.max_concurrency);
  }
  json::object object = throughput_json(loaded, run, totals, delays);
  probe.add_to(object);
  FATHOM_RETURN_IF_ERROR(report_json(flags, object));
  return 0;
}

}  // namespace fathom
