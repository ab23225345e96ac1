#include "ops/attention/latent_decode_cuda/latent_decode_trial_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "cache/latent_row.h"
#include "device/cuda/device_array.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/attention/attention.h"
#include "ops/attention/latent_decode_cuda/latent_decode_cuda.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512, kRope = 64, kColumns = kLatent + kRope;
constexpr float kScale = 0.0721688f;  // 1 / sqrt(192)

int64_t pages_for(const std::vector<int32_t>& lens) {
  int64_t count = 1;
  for (const int32_t len : lens) count += (len + kPageSize - 1) / kPageSize;
  return count;
}

uint32_t seed_of(int heads, const std::vector<int32_t>& lens, const std::vector<int32_t>& queries) {
  return static_cast<uint32_t>(heads * 1000 + std::ssize(lens) * 10 + queries[0]);
}

}  // namespace

LatentDecodeTrial::LatentDecodeTrial(CacheFormat format, int heads,
                                     const std::vector<int32_t>& total_lens,
                                     const std::vector<int32_t>& queries)
    : format_(format),
      problem_(heads, total_lens, queries, pages_for(total_lens),
               seed_of(heads, total_lens, queries)) {
  const LatentLayout layout{.format = format};
  const int64_t num_pages = pages_for(total_lens);
  std::mt19937 random(seed_of(heads, total_lens, queries));
  q_latent_ = random_bf16(problem_.rows() * kLatent, 0.6f, random);
  q_rope_ = random_bf16(problem_.rows() * kRope, 0.6f, random);
  // NaN in every format.
  pages_.assign(static_cast<size_t>(num_pages * layout.page_bytes()), std::byte{0xFF});
  decoded_.assign(static_cast<size_t>(num_pages * kPageSize * kColumns), std::nanf(""));
  const PagedBatch batch = problem_.batch();
  for (const int32_t s : problem_.sequences) {
    for (int32_t key = 0; key < batch.total_len(s); ++key) {
      auto row = random_f32(kColumns, 0.6f, random);
      for (int64_t i = 0; i < kLatent; ++i) {
        row[static_cast<size_t>(i)] *= 0.25f + 0.25f * static_cast<float>((key + i / 128) % 5);
      }
      const auto page = batch.pages(s)[static_cast<size_t>(key / kPageSize)];
      const int64_t at = page * kPageSize + key % kPageSize;
      std::byte* const bytes = pages_.data() + at * layout.row_bytes();
      encode_row(layout, row.data(), row.data() + kLatent, bytes);
      float* const decoded = decoded_.data() + at * kColumns;
      decode_row(layout, bytes, decoded, decoded + kLatent);
    }
  }
}

void LatentDecodeTrial::scale_queries(float factor) {
  for (auto* q : {&q_latent_, &q_rope_}) {
    for (uint16_t& value : *q) value = bf16_bits(from_bf16(value) * factor);
  }
}

void LatentDecodeTrial::scale_latents(float factor) {
  const LatentLayout layout{.format = format_};
  const PagedBatch batch = problem_.batch();
  for (const int32_t s : problem_.sequences) {
    for (int32_t key = 0; key < batch.total_len(s); ++key) {
      const auto page = batch.pages(s)[static_cast<size_t>(key / kPageSize)];
      const int64_t at = page * kPageSize + key % kPageSize;
      float* const row = decoded_.data() + at * kColumns;
      std::vector<float> values(row, row + kColumns);
      for (int64_t i = 0; i < kLatent; ++i) values[static_cast<size_t>(i)] *= factor;
      std::byte* const bytes = pages_.data() + at * layout.row_bytes();
      encode_row(layout, values.data(), values.data() + kLatent, bytes);
      decode_row(layout, bytes, row, row + kLatent);
    }
  }
}

