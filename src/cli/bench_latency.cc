// `fathom bench latency`: repeatedly runs one batch of equal requests.
#include <algorithm>

#include "base/math.h"
#include "base/progress.h"
#include "cli/answer_printer.h"
#include "cli/batch_run.h"
#include "cli/bench.h"
#include "cli/machine_probe.h"
#include "cli/model_work.h"
#include "cli/speculation_report.h"

namespace fathom {
namespace {

constexpr double kPercentiles[] = {10, 25, 50, 75, 90, 99};  // as in vLLM

// Times of one iteration. Decode begins with the last prompt's first token.
struct Iteration {
  double seconds = 0;
  double prefill_rate = 0;  // prompt tokens/s
  double decode_rate = 0;   // generated tokens/s, all sequences; 0 with one output token
};

double seconds_between(SteadyTime from, SteadyTime to) {
  return std::chrono::duration<double>(to - from).count();
}

Iteration measure(const BatchRun& run, const BenchFlags& flags) {
  Iteration iteration{.seconds = run.seconds()};
  SteadyTime prompts_done = run.begin, last = run.begin;
  for (const BatchAnswer& answer : run.answers) {
    if (answer.token_times.empty()) continue;
    prompts_done = std::max(prompts_done, answer.token_times.front());
    last = std::max(last, answer.token_times.back());
  }
  int64_t decoded = 0;
  for (const BatchAnswer& answer : run.answers) {
    decoded += std::count_if(answer.token_times.begin(), answer.token_times.end(),
                             [&](SteadyTime time) { return time > prompts_done; });
  }
  const double prefill = seconds_between(run.begin, prompts_done);
  const double decode = seconds_between(prompts_done, last);
  if (prefill > 0) {
    iteration.prefill_rate = static_cast<double>(flags.batch_size * flags.input_len) / prefill;
  }
  if (decode > 0) iteration.decode_rate = static_cast<double>(decoded) / decode;
  return iteration;
}

Result<std::vector<Iteration>> iterate(const BenchFlags& flags, const LoadedEngine& loaded) {
  const uint64_t seed = static_cast<uint64_t>(flags.model.seed.value_or(0));
  const int64_t rounds = flags.warmup_iters + flags.iters;
  std::vector<Iteration> iterations;
  Progress progress("Measuring", flags.model.quiet ? 0 : rounds, Progress::Unit::kItems);
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<Request> requests(static_cast<size_t>(flags.batch_size));
    for (size_t i = 0; i < requests.size(); ++i) {
      const uint64_t stream = static_cast<uint64_t>(round) * requests.size() + i;
      requests[i].prompt_ids =
          random_prompt(loaded.checkpoint.config().vocab_size, flags.input_len, seed, stream);
      requests[i].sampling.temperature = 0;
      requests[i].sampling.ignore_eos = true;
      requests[i].sampling.max_tokens = flags.output_len;
    }
    FATHOM_TRY(const BatchRun run, run_batch(*loaded.engine, requests, 0, [](size_t) {}));
    if (round >= flags.warmup_iters) iterations.push_back(measure(run, flags));
    progress.add(1);
  }
  return iterations;
}

std::vector<double> column(const std::vector<Iteration>& iterations, double Iteration::*field) {
  std::vector<double> values;
  values.reserve(iterations.size());
  for (const Iteration& iteration : iterations) values.push_back(iteration.*field);
  return values;
}

// Speeds, and the machine's speed at the same time.
struct Summary {
  double prefill_median, prefill_best, decode_median, decode_best;
  double decode_step_bytes, prefill_flops;
  MachineProbe probe;

