// Decode steps of a model of grouped-query attention and of its conversion to latent attention, in
// turns in one process: time, and the bytes that a step reads. Random weights, unless the converted
// model's directory is given; caches full of random rows.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>

#include "base/json.h"
#include "bench/probe/probe.h"
#include "convert/convert_checkpoint.h"
#include "device/cpu/isa.h"
#include "model/filled_model.h"
#include "model/layer_options.h"

namespace fathom {
namespace {

struct Options {
  std::string model, converted, json;
  mla::MlaRequest request;
  int64_t keys = 8192;
  std::vector<int64_t> batches = {1, 8};
  int threads = 0, rounds = 5, repeats = 4;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
}

template <typename T>
T checked(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "{}\n", result.error().message);
    std::exit(2);
  }
  return std::move(*result);
}

Checkpoint open(const std::string& directory, bool random) {
  return checked(random ? Checkpoint::open_dummy(directory) : Checkpoint::open(directory));
}

// What a step reads: weights but the embedding, of which it takes a row, and what expands latent
// rows for prompts; and the caches.
struct StepBytes {
  double weights = 0, cache = 0;
};

StepBytes step_bytes(const FilledModel& model, int64_t keys, int64_t batch) {
  const ModelConfig& config = model.config();
  int64_t unread = config.vocab_size * config.hidden;
  if (!config.gqa) {
    unread += config.num_layers * config.num_heads * (config.qk_nope_dim + config.v_dim) *
              config.kv_lora_rank;
  }
  constexpr int64_t kBF16 = 2;
  return {static_cast<double>(model.weight_bytes() - kBF16 * unread),
          static_cast<double>(batch * keys * model.cache_bytes_per_token())};
}

void run(const Options& options) {
  ThreadPool pool(options.threads);
  const Checkpoint source = open(options.model, options.converted.empty());
  const int64_t largest = *std::max_element(options.batches.begin(), options.batches.end());
  const int64_t tokens = (options.keys + 2 * kPageSize) * largest;
  const AttentionPolicy policy = cpu_attention_policy();
  std::vector<FilledModel> models;
  models.emplace_back(source, policy, tokens, largest, pool);
  if (options.converted.empty()) {
    const mla::MlaShape shape = checked(plan_mla_shape(source.config(), options.request));
    const std::string text = checked(read_text_file(options.model + "/config.json", 1 << 20));
    models.emplace_back(checked(converted_config(text, source.config(), shape, "config.json")),
                        policy, tokens, largest, pool);
  } else {
    models.emplace_back(open(options.converted, false), policy, tokens, largest, pool);
  }
  const char* names[] = {"grouped queries", "converted"};
  json::array cases;
  for (const int64_t batch : options.batches) {
    std::vector<double> ms[2], ratios;
    for (FilledModel& model : models) model.step(options.keys - 1, 1, batch);  // warm
    for (int round = 0; round < options.rounds; ++round) {
      for (size_t i = 0; i < 2; ++i) {
        double sum = 0;
        for (int again = 0; again < options.repeats; ++again) {
          sum += models[i].step(options.keys - 1, 1, batch);
        }
        ms[i].push_back(sum / options.repeats);
      }
      ratios.push_back(ms[0].back() / ms[1].back());
    }
    const double bandwidth = probe_read(pool, uncached_bytes());
    json::array variants;
    for (size_t i = 0; i < 2; ++i) {
      const StepBytes bytes = step_bytes(models[i], options.keys, batch);
      const double rate = (bytes.weights + bytes.cache) / median(ms[i]) * 1e3;
      fmt::print(
          "{} x {} keys, {:<16}{:>9.2f} ms  weights {:.1f} MB, caches {:.1f} MB ({} bytes a "
          "token), {:.1f} GB/s, {:.0f} % of the probe\n",
          batch, options.keys, names[i], median(ms[i]), bytes.weights / 1e6, bytes.cache / 1e6,
          models[i].cache_bytes_per_token(), rate / 1e9, rate / bandwidth * 100);
      variants.push_back({{"variant", names[i]},
                          {"ms", json::value_from(ms[i])},
                          {"median_ms", median(ms[i])},
                          {"weight_bytes", bytes.weights},
                          {"cache_bytes", bytes.cache},
                          {"cache_bytes_per_token", models[i].cache_bytes_per_token()}});
    }
    fmt::print("  the first over the second, median of the rounds: {:.3f}\n", median(ratios));
    cases.push_back({{"batch", batch},
                     {"keys", options.keys},
                     {"read_bytes_per_second", bandwidth},
                     {"variants", std::move(variants)},
                     {"first_over_second", median(ratios)}});
  }
  if (options.json.empty()) return;
  const json::object all{{"model", options.model},
                         {"isa", name_of(cpu_isa())},
                         {"threads", pool.num_threads()},
                         {"rank", models[1].config().kv_lora_rank},
                         {"rope_dim", models[1].config().qk_rope_dim},
                         {"cases", std::move(cases)}};
  std::ofstream(options.json) << json::serialize(all) << "\n";
}

int main_of(int argc, char** argv) {
  Options options;
  CLI::App app("Decode of grouped-query attention beside its conversion to latent attention");
  app.add_option("model", options.model, "Directory with config.json")->required();
  app.add_option("--converted", options.converted,
                 "Its conversion by `fathom convert`: both models' weights are read from files");
  app.add_option("--rank", options.request.rank);
  app.add_option("--rope-dim", options.request.rope_dim);
  app.add_option("--keys", options.keys)->check(CLI::Range(64, 1 << 20));
  app.add_option("--batches", options.batches)->delimiter(',')->check(CLI::Range(1, 1024));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--repeats", options.repeats, "Steps of which a round takes the mean")
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "0: one a core")->check(CLI::Range(0, 1024));
  app.add_option("--json", options.json, "File for the report");
  CLI11_PARSE(app, argc, argv);
  run(options);
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) { return fathom::main_of(argc, argv); }