void LatentDecodeTrial::scale_keys(const std::vector<float>& scales, float hidden_from) {
  const LatentLayout layout{.format = format_};
  const PagedBatch batch = problem_.batch();
  constexpr float kFarBelow = -1e7f;
  for (uint16_t& value : q_rope_) value = bf16_bits(std::abs(from_bf16(value)));
  for (const int32_t s : problem_.sequences) {
    for (int32_t key = 0; key < batch.total_len(s); ++key) {
      const auto page = batch.pages(s)[static_cast<size_t>(key / kPageSize)];
      const int64_t at = page * kPageSize + key % kPageSize;
      float* const row = decoded_.data() + at * kColumns;
      const float wanted = scales[static_cast<size_t>(key) % scales.size()];
      float largest = 0;
      for (int64_t i = 0; i < kLatent; ++i) largest = std::max(largest, std::abs(row[i]));
      for (int64_t i = 0; i < kLatent; ++i) row[i] *= wanted * 448 / largest;
      if (wanted >= hidden_from) std::fill_n(row + kLatent, kRope, kFarBelow);
      std::byte* const bytes = pages_.data() + at * layout.row_bytes();
      const std::vector<float> values(row, row + kColumns);
      encode_row(layout, values.data(), values.data() + kLatent, bytes);
      decode_row(layout, bytes, row, row + kLatent);
    }
  }
}

LatentDecodeTrial::Softmax LatentDecodeTrial::softmax_of(int32_t sequence, int64_t row) const {
  const PagedBatch batch = problem_.batch();
  const auto s = static_cast<size_t>(sequence);
  const auto query = static_cast<int32_t>(row / problem_.heads) - batch.query_start[s];
  const int32_t keys = batch.context_lens[s] + query + 1;
  const auto values_of = [&](int32_t key) {
    const auto page = batch.pages(sequence)[static_cast<size_t>(key / kPageSize)];
    return decoded_.data() + (page * kPageSize + key % kPageSize) * kColumns;
  };
  const auto q_latent = std::span(q_latent_).subspan(static_cast<size_t>(row * kLatent), kLatent);
  const auto q_rope = std::span(q_rope_).subspan(static_cast<size_t>(row * kRope), kRope);
  std::vector<double> scores(static_cast<size_t>(keys));
  double largest = 0;
  for (int32_t key = 0; key < keys; ++key) {
    const DoubleScore score = score_in_double(q_latent, q_rope, values_of(key));
    scores[static_cast<size_t>(key)] = score.value * kScale;
    largest = std::max(largest, score.magnitude * kScale);
  }
  Softmax softmax{.out = std::vector<double>(kLatent),
                  .certainty = certainty_of(scores, largest, kScoreResolution)};
  const double most = *std::max_element(scores.begin(), scores.end());
  double all = 0;
  for (double& score : scores) all += score = std::exp(score - most);
  for (int32_t key = 0; key < keys; ++key) {
    const double weight = scores[static_cast<size_t>(key)] / all;
    if (weight == 0) continue;
    const float* const values = values_of(key);
    for (size_t i = 0; i < softmax.out.size(); ++i) softmax.out[i] += weight * values[i];
  }
  return softmax;
}

int32_t LatentDecodeTrial::sequence_of(int64_t row) const {
  const auto& start = problem_.query_start;
  const auto token = static_cast<int32_t>(row / problem_.heads);
  return static_cast<int32_t>(std::ranges::upper_bound(start, token) - start.begin()) - 1;
}

std::vector<double> LatentDecodeTrial::in_double() const {
  std::vector<double> out;
  for (int64_t row = 0; row < problem_.rows(); ++row) {
    const auto its = softmax_of(sequence_of(row), row).out;
    out.insert(out.end(), its.begin(), its.end());
  }
  return out;
}

