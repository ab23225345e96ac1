#include <fmt/chrono.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <numeric>

#include "base/random.h"
#include "chat/python_json.h"
#include "checkpoint/inventory.h"
#include "cli/bench.h"
#include "device/cpu/isa.h"
#include "engine/gpu_runner.h"

namespace fathom {
namespace {

std::string cpu_name() {
  std::ifstream stream("/proc/cpuinfo");
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// A number of parameters as "26.7 M" or "671.0 B".
std::string parameters_text(int64_t parameters) {
  const auto count = static_cast<double>(parameters);
  return count < 1e9 ? fmt::format("{:.1f} M", count / 1e6) : fmt::format("{:.1f} B", count / 1e9);
}

std::string machine_name(const LoadedEngine& loaded) {
  return loaded.gpu() ? gpu_name(*loaded.gpu()) + "; " + cpu_name() : cpu_name();
}

}  // namespace

std::vector<int32_t> random_prompt(int64_t vocab_size, int64_t length, uint64_t seed,
                                   uint64_t stream) {
  std::vector<int32_t> ids(static_cast<size_t>(length));
  const auto choices = static_cast<uint64_t>(std::max<int64_t>(vocab_size - 1, 1));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(1 + random_bits(seed, stream, i) % choices);
  }
  return ids;
}

int64_t spread_length(int64_t length, double ratio, uint64_t seed, uint64_t index) {
  const auto middle = static_cast<double>(length);
  const auto low = static_cast<int64_t>(std::floor(middle * (1 - ratio)));
  const auto high = static_cast<int64_t>(std::ceil(middle * (1 + ratio)));
  const auto width = static_cast<uint64_t>(high - low + 1);
  return std::max<int64_t>(1, low + static_cast<int64_t>(random_bits(seed, ~0ull, index) % width));
}

double percentile(std::vector<double> values, double percent) {
  std::sort(values.begin(), values.end());
  const double place = percent / 100 * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (values[above] - values[below]) * (place - std::floor(place));
}

double mean(const std::vector<double>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

std::string machine_lines(const LoadedEngine& loaded) {
  const Checkpoint& checkpoint = loaded.checkpoint;
  const Inventory inventory = take_loaded_inventory(checkpoint, loaded.load);
  const GroupTotals all = inventory.total(), mtp = inventory.of(WeightGroup::kMtp);
  return fmt::format(
      "Model:    {}{}, {} parameters ({} active), {} layers\n"
      "Numerics: {} products, {} cache, weights of {:.1f} MiB {}\n"
      "Machine:  {}, {} threads, {}, {}\n",
      checkpoint.directory(), checkpoint.is_dummy() ? " (random weights)" : "",
      parameters_text(all.parameters - mtp.parameters),
      parameters_text(inventory.active_parameters(checkpoint.config())),
      checkpoint.config().num_layers, name_of(loaded.compute), name_of(loaded.cache_format),
      static_cast<double>(all.bytes - mtp.bytes) / (1 << 20),
      loaded.load.quantize_fp8 ? "as quantised to FP8" : "as stored", machine_name(loaded),
      loaded.num_threads, name_of(cpu_isa()), utc_now());
}

json::object machine_json(const LoadedEngine& loaded) {
  return {{"model", loaded.checkpoint.directory()},
          {"random_weights", loaded.checkpoint.is_dummy()},
          {"num_layers", loaded.checkpoint.config().num_layers},
          {"dtype", name_of(loaded.compute)},
          {"kv_cache_dtype", name_of(loaded.cache_format)},
          {"quantization", loaded.load.quantize_fp8 ? "fp8" : "auto"},
          {"gpu", loaded.gpu() ? json::value(gpu_name(*loaded.gpu())) : json::value(nullptr)},
          {"cpu", cpu_name()},
          {"isa", name_of(cpu_isa())},
          {"threads", loaded.num_threads},
          {"date", utc_now()}};
}

std::string experts_line(const LoadedEngine& loaded) {
  const std::optional<ExpertStats> experts = loaded.engine->stats().experts;
  if (!experts) return "";
  const ExpertLoadSnapshot& window = experts->window;
  return fmt::format(
      "Experts:  {} ranks, mean over maximum of their tokens {:.3f} in all layers, {:.3f} in layer "
      "{} of those with experts; the heaviest expert has {:.1f} % of its layer's; {} moves\n",
      experts->ranks, window.balance, window.worst_balance, window.worst_layer,
      window.heaviest_expert * 100, experts->moves);
}

void add_expert_loads(const LoadedEngine& loaded, json::object& object) {
  const std::optional<ExpertStats> experts = loaded.engine->stats().experts;
  if (!experts) return;
  json::array tokens;
  for (auto begin = experts->tokens.begin(); begin != experts->tokens.end();
       begin += experts->experts) {
    tokens.emplace_back(json::value_from(std::vector<int64_t>(begin, begin + experts->experts)));
  }
  object["expert_balance"] = experts->window.balance;
  object["expert_layer_balance"] = json::value_from(experts->layer_balance);
  object["expert_moves"] = experts->moves;
  object["expert_tokens"] = std::move(tokens);
}

std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

Result<> report_json(const OutputFlags& flags, const json::object& object) {
  const std::string text = to_python_json(object) + "\n";
  if (flags.json) fmt::print("{}", text);
  if (!flags.save && flags.result_file.empty()) return {};
  const std::string path = flags.result_file.empty()
                               ? fmt::format("fathom-bench-{}.json", std::time(nullptr))
                               : flags.result_file;
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream << text;
  stream.close();
  if (!stream) return invalid("{}: cannot be written", path);
  fmt::print(stderr, "saved to {}\n", path);
  return {};
}

}  // namespace fathom
