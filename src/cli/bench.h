// `fathom bench`: shared parts, and the benchmarks that run a model in this process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/bench_workload.h"
#include "cli/command.h"
#include "cli/loaded_engine.h"

namespace fathom {

inline constexpr int64_t kMaxDatasetBytes = int64_t{1} << 30;

// The largest number of requests or tokens that a flag takes.
inline constexpr int64_t kMostOfAFlag = 1 << 20;

struct OutputFlags {
  bool json = false, save = false;
  std::string result_file;
};

struct BenchFlags {
  ModelFlags model;
  OutputFlags output;

  // latency
  int64_t batch_size = 1, input_len = 32, output_len = 128, warmup_iters = 3, iters = 10;
  // throughput
  WorkloadOptions workload{.num_prompts = 64, .random_input_len = 128, .random_output_len = 128};
  std::optional<double> range_ratio;
  int64_t max_concurrency = 0;
};

void add_output_flags(CLI::App& command, OutputFlags* flags);

// Adds `bench serve`, which measures a server (bench_serve.cc).
void add_bench_serve_command(CLI::App& bench, Action* chosen);

Result<int> bench_latency(const BenchFlags& flags);
Result<int> bench_throughput(const BenchFlags& flags);

// The ids of prompt `stream`. They differ in each run of a benchmark, so that no cache helps, and
// are never 0, which could be cheaper for some kernels.
std::vector<int32_t> random_prompt(int64_t vocab_size, int64_t length, uint64_t seed,
                                   uint64_t stream);

// A length uniform in [length * (1 - ratio), length * (1 + ratio)], at least 1.
int64_t spread_length(int64_t length, double ratio, uint64_t seed, uint64_t index);

// The percentile of a non-empty list, by linear interpolation between the nearest two values
// (numpy's default).
double percentile(std::vector<double> values, double percent);
double mean(const std::vector<double>& values);

// Describes the model and the machine, as text lines and as JSON.
std::string machine_lines(const LoadedEngine& loaded);
json::object machine_json(const LoadedEngine& loaded);

// Describes how evenly the experts' ranks are loaded, as a text line (empty without expert
// parallelism) and as JSON fields (none without).
std::string experts_line(const LoadedEngine& loaded);
void add_expert_loads(const LoadedEngine& loaded, json::object& object);

std::string utc_now();

// Prints the object and writes it to a file, as the flags say.
Result<> report_json(const OutputFlags& flags, const json::object& object);

}  // namespace fathom
