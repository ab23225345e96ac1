#include "ops/sampling/sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "base/math_constants.h"
#include "ops/sampling/gumbel_noise.h"
#include "ops/sampling/logit_row.h"
#include "ops/sampling/race.h"
#include "ops/sampling/truncation.h"

namespace fathom {
namespace {

// Steps with fewer logits are done before another thread has woken: at 10 GB/s and more they take
// less than 30 us.
constexpr int64_t kParallelElements = 65'536;

void find_maxima(std::span<const float> logits, SampleScratch& scratch) {
  scratch.maxima.resize(static_cast<size_t>(num_logit_blocks(std::ssize(logits))));
  block_maxima(logits, scratch.maxima);
}

LargestLogit largest_of(std::span<const float> logits, std::span<const float> maxima) {
  const auto block = std::max_element(maxima.begin(), maxima.end());
  if (block == maxima.end() || *block == kNegativeInfinity) return {};
  const auto first = logits.begin() + (block - maxima.begin()) * kLogitBlock;
  return {*block, static_cast<int32_t>(std::find(first, logits.end(), *block) - logits.begin())};
}

// The lowest id with the largest logit; nothing if that is not finite.
std::optional<int32_t> largest(std::span<const float> logits, std::span<const float> maxima) {
  const LargestLogit best = largest_of(logits, maxima);
  if (best.id < 0 || !std::isfinite(best.value)) return std::nullopt;
  return best.id;
}

bool changes_logits(const SampleRow& row) {
  return !row.masked.empty() || !row.allowed.empty() || !row.options->logit_bias.empty() ||
         row.options->has_penalties();
}

void keep_allowed(std::span<const uint32_t> allowed, std::span<float> logits) {
  constexpr int64_t kBits = 32;
  const int64_t words = std::min(std::ssize(allowed), std::ssize(logits) / kBits);
  for (int64_t word = 0; word < words; ++word) {
    const uint32_t bits = allowed[word];
    if (bits == ~uint32_t{0}) continue;
    float* const of_word = logits.data() + word * kBits;
    for (int64_t i = 0; i < kBits; ++i) of_word[i] = bits >> i & 1 ? of_word[i] : kNegativeInfinity;
  }
  for (int64_t id = words * kBits; id < std::ssize(logits); ++id) {
    const bool keeps = id / kBits < std::ssize(allowed) && allowed[id / kBits] >> id % kBits & 1;
    if (!keeps) logits[id] = kNegativeInfinity;
  }
}

void change_logits(const SampleRow& row, std::span<float> logits) {
  const SampleOptions& options = *row.options;
  for (const auto& [id, bias] : options.logit_bias) logits[id] += bias;
  if (options.has_penalties()) {
    FATHOM_CHECK(row.history != nullptr, "penalties need the tokens' history");
    for (const SeenToken& entry : row.history->entries()) {
      double logit = logits[entry.id];
      logit = logit > 0 ? logit / options.repetition_penalty : logit * options.repetition_penalty;
      logit -= options.frequency_penalty * entry.output_count;
      if (entry.output_count > 0) logit -= options.presence_penalty;
      logits[entry.id] = static_cast<float>(logit);
    }
  }
  for (const int32_t id : row.masked) logits[id] = kNegativeInfinity;
  if (!row.allowed.empty()) keep_allowed(row.allowed, logits);
}

// scratch.maxima are those of `logits`.
int32_t choose(std::span<const float> logits, const SampleRow& row, SampleScratch& scratch) {
  const std::optional<int32_t> best = largest(logits, scratch.maxima);
  if (!best) return -1;
  const SampleOptions& options = *row.options;
  if (options.temperature < kGreedyTemperature) return *best;

  const Cutoff cutoff = find_cutoff(logits, logits[*best], options, scratch);
  return race(logits, scratch.maxima, *best, cutoff, static_cast<float>(1 / options.temperature),
              noise_key(options.seed, options.stream, row.position));
}

// Log-probabilities of the raw row; scratch.maxima are its own.
void add_logprobs(std::span<const float> logits, int num_top, SampleScratch& scratch,
                  SampledToken& out) {
  const std::optional<int32_t> best = largest(logits, scratch.maxima);
  if (!best || out.id < 0) {
    out.id = -1;
    return;
  }
  scratch.sums.resize(scratch.maxima.size());
  const uint64_t units = block_exp_sums(logits, logits[*best], 1, scratch.sums);
  const double log_sum =
      logits[*best] + std::log(static_cast<double>(units) / static_cast<double>(kTermUnits));
  out.logprob = static_cast<float>(logits[out.id] - log_sum);
  if (num_top == 0) return;
  select_top(logits, num_top, scratch);
  for (const auto& [logit, id] : scratch.candidates) {
    out.top.emplace_back(id, static_cast<float>(logit - log_sum));
  }
}

}  // namespace

bool takes_largest(const SampleRow& row) {
  return row.given_id < 0 && row.num_logprobs < 0 && !changes_logits(row) &&
         row.options->temperature < kGreedyTemperature;
}

LargestLogit largest_logit(std::span<const float> logits, SampleScratch& scratch) {
  find_maxima(logits, scratch);
  return largest_of(logits, scratch.maxima);
}

void sample(std::span<const float> logits, const SampleRow& row, SampleScratch& scratch,
            SampledToken& out) {
  out.top.clear();
  out.logprob = 0;
  out.id = row.given_id;
  if (row.given_id >= 0 || !changes_logits(row)) {
    find_maxima(logits, scratch);
    if (row.given_id < 0) out.id = choose(logits, row, scratch);
    if (row.num_logprobs >= 0) add_logprobs(logits, row.num_logprobs, scratch, out);
    return;
  }
  scratch.logits.assign(logits.begin(), logits.end());
  change_logits(row, scratch.logits);
  find_maxima(scratch.logits, scratch);
  out.id = choose(scratch.logits, row, scratch);
  if (row.num_logprobs >= 0) {
    find_maxima(logits, scratch);
    add_logprobs(logits, row.num_logprobs, scratch, out);
  }
}

int32_t draft_token(std::span<const float> logits, const SampleOptions& options, uint64_t position,
                    SampleScratch& scratch) {
  find_maxima(logits, scratch);
  const SampleOptions unfiltered = {
      .temperature = options.temperature, .seed = options.seed, .stream = options.stream};
  return choose(logits, {.options = &unfiltered, .position = position}, scratch);
}

void sample_rows(const Stream* stream, ConstTensorView logits, std::span<const SampleRow> rows,
                 std::vector<SampleScratch>& scratch, std::span<SampledToken> out) {
  FATHOM_CHECK(rows.size() == out.size(), "{} rows, {} results", rows.size(), out.size());
  if (rows.empty()) return;
  const int64_t vocab = logits.size(1), count = std::ssize(rows);
  const auto run = [&](SampleScratch& mine, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      FATHOM_CHECK(rows[i].row >= 0 && rows[i].row < logits.size(0), "row {} of {}", rows[i].row,
                   logits.size(0));
      sample({logits.row<float>(rows[i].row), static_cast<size_t>(vocab)}, rows[i], mine, out[i]);
    }
  };
  const int threads = stream == nullptr ? 1 : stream->pool().num_threads();
  if (std::ssize(scratch) < threads) scratch.resize(static_cast<size_t>(threads));
  if (threads == 1 || count == 1 || count * vocab < kParallelElements) {
    run(scratch[0], 0, count);
    return;
  }
  stream->pool().run([&](int thread) {
    run(scratch[thread], count * thread / threads, count * (thread + 1) / threads);
  });
}

}  // namespace fathom