std::vector<float> LatentDecodeTrial::on_cpu() {
  ThreadPool pool(0);
  const Stream stream(pool);
  const int64_t rows = problem_.query_start.back(), heads = problem_.heads;
  std::vector<float> q_latent = widen(q_latent_), q_rope = widen(q_rope_),
                     out(static_cast<size_t>(rows * heads * kLatent));
  const LatentPages pages{{.format = CacheFormat::kF32},
                          reinterpret_cast<std::byte*>(decoded_.data()),
                          std::ssize(decoded_) / (kPageSize * kColumns)};
  std::vector<std::byte> workspace(static_cast<size_t>(
      absorbed_attention_workspace_bytes(rows, heads, kLatent, pool.num_threads(), kRope)));
  absorbed_attention(stream, ConstTensorView(q_latent.data(), {rows, heads, kLatent}),
                     ConstTensorView(q_rope.data(), {rows, heads, kRope}), problem_.batch(),
                     problem_.sequences, pages, kScale,
                     TensorView(out.data(), {rows, heads, kLatent}), workspace);
  return out;
}

std::vector<float> LatentDecodeTrial::on_gpu(int launches) const {
  const int processors = DeviceContext::current().num_multiprocessors();
  const auto plan =
      plan_latent_decode(problem_.batch(), problem_.sequences, problem_.heads, processors);
  const DeviceArray<uint16_t> q_latent(q_latent_), q_rope(q_rope_);
  const DeviceArray<std::byte> pages(pages_);
  const DeviceArray<int32_t> tables(problem_.block_tables);
  const DeviceArray<LatentDecodePart> parts(plan.parts);
  const DeviceArray<int32_t> first_part(plan.first_part);
  const DeviceArray<float> scratch(latent_decode_scratch(processors).words());
  const DeviceArray<uint16_t> out(problem_.rows() * kLatent);
  prepare_latent_decode_scratch(scratch.data(), processors, nullptr);
  const LatentDecodeArguments arguments = {
      .rows = problem_.query_start.back(),
      .q_latent = q_latent.data(),
      .q_rope = q_rope.data(),
      .pages = pages.data(),
      .num_pages = std::ssize(decoded_) / (kPageSize * kColumns),
      .block_tables = tables.data(),
      .out = out.data(),
      .heads = problem_.heads,
      .softmax_scale = kScale,
      .parts = parts.data(),
      .first_part = first_part.data(),
      .scratch = scratch.data(),
      .format = format_};
  std::vector<uint16_t> first;
  for (int i = 0; i < launches; ++i) {
    check(cudaMemset(out.data(), 0xFF, out.bytes()), "poison");
    latent_decode(plan.tile_rows, processors, arguments, nullptr);
    check(cudaDeviceSynchronize(), "synchronize");
    const auto values = out.to_host();
    if (i == 0) first = values;
    EXPECT_EQ(values, first) << "launch " << i;
  }
  for (const float word : scratch.to_host()) {
    const bool as_found = word == 0 && std::signbit(word);
    EXPECT_TRUE(as_found);
    if (!as_found) break;
  }
  return widen(first);
}

namespace {

// ||actual - expected|| / ||expected||
template <typename T>
double relative_error(const std::vector<float>& actual, const std::vector<T>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::quiet_NaN();
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace

double LatentDecodeTrial::error(int launches) {
  const auto expected = on_cpu();
  return relative_error(on_gpu(launches), expected);
}

double LatentDecodeTrial::worst_certain_error(int64_t& certain, int64_t& all) const {
  const std::vector<float> actual = on_gpu(1);
  double worst = 0;
  for (int64_t row = 0; row < problem_.rows(); ++row, ++all) {
    const Softmax expected = softmax_of(sequence_of(row), row);
    const auto its = actual.begin() + row * kLatent;
    const double error = relative_error({its, its + kLatent}, expected.out);
    if (std::isnan(error)) return error;
    if (!expected.certainty.is_certain) continue;
    ++certain;
    worst = std::max(worst, error);
  }
  return worst;
}

double LatentDecodeTrial::error_to_double(int launches) const {
  return relative_error(on_gpu(launches), in_double());
}

}  // namespace fathom::cuda