  double decode_bandwidth(const BenchFlags& flags) const {  // bytes/s, at the median
    return decode_median / static_cast<double>(flags.batch_size) * decode_step_bytes;
  }
  double prefill_flop_rate(const BenchFlags& flags) const {
    return prefill_median / static_cast<double>(flags.input_len) * prefill_flops;
  }
};

Summary summarise(const BenchFlags& flags, const LoadedEngine& loaded,
                  const std::vector<Iteration>& iterations) {
  const auto prefill = column(iterations, &Iteration::prefill_rate);
  const auto decode = column(iterations, &Iteration::decode_rate);
  const double context =
      static_cast<double>(flags.input_len) + static_cast<double>(flags.output_len) / 2;
  const double bytes = decode_step_bytes(loaded.checkpoint, loaded.load, loaded.cache_format,
                                         flags.batch_size, context);
  return {percentile(prefill, 50),
          percentile(prefill, 100),
          percentile(decode, 50),
          percentile(decode, 100),
          bytes,
          prefill_flops(loaded.checkpoint.config(), flags.input_len),
          measure_machine(loaded.gpu(), loaded.num_threads, bytes, loaded.compute)};
}

void print_rates(const BenchFlags& flags, const Summary& summary) {
  const double flops = summary.prefill_flop_rate(flags);
  fmt::print("Prefill: {} tokens/s median, {} best ({:.0f} GFLOP/s, {:.0f} % of the probe)\n",
             grouped(summary.prefill_median), grouped(summary.prefill_best), flops / 1e9,
             flops / summary.probe.matrix_flops * 100);
  if (summary.decode_median <= 0) return;
  const double bandwidth = summary.decode_bandwidth(flags);
  fmt::print(
      "Decode: {} tokens/s median, {} best ({:.2f} MB a step, {:.1f} GB/s, {:.0f} % of the "
      "probe)\n",
      grouped(summary.decode_median), grouped(summary.decode_best), summary.decode_step_bytes / 1e6,
      bandwidth / 1e9, bandwidth / summary.probe.read_bandwidth * 100);
}

json::object latency_json(const BenchFlags& flags, const LoadedEngine& loaded,
                          const std::vector<double>& latencies, const Summary& summary) {
  json::object object = machine_json(loaded);
  object["batch_size"] = flags.batch_size;
  object["input_len"] = flags.input_len;
  object["output_len"] = flags.output_len;
  object["avg_latency"] = mean(latencies);
  object["latencies"] = json::value_from(latencies);
  json::object& percentiles = object["percentiles"].emplace_object();
  for (const double percent : kPercentiles) {
    percentiles[fmt::format("{}", percent)] = percentile(latencies, percent);
  }
  object["prefill_tokens_per_second"] = summary.prefill_median;
  object["prefill_tokens_per_second_best"] = summary.prefill_best;
  object["decode_tokens_per_second"] = summary.decode_median;
  object["decode_tokens_per_second_best"] = summary.decode_best;
  object["decode_step_bytes"] = summary.decode_step_bytes;
  object["prefill_flops"] = summary.prefill_flops;
  summary.probe.add_to(object);
  add_expert_loads(loaded, object);
  add_speculation(loaded.engine->stats().speculation, object);
  return object;
}

}  // namespace

Result<int> bench_latency(const BenchFlags& flags) {
  EngineNeeds needs;
  needs.num_seqs = flags.batch_size;
  needs.needs_tokenizer = false;
  needs.prefix_caching = false;
  needs.total_tokens =
      flags.batch_size * round_up(flags.input_len + flags.output_len + 1, kPageSize);
  FATHOM_TRY(const LoadedEngine loaded, load_engine(flags.model, needs));
  FATHOM_TRY(const auto iterations, iterate(flags, loaded));
  const std::vector<double> latencies = column(iterations, &Iteration::seconds);
  const Summary summary = summarise(flags, loaded, iterations);
  if (!flags.output.json) {
    fmt::print("{}{}Work:     batch of {}, {} tokens in, {} out, {} times\n", machine_lines(loaded),
               summary.probe.line(), flags.batch_size, flags.input_len, flags.output_len,
               flags.iters);
    fmt::print("Avg latency: {:.6f} seconds\n", mean(latencies));
    for (const double percent : kPercentiles) {
      fmt::print("{}% percentile latency: {:.6f} seconds\n", percent,
                 percentile(latencies, percent));
    }
    print_rates(flags, summary);
    fmt::print("{}{}", experts_line(loaded), speculation_line(loaded.engine->stats().speculation));
  }
  FATHOM_RETURN_IF_ERROR(
      report_json(flags.output, latency_json(flags, loaded, latencies, summary)));
  return 0;
}

}  // namespace fathom
