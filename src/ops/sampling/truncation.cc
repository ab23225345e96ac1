// No pass here sorts the vocabulary. The k-th largest of the block maxima is at or below the k-th
// largest logit (k blocks have a logit of at least that), so the few blocks that reach it hold all
// of the top k. A nucleus (top-p) is searched among the 256 largest first; a flatter distribution
// is cut by a histogram of probability mass over the logit, and only the bin that the border falls
// into is sorted.
#include "ops/sampling/truncation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "base/math_constants.h"
#include "ops/sampling/logit_row.h"

namespace fathom {
namespace {

using Candidate = SampleScratch::Candidate;

constexpr int64_t kNucleusGuess = 256;
constexpr int kBinsPerUnit = 16;             // of (max - logit) / temperature
constexpr int kNumBins = 88 * kBinsPerUnit;  // exp_term is 0 beyond 87

bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Collects what the cutoff keeps, by ascending id.
void collect_kept(std::span<const float> logits, std::span<const float> maxima,
                  const Cutoff& cutoff, std::vector<Candidate>& kept) {
  kept.clear();
  for (int64_t block = 0; block < std::ssize(maxima); ++block) {
    if (!(maxima[block] >= cutoff.logit)) continue;
    const int64_t first = block * kLogitBlock;
    const int64_t end = std::min(first + kLogitBlock, std::ssize(logits));
    for (int64_t i = first; i < end; ++i) {
      const auto id = static_cast<int32_t>(i);
      if (cutoff.keeps(logits[i], id)) kept.push_back({logits[i], id});
    }
  }
}

// The cutoff among scratch.candidates (descending) at which the mass first reaches `wanted`;
// returns false if all of them together do not reach it.
bool cut_at_mass(std::span<const Candidate> candidates, uint64_t mass, uint64_t wanted, float max,
                 float inverse_temperature, Cutoff& cutoff) {
  for (const Candidate& candidate : candidates) {
    mass += units_of(exp_term(candidate.logit, max, inverse_temperature));
    if (mass >= wanted) {
      cutoff = {candidate.logit, candidate.id};
      return true;
    }
  }
  return false;
}

int bin_of(float logit, float max, float inverse_temperature) {
  const float depth = (max - logit) * inverse_temperature * kBinsPerUnit;
  return depth < kNumBins ? static_cast<int>(depth) : kNumBins - 1;  // -inf: the last
}

// The same over the whole row, whose total mass is known to reach `wanted`.
Cutoff cut_by_histogram(std::span<const float> logits, uint64_t wanted, float max,
                        float inverse_temperature, SampleScratch& scratch) {
  std::array<uint64_t, kNumBins> masses{};
  for (const float logit : logits) {
    if (!(logit > kNegativeInfinity)) continue;
    masses[bin_of(logit, max, inverse_temperature)] +=
        units_of(exp_term(logit, max, inverse_temperature));
  }
  uint64_t mass = 0;
  int bin = 0;
  while (mass + masses[bin] < wanted) mass += masses[bin++];
  scratch.candidates.clear();
  for (int64_t i = 0; i < std::ssize(logits); ++i) {
    if (logits[i] > kNegativeInfinity && bin_of(logits[i], max, inverse_temperature) == bin) {
      scratch.candidates.push_back({logits[i], static_cast<int32_t>(i)});
    }
  }
  std::sort(scratch.candidates.begin(), scratch.candidates.end(), before);
  Cutoff cutoff;
  cut_at_mass(scratch.candidates, mass, wanted, max, inverse_temperature, cutoff);
  return cutoff;
}

Cutoff cut_nucleus(std::span<const float> logits, double top_p, float max,
                   float inverse_temperature, SampleScratch& scratch) {
  scratch.sums.resize(scratch.maxima.size());
  const uint64_t wanted =
      wanted_units(top_p, block_exp_sums(logits, max, inverse_temperature, scratch.sums));
  select_top(logits, kNucleusGuess, scratch);
  Cutoff cutoff;
  if (cut_at_mass(scratch.candidates, 0, wanted, max, inverse_temperature, cutoff)) return cutoff;
  return cut_by_histogram(logits, wanted, max, inverse_temperature, scratch);
}

Cutoff cut_top_k(std::span<const float> logits, const SampleOptions& options, float max,
                 float inverse_temperature, SampleScratch& scratch) {
  select_top(logits, options.top_k, scratch);
  const std::vector<Candidate>& top = scratch.candidates;
  Cutoff cutoff{top.back().logit, top.back().id};
  if (options.top_p >= 1) return cutoff;
  uint64_t mass = 0;
  for (const Candidate& candidate : top) {
    mass += units_of(exp_term(candidate.logit, max, inverse_temperature));
  }
  cut_at_mass(top, 0, wanted_units(options.top_p, mass), max, inverse_temperature, cutoff);
  return cutoff;
}

}  // namespace

Cutoff find_cutoff(std::span<const float> logits, float max, const SampleOptions& options,
                   SampleScratch& scratch) {
  const auto inverse_temperature = static_cast<float>(1 / options.temperature);
  Cutoff cutoff;
  if (options.top_k > 0 && options.top_k < std::ssize(logits)) {
    cutoff = cut_top_k(logits, options, max, inverse_temperature, scratch);
  } else if (options.top_p < 1) {
    cutoff = cut_nucleus(logits, options.top_p, max, inverse_temperature, scratch);
  }
  if (options.min_p > 0) {
    // exp((logit - max) / temperature) >= min_p; the largest logit always stays.
    const auto border = static_cast<float>(max + options.temperature * std::log(options.min_p));
    if (border > cutoff.logit) cutoff = {std::min(border, max), Cutoff{}.id};
  }
  return cutoff;
}

void select_top(std::span<const float> logits, int64_t count, SampleScratch& scratch) {
  const std::vector<float>& maxima = scratch.maxima;
  float bound = std::numeric_limits<float>::lowest();
  if (count < std::ssize(maxima)) {
    scratch.selected_maxima = maxima;
    const auto nth = scratch.selected_maxima.begin() + (count - 1);
    std::nth_element(scratch.selected_maxima.begin(), nth, scratch.selected_maxima.end(),
                     std::greater<>());
    bound = std::max(bound, *nth);
  }
  std::vector<Candidate>& top = scratch.candidates;
  collect_kept(logits, maxima, {bound, Cutoff{}.id}, top);
  if (count < std::ssize(top)) {
    std::nth_element(top.begin(), top.begin() + (count - 1), top.end(), before);
    top.resize(static_cast<size_t>(count));
  }
  std::sort(top.begin(), top.end(), before);
}

}  // namespace fathom
