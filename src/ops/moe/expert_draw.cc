#include "ops/moe/expert_draw.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace fathom {
namespace {

std::vector<int32_t> ascending(int32_t count) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Moves `count` of them to the front, drawn without replacement.
void shuffle_front(std::vector<int32_t>& all, size_t count, std::mt19937& random) {
  for (size_t j = 0; j < count; ++j) std::swap(all[j], all[j + random() % (all.size() - j)]);
}

std::vector<int32_t> zipf(int32_t num_experts, size_t k, int32_t rows, std::mt19937& random) {
  std::vector<int32_t> by_popularity = ascending(num_experts);
  shuffle_front(by_popularity, by_popularity.size(), random);
  // A race: an expert comes after an exponential time with its weight for a rate, and the first k
  // are a draw without replacement.
  std::vector<std::pair<double, int32_t>> times(by_popularity.size());
  std::vector<int32_t> ids;
  for (int32_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < times.size(); ++i) {
      const double uniform = (static_cast<double>(random()) + 0.5) / 4294967296.0;
      times[i] = {-std::log(uniform) * static_cast<double>(i + 1), by_popularity[i]};
    }
    std::partial_sort(times.begin(), times.begin() + static_cast<int64_t>(k), times.end());
    for (size_t j = 0; j < k; ++j) ids.push_back(times[j].second);
  }
  return ids;
}

}  // namespace

std::vector<int32_t> draw_experts(Routing routing, int32_t num_experts, int32_t experts_per_token,
                                  int32_t rows, uint32_t seed) {
  std::mt19937 random(seed);
  const auto k = static_cast<size_t>(experts_per_token);
  if (routing == Routing::kZipf) return zipf(num_experts, k, rows, random);
  std::vector<int32_t> all = ascending(num_experts), ids;
  for (int32_t row = 0; row < rows; ++row) {
    if (routing == Routing::kUniform) shuffle_front(all, k, random);
    for (size_t j = 0; j < k; ++j) {
      const bool even = routing == Routing::kEven;
      ids.push_back(even ? static_cast<int32_t>((static_cast<size_t>(row) * k + j) % all.size())
                         : all[j]);
    }
  }
  return ids;
}

Routing routing_flag(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--routing") != 0) continue;
    const char* const name = i + 1 < argc ? argv[i + 1] : "";
    if (std::strcmp(name, "uniform") == 0) return Routing::kUniform;
    if (std::strcmp(name, "zipf") == 0) return Routing::kZipf;
    std::fprintf(stderr, "--routing is \"%s\", must be uniform or zipf\n", name);
    std::exit(2);
  }
  return Routing::kUniform;
}

}  // namespace fathom
