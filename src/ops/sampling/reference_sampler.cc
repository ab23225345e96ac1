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

int32_t reference_draw(const ReferenceDistribution& distribution, double uniform, double* margin) {
  double sum = 0;
  *margin = 1;
  int32_t chosen = -1;
  for (const auto& [id, p] : distribution.kept) {
    sum += p;
    *margin = std::min(*margin, std::abs(sum - uniform));
    if (chosen < 0 && p > 0 && sum > uniform) chosen = id;
  }
  return chosen >= 0 ? chosen : distribution.kept.rbegin()->first;
}

std::vector<double> reference_logprobs(std::span<const float> logits) {
  std::vector<double> p = softmax({logits.begin(), logits.end()});
  for (double& value : p) value = std::log(value);
  return p;
}

}  // namespace fathom
