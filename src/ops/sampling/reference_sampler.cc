#include "ops/sampling/reference_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fathom {
namespace {

std::vector<double> softmax(const std::vector<double>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p;
  p.reserve(logits.size());
  for (const double logit : logits) p.push_back(std::exp(logit - max));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= sum;
  return p;
}

std::vector<double> changed(std::span<const float> logits, const SampleOptions& options,
                            std::span<const int32_t> prompt, std::span<const int32_t> output,
                            const std::set<int32_t>& masked) {
  std::vector<double> x(logits.begin(), logits.end());
  for (const auto& [id, bias] : options.logit_bias) x[id] += bias;
  std::map<int32_t, int> written;
  std::set<int32_t> seen(prompt.begin(), prompt.end());
  for (const int32_t id : output) {
    ++written[id];
    seen.insert(id);
  }
  for (const int32_t id : seen) {
    if (x[id] > 0) {
      x[id] /= options.repetition_penalty;
    } else {
      x[id] *= options.repetition_penalty;
    }
  }
  for (const auto& [id, count] : written) {
    x[id] -= options.presence_penalty + options.frequency_penalty * count;
  }
  for (const int32_t id : masked) x[id] = -std::numeric_limits<double>::infinity();
  return x;
}

}  // namespace

ReferenceDistribution reference_distribution(std::span<const float> logits,
                                             const SampleOptions& options,
                                             std::span<const int32_t> prompt,
                                             std::span<const int32_t> output,
                                             const std::set<int32_t>& masked) {
  std::vector<double> x = changed(logits, options, prompt, output, masked);
  const bool greedy = options.temperature < kGreedyTemperature;
  for (double& value : x) value /= greedy ? 1 : options.temperature;
  std::vector<double> p = softmax(x);
  std::vector<int32_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  ReferenceDistribution result;
  if (greedy) {
    result.kept[order[0]] = 1;
    return result;
  }
  if (options.top_k > 0 && options.top_k < std::ssize(order)) {
    order.resize(static_cast<size_t>(options.top_k));
  }
  const auto renormalise = [&] {
    double sum = 0;
    for (const int32_t id : order) sum += p[id];
    for (const int32_t id : order) p[id] /= sum;
  };
  renormalise();
  if (options.top_p < 1) {
    double sum = 0;
    size_t count = 0;
    while (count < order.size() && sum < options.top_p) {
      sum += p[order[count++]];
      result.margin = std::min(result.margin, std::abs(sum - options.top_p));
    }
    order.resize(count);
    renormalise();
  }
  if (options.min_p > 0) {
    const double border = options.min_p * p[order[0]];
    std::erase_if(order, [&](int32_t id) {
      result.margin = std::min(result.margin, std::abs(p[id] / border - 1));
      return p[id] < border;
    });
    renormalise();
  }
  for (const int32_t id : order) result.kept[id] = p[id];
  return result;
}

double reference_noise(const NoiseKey& key, int32_t id) {
  const auto group = static_cast<uint32_t>(id / kNoiseGroup);
  const int place = id % kNoiseGroup;
  const uint64_t n = uint64_t{noise_words(key, group).words[place]} << 32 |
                     noise_words(key, group, true).words[place] | 1;
  constexpr long double kUnit = 0x1p-64L;
  // Whichever of v and 1 - v is small has all its bits.
  const long double exponential = n >> 63 != 0 ? -std::log(static_cast<long double>(0 - n) * kUnit)
                                               : -std::log1p(-static_cast<long double>(n) * kUnit);
  return static_cast<double>(-std::log(exponential));
}

int32_t reference_draw(const ReferenceDistribution& distribution, const NoiseKey& key,
                       double* lead) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double best = -kInfinity, second = -kInfinity;
  int32_t chosen = -1;
  for (const auto& [id, p] : distribution.kept) {
    const double score = std::log(p) + reference_noise(key, id);
    if (score > best) chosen = id;
    second = std::max(second, std::min(best, score));
    best = std::max(best, score);
  }
  *lead = best - second;
  return chosen;
}

std::vector<double> reference_logprobs(std::span<const float> logits) {
  std::vector<double> p = softmax({logits.begin(), logits.end()});
  for (double& value : p) value = std::log(value);
  return p;
}

}  // namespace fathom
