// `fathom bench`: the flags of latency and throughput.
#include <CLI/CLI.hpp>

#include "cli/bench.h"
#include "cli/command.h"
#include "cli/node_engine.h"

namespace fathom {

void add_output_flags(CLI::App& command, OutputFlags* flags) {
  FlagGroup group(command, "Output");
  group.toggle("--json", &flags->json, "Print one JSON object instead of the report");
  group.toggle("--save-result", &flags->save, "Write the JSON object to a file as well");
  group.text("--result-filename,--output-json", &flags->result_file, "FILE",
             "That file (default: fathom-bench-TIME.json)");
}

void add_bench_command(CLI::App& app, Action* chosen) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* bench = app.add_subcommand("bench", "Measure speed");
  bench->require_subcommand(0, 1);  // command_line.cc reports a missing one

  CLI::App* latency = bench->add_subcommand("latency", "Latency of one batch of equal requests");
  add_model_positional(*latency, &flags->model);
  FlagGroup work(*latency, "Work");
  work.count("--batch-size", &flags->batch_size, 1, kMostOfAFlag, "Sequences in the batch");
  work.count("--input-len", &flags->input_len, 1, kMostOfAFlag,
             "Tokens of each prompt, chosen at random");
  work.count("--output-len", &flags->output_len, 1, kMostOfAFlag, "Tokens of each answer");
  work.count("--num-iters-warmup", &flags->warmup_iters, 0, kMostOfAFlag, "Warm-up batches");
  work.count("--num-iters", &flags->iters, 1, kMostOfAFlag, "Measured batches");
  add_output_flags(*latency, &flags->output);
  add_model_flags(*latency, &flags->model);
  latency->callback([flags, chosen] {
    *chosen = [flags] {
      return lead_or_follow(flags->model, [&] { return bench_latency(*flags); });
    };
  });

  CLI::App* throughput =
      bench->add_subcommand("throughput", "Throughput of many concurrent requests");
  add_model_positional(*throughput, &flags->model);
  FlagGroup load(*throughput, "Work");
  WorkloadOptions& workload = flags->workload;
  load.choice(
      "--dataset-name", &workload.dataset, {"random", "custom", "sharegpt", "azure", "mooncake"},
      "Source of the requests; a trace's are sent all at once, with answers of full length");
  load.text("--dataset-path", &workload.path, "FILE",
            "The dataset's file; custom: a .jsonl (field \"prompt\") or a text's lines");
  load.count("--num-prompts", &workload.num_prompts, 1, kMostOfAFlag, "Maximum number of requests");
  load.count("--random-input-len,--input-len", &workload.random_input_len, 1, kMostOfAFlag,
             "Tokens of each prompt, chosen at random");
  load.count("--random-output-len,--output-len", &workload.random_output_len, 1, kMostOfAFlag,
             "Tokens of each answer, of custom prompts too");
  load.number("--random-range-ratio", &flags->range_ratio, 0, 1,
              "Spread the lengths evenly by this share, up and down", "0");
  load.count("--max-concurrency", &flags->max_concurrency, 0, kMostOfAFlag,
             "Maximum number of concurrent requests; 0: no limit");
  add_output_flags(*throughput, &flags->output);
  add_model_flags(*throughput, &flags->model);
  throughput->callback([flags, chosen] {
    *chosen = [flags] {
      return lead_or_follow(flags->model, [&] { return bench_throughput(*flags); });
    };
  });

  add_bench_serve_command(*bench, chosen);
}

}  // namespace fathom
